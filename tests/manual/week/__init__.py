"""A week of use in two hours: `make week`.

Real daemons, each in a network namespace of its own, in four runs at once. What happens to them is data (`diary`); the
processes are in `fleet`, what is done to them in `deeds`, what is measured in `gauges`, what must not be in `verdict`,
`explained`. Clocks are shifted (`shifted`), so that seven days pass; all else takes its real time.
"""
