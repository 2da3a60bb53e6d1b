"""Counts of a simulation, and the figures that follow from them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ftis_node.lab.simulation.directory import directory_figures
from ftis_node.lab.simulation.network import KINDS, Meter
from ftis_node.lab.simulation.scenario import Machine, Scenario
from ftis_node.node.demand import OWN_SHARE_FLOOR


@dataclass(frozen=True)
class Step:
    """Of one step: foreign groups wanted and taken (their keys: author, round, slot), their ages and the waiting for
    them in seconds."""

    wanted: int
    taken: list[tuple[bytes, int, int]]
    ages: list[float]
    waited: float


@dataclass(frozen=True)
class Presence:
    """One node in the time that counts, from `meter.since` on. until: the second when it left, or the end."""

    machine: Machine
    meter: Meter
    until: float

    @property
    def seconds(self) -> float:
        """The time that it was there and that counts; 0 for one that left at once."""
        return self.until - self.meter.since

    @property
    def upload(self) -> float:
        """Bytes that it sent in a second. Raises ZeroDivisionError for one that was there for no time."""
        return self.meter.out.total() / self.seconds


@dataclass
class Tally:
    """Steps and departures after the warm-up. `steps`: with their seconds, in the order in which they ended."""

    scenario: Scenario
    steps: list[tuple[Machine, Step, float]] = field(default_factory=list)
    gone: list[Presence] = field(default_factory=list)

    def start(self) -> None:
        """From now on everything counts, and nothing of before."""
        self.steps.clear()
        self.gone.clear()


def figures(
    tally: Tally,
    staying: Sequence[Presence],
    first: Sequence[Machine],
    now: float,
) -> dict[str, Any]:
    """All figures of a simulation in plain values; None where nothing happened that would have given one. It is what
    `lab simulate --json` prints, and `table` reads. It also simulates the DHT (`directory_figures`).

    Args:
        staying: the nodes that are there at the end.
        first: the machines that were there at the start, for the training in lock step.
        now: the second at which it ended.
    """
    scenario = tally.scenario
    presences = [*tally.gone, *staying]
    node_seconds = sum(presence.seconds for presence in presences)
    out = Counter[str]()
    inwards = Counter[str]()
    counts = Counter[str]()
    for presence in presences:
        out += presence.meter.out
        inwards += presence.meter.inwards
        counts += presence.meter.counts
    used = sum(len(step.taken) for _, step, _ in tally.steps)
    found: dict[str, Any] = {
        "nodes": scenario.nodes,
        "seconds": scenario.seconds,
        "counted_seconds": now - scenario.warmup,
        "seed": scenario.seed,
        "left": len(tally.gone),
        "bytes_out_per_node_s": {kind: out[kind] / node_seconds for kind in KINDS},
        "bytes_in_per_node_s": {kind: inwards[kind] / node_seconds for kind in KINDS},
        "bytes_in_per_group_used": inwards.total() / max(1, used),
        "messages_per_node_s": counts["messages"] / node_seconds,
        "handshakes_per_node_s": counts["handshakes"] / node_seconds,
        "exchanges_per_node_s": counts["exchanges"] / node_seconds,
        "connections_per_node_hour": 3600 * counts["connections"] / node_seconds,
        "look_ups_per_node_hour": 3600 * counts["look_ups"] / node_seconds,
        "packets_busy": _ratio(counts["busy"], counts["packets asked"]),
        **_hot_spots(presences),
        **_batches(tally),
        **_pace(tally, first),
        **directory_figures(scenario),
    }
    for name, value in found.items():
        if value != value:  # NaN alone
            found[name] = None  # JSON knows no NaN
    return found


def _hot_spots(presences: Sequence[Presence]) -> dict[str, float]:
    """Upload of single nodes over the mean, of those who were there for at least half of the longest time."""
    longest = max(presence.seconds for presence in presences)
    rates = [presence.upload for presence in presences if presence.seconds >= longest / 2 > 0]
    mean = np.mean(rates)
    return {
        "upload_p99_over_mean": _ratio(np.percentile(rates, 99), mean),
        "upload_max_over_mean": _ratio(max(rates), mean),
    }


def _batches(tally: Tally) -> dict[str, float]:
    """What the steps were made of: means and percentiles over steps, or over foreign groups for ages."""
    wanted = []
    taken = []
    authors = []
    ages = []
    waited = []
    for _, step, _ in tally.steps:
        wanted.append(step.wanted)
        taken.append(len(step.taken))
        authors.append(len({author for author, _, _ in step.taken}))
        ages += step.ages
        waited.append(step.waited)
    return {
        "steps": len(tally.steps),
        "foreign_wanted": _mean(wanted),
        "fill": _ratio(sum(taken), sum(wanted)),
        "authors_per_batch": _mean(authors),
        "age_p50": _percentile(ages, 50),
        "age_p95": _percentile(ages, 95),
        "waiting_mean": _mean(waited),
        "waiting_p95": _percentile(waited, 95),
    }


def _pace(tally: Tally, first: Sequence[Machine]) -> dict[str, float]:
    """Steps beside training alone, and beside lock step with the same machines.

    The speed-up is what the steps that ended would have taken alone over what they took, so it does not hang on how
    many steps of a slow node there is time for.

    In lock step a node generates the same part of its batch as here (a quarter, or 1/N), everybody trains on what all
    made, and a round takes as long as its slowest node; sending takes no time, and nobody leaves.
    """
    batch = tally.scenario.settings.batch_groups
    own_share = max(1 / len(first), OWN_SHARE_FLOOR)
    own = math.ceil(own_share * batch)
    rounds = [own * machine.group_seconds + machine.train_seconds for machine in first]
    round_seconds = max(rounds)
    alone_hour = _mean([3600 / machine.alone_seconds(batch) for machine in first])
    lockstep_hour = 3600 / round_seconds
    alone = 0.0
    taken = 0.0
    for machine, _, seconds in tally.steps:
        alone += machine.alone_seconds(batch)
        taken += seconds
    return {
        "alone_steps_per_node_hour": alone_hour,
        "lockstep_steps_per_node_hour": lockstep_hour,
        "speedup": _ratio(alone, taken),
        "lockstep_speedup": lockstep_hour / alone_hour,
    }


def _ratio(part: Any, whole: Any) -> float:
    """NaN for a whole of 0, as in the two below for no values; `figures` makes None of it."""
    if not whole:
        return math.nan
    return float(part / whole)


def _mean(values: Sequence[float]) -> float:
    if not values:
        return math.nan
    return float(np.mean(values))


def _percentile(values: Sequence[float], percent: int) -> float:
    if not values:
        return math.nan
    return float(np.percentile(values, percent))


_ROWS = (
    ("nodes", "{nodes}"),
    ("seconds, of which counted", "{seconds:.0f}, {counted_seconds:.0f}"),
    ("gossip, bytes/s a node out", "{bytes_out_per_node_s[gossip]:,.0f}"),
    ("gossip, bytes/s a node in", "{bytes_in_per_node_s[gossip]:,.0f}"),
    ("membership, bytes/s a node out", "{bytes_out_per_node_s[membership]:,.0f}"),
    ("packets, bytes/s a node out", "{bytes_out_per_node_s[packets]:,.0f}"),
    ("packets, bytes/s a node in", "{bytes_in_per_node_s[packets]:,.0f}"),
    ("handshakes begun a node and second", "{handshakes_per_node_s:.3f}"),
    ("look-ups in the DHT a node and hour", "{look_ups_per_node_hour:.2f}"),
    ("bytes in a group used", "{bytes_in_per_group_used:,.0f}"),
    ("busiest node of the DHT, bytes/s out", "{directory_busiest_bytes_out_s:,.0f}"),
    ("mean node of the DHT, bytes/s out", "{directory_bytes_out_per_node_s:,.0f}"),
    ("exchanges begun a node and second", "{exchanges_per_node_s:.3f}"),
    ("upload, p99 over mean", "{upload_p99_over_mean:.2f}"),
    ("upload, maximum over mean", "{upload_max_over_mean:.2f}"),
    ("foreign groups wanted a batch", "{foreign_wanted:.2f}"),
    ("of these there in time (fill)", "{fill:.1%}"),
    ("foreign authors a batch", "{authors_per_batch:.2f}"),
    ("age of a foreign sample, p50, s", "{age_p50:.1f}"),
    ("age of a foreign sample, p95, s", "{age_p95:.1f}"),
    ("waiting a step, mean, s", "{waiting_mean:.2f}"),
    ("packets answered with busy", "{packets_busy:.1%}"),
    ("steps counted", "{steps}"),
    ("a step alone over a step here (speed-up)", "{speedup:.2f}"),
    ("lock step over alone", "{lockstep_speedup:.2f}"),
)
_NOTHING = "–"


def table(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: a column for each simulation, a row for each of the main figures, and below what is missing.

    Args:
        results: what `figures` gave, one each.
    """
    lines = []
    all_told = []
    for label, form in _ROWS:
        told = [_told(form, result) for result in results]
        all_told += told
        lines.append(f"| {label} | {' | '.join(told)} |")
    lines.insert(1, "|---" * (len(results) + 1) + "|")  # the numbers of nodes are the header
    if _NOTHING in all_told:
        lines += ["", f"{_NOTHING}: there was nothing to count in the seconds counted."]
    short = [3600 / result["alone_steps_per_node_hour"] for result in results if not result["steps"]]
    if short:
        lines[-1] += f" No step ended in them: alone one takes {max(short):.0f} s, so simulate more --seconds."
    return "\n".join(lines)


def _told(form: str, result: dict[str, Any]) -> str:
    """A cell of the table, with a dash for None."""
    try:
        return form.format(**result)
    except TypeError:  # None has no digits
        return _NOTHING
