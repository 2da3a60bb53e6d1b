"""``ftis-node lab``: experiments, their reports, and trainings that are done again."""

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import JsonOption, print_answer
from ftis_node.errors import UsageError
from ftis_node.text import say

app = typer.Typer(no_args_is_help=True)


@app.command("run")
def run(
    name: Annotated[str, typer.Argument(metavar="FILE", help="A lab file (TOML), or the name of a built-in one.")],
    out: Annotated[Path | None, typer.Option(help="Where results go; the same again goes on.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Trials side by side; default: one a core, or GPU.")] = None,
    procs: Annotated[bool, typer.Option("--procs", help="A compute process for each node.")] = False,
    cache: Annotated[Path | None, typer.Option(help="For trials and warm-ups; default: in --out.")] = None,
    seeds: Annotated[str, typer.Option(help="Only these of the file's seeds, for example 0,1,2.")] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="So many steps in place of the file's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say the plan, the memory and the hours.")] = False,
    vram: Annotated[
        float, typer.Option(min=1, help="GB of the GPU that --dry-run plans for, otherwise an RTX 4090.")
    ] = 24.0,
    json: JsonOption = False,
) -> None:
    """Run an experiment: all its trials that are not finished yet. Ctrl-C saves; the same command goes on."""
    from ftis_node.lab.loading import find_experiment, load_experiment, narrowed

    file = find_experiment(name)
    experiment = narrowed(load_experiment(file), seeds=seeds, steps=steps)
    if dry_run:
        from ftis_node.lab.forecast import forecast, forecast_text
        from ftis_node.lab.step_seconds import Card

        report = forecast(experiment, Card(vram=vram))
        print_answer(report, *forecast_text(report).splitlines(), json=json)
        return
    if out is None:
        raise UsageError("There is no place for the results.", "Name one with --out DIR, or use --dry-run.")
    from ftis_node.lab.runner import Runner

    summary = Runner(experiment, file, out, cache=cache, jobs=jobs, processes=procs).run()
    line = f"{summary['trials']} trials in {out}; ftis-node lab report {out} says what they show."
    print_answer(summary, line, *(f"checkpoint: {path}" for path in summary["checkpoints"]), json=json)


@app.command("report")
def report(
    out: Annotated[Path, typer.Argument(help="The directory that `lab run` wrote to.")],
    destination: Annotated[Path | None, typer.Option("--to", help="Where to write; default: report/ in it.")] = None,
    json: JsonOption = False,
) -> None:
    """Write the report of an experiment: claims with their tests, curves, tables (Markdown, PNG, CSV)."""
    from ftis_node.lab.reporting.report import write_report
    from ftis_node.observe.plot import check_drawing

    check_drawing()
    written = write_report(out, destination)
    print_answer({"report": str(written)}, written, json=json)


@app.command("replay")
def replay(
    home: Annotated[Path, typer.Argument(help="The home of a daemon that is not running; it is only read.")],
    task: Annotated[str | None, typer.Option(help="Its task, where that is Python, which only you may name.")] = None,
    json: JsonOption = False,
) -> None:
    """Take a daemon's steps again from its log and its packets, and compare.

    On a CPU it arrives at the same weights bit for bit; exit code 1: it did not.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")  # as the compute process does
    from ftis_node.lab.replaying.compared import told
    from ftis_node.lab.replaying.replay import replay as replayed

    report = replayed(home.expanduser(), task=task)
    print_answer(report, *told(report).splitlines(), json=json)
    if report["exact"] and not report["identical"]:
        sys.exit(1)


@app.command("simulate")
def simulate(
    nodes: Annotated[str, typer.Option(help="How many, a simulation for each number.")] = "10,100",
    seconds: Annotated[float, typer.Option(min=1, help="Simulated seconds of each.")] = 900.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is random.")] = 0,
    success: Annotated[float | None, typer.Option(min=0, max=1, help="Chance of a right answer.")] = None,
    json: JsonOption = False,
) -> None:
    """Simulate swarms of many nodes without models: traffic, batches, waiting, speed-up over training alone."""
    from ftis_node.lab.simulation.scenario import Scenario
    from ftis_node.lab.simulation.simulate import Simulation
    from ftis_node.lab.simulation.tally import table

    parts = nodes.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 2 for part in parts):
        raise UsageError(f"--nodes {nodes} is not a list of numbers from 2.", "Write for example --nodes 10,100,1000.")
    results = []
    for count in map(int, parts):

        def progress(now: float, count: int = count) -> None:
            say(f"{count} nodes: second {now:.0f} of {seconds:.0f}", error=True, flush=True)

        scenario = Scenario(nodes=count, seconds=seconds, seed=seed)
        if success is not None:
            scenario = scenario.with_success(success)
        results.append(Simulation(scenario).run(progress))
    print_answer({"simulations": results}, *table(results).splitlines(), json=json)
