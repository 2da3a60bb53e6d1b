"""``ftis-node bench``: measurements that anyone can repeat."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import JsonOption, SetOption, parse_pairs, print_answer

Model = Annotated[str | None, typer.Option(help="Folder, short name, hub id; default: a random one of a million.")]
Data = Annotated[Path | None, typer.Option(help="A file of GSM8K's questions for it; default: arithmetic.")]
Groups = Annotated[int, typer.Option(min=1, help="Prompts in a step.")]
Group = Annotated[int, typer.Option(min=2, help="Completions of each.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Of the random model's prompts.")]
CompletionTokens = Annotated[int, typer.Option(min=2)]
Repeats = Annotated[int, typer.Option(min=1, help="How often it is timed.")]

app = typer.Typer(no_args_is_help=True)


@app.command("wire")
def wire(repeats: Repeats = 200, json: JsonOption = False) -> None:
    """Size of a 12 × 256-token packet; the time to encode, decode, admit it, and to read it between tokenizers."""
    from ftis_node.lab.bench.wire import bench_wire

    _print(bench_wire(repeats), json)


def _beside_another(name: str, says: str) -> None:
    """Make the command that shows what `bench_NAME` of the lab measures: our code, and another's, on the same batch."""

    def compare(
        model: Model = None,
        data: Data = None,
        set_: SetOption = None,
        groups: Groups = 8,
        group: Group = 12,
        prompt_tokens: PromptTokens = 40,
        completion_tokens: CompletionTokens = 64,
        repeats: Repeats = 7,
        json: JsonOption = False,
    ) -> None:
        from ftis_node.lab.bench.model import Size

        measure = getattr(import_module(f"ftis_node.lab.bench.{name}"), f"bench_{name}")
        size = Size(groups, group, prompt_tokens, completion_tokens)
        _print(measure(model, data, parse_pairs(set_), size, repeats=repeats), json)

    app.command(name, help=says)(compare)


_beside_another("train", "CPU time of a training step, beside TRL's GRPOTrainer on the same batch.")
_beside_another("generate", "Tokens a second of generation: our engine, and transformers' generate, in turns.")


@app.command("step")
def step(
    model: Model = None,
    data: Data = None,
    set_: SetOption = None,
    groups: Groups = 8,
    group: Group = 12,
    prompt_tokens: PromptTokens = 40,
    completion_tokens: CompletionTokens = 64,
    repeats: Repeats = 7,
    trace: Annotated[Path | None, typer.Option(help="For a profiler's trace of one more step (Perfetto).")] = None,
    devices: Annotated[str | None, typer.Option(help="Compare these with their first: cuda:0,cuda:1.")] = None,
    json: JsonOption = False,
) -> None:
    """CPU time of a whole step, in parts, beside TRL's GRPOTrainer with its own generation."""
    from ftis_node.lab.bench.model import Size

    size = Size(groups, group, prompt_tokens, completion_tokens)
    if devices is not None:
        from ftis_node.lab.bench.devices import bench_devices

        _print(bench_devices(size, devices, repeats=repeats), json)
        return
    from ftis_node.lab.bench.step import bench_step

    _print(bench_step(model, data, parse_pairs(set_), size, repeats=repeats, trace=trace), json)


@app.command("swarm")
def swarm(
    nodes: Annotated[int, typer.Option(min=2, max=64, help="How many; each has a p2pd of its own.")] = 16,
    per_process: Annotated[int, typer.Option(min=1, help="Nodes that share a process.")] = 4,
    groups: Annotated[int, typer.Option(min=1, max=64, help="Packets that a node makes at a time.")] = 6,
    uplink: Annotated[float | None, typer.Option(min=0.1, help="Mbit/s, in network namespaces; needs root.")] = None,
    json: JsonOption = False,
) -> None:
    """All-gather of packets by announcing and pulling, beside a plain push of the same."""
    import asyncio

    from ftis_node.lab.bench.swarm import Plan, all_gather

    _print(asyncio.run(all_gather(Plan(nodes, per_process, groups, uplink_mbit=uplink))), json)


def _print(figures: Mapping[str, object], json: bool) -> None:
    """Print JSON for a script, else a line for each figure."""
    width = max(map(len, figures))
    print_answer(figures, *(f"{key:{width}} {_human(value)}" for key, value in figures.items()), json=json)


def _human(value: object) -> str:
    """A figure, a spread of them, or what is not a number."""
    if isinstance(value, list):
        return " to ".join(_human(part) for part in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_human(part)}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return "-"
    return str(value)
