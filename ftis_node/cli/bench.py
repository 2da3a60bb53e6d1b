"""``ftis-node bench``: measurements that anyone can repeat."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.common import JsonOption, print_answer
from ftis_node.errors import UsageError
from ftis_node.text import say

Groups = Annotated[int, typer.Option(min=1, help="Prompts in a step.")]
Group = Annotated[int, typer.Option(min=2, help="Completions of each.")]
PromptTokens = Annotated[int, typer.Option(min=1)]
CompletionTokens = Annotated[int, typer.Option(min=2)]
Repeats = Annotated[int, typer.Option(min=1, help="How often it is timed.")]

app = typer.Typer(no_args_is_help=True, help="Measure speed and traffic.")


@app.command("wire")
def wire(repeats: Repeats = 200, json: JsonOption = False) -> None:
    """Size of a 12 × 256-token packet; the time to encode, decode, admit it, and to read it between tokenizers."""
    from ftis_node.lab.bench.wire import bench_wire

    _print(bench_wire(repeats), 21, json)


@app.command("train")
def train(
    groups: Groups = 8,
    group: Group = 12,
    prompt_tokens: PromptTokens = 40,
    completion_tokens: CompletionTokens = 64,
    repeats: Repeats = 7,
    json: JsonOption = False,
) -> None:
    """CPU time of a step of a small model, beside TRL's GRPOTrainer on the same batch."""
    import torch

    from ftis_node.lab.bench.model import Size
    from ftis_node.lab.bench.train import bench_train

    torch.set_num_threads(1)
    size = Size(groups, group, prompt_tokens, completion_tokens)
    _print(bench_train(size, repeats=repeats, tell=_tell), 23, json)


@app.command("generate")
def generate(
    groups: Groups = 8,
    group: Group = 12,
    prompt_tokens: PromptTokens = 40,
    completion_tokens: CompletionTokens = 64,
    repeats: Repeats = 7,
    json: JsonOption = False,
) -> None:
    """Tokens a second of generation: our engine, and transformers' generate, in turns."""
    import torch

    from ftis_node.lab.bench.generate import bench_generate, small_policy
    from ftis_node.lab.bench.model import Size

    torch.set_num_threads(1)
    size = Size(groups, group, prompt_tokens, completion_tokens)
    _print(bench_generate(small_policy(), size, batch=size.completions, repeats=repeats, tell=_tell), 27, json)


@app.command("step")
def step(
    groups: Groups = 8,
    group: Group = 12,
    prompt_tokens: PromptTokens = 40,
    completion_tokens: CompletionTokens = 64,
    repeats: Repeats = 7,
    trace: Annotated[Path | None, typer.Option(help="For a profiler's trace of one more step (Perfetto).")] = None,
    devices: Annotated[str | None, typer.Option(help="Compare these with their first: cuda:0,cuda:1.")] = None,
    json: JsonOption = False,
) -> None:
    """CPU time of a whole step of a small model, in parts, beside TRL's GRPOTrainer with its own generation."""
    from ftis_node.lab.bench.model import Size

    size = Size(groups, group, prompt_tokens, completion_tokens)
    if devices is not None:
        from ftis_node.config.settings import collect
        from ftis_node.lab.bench.devices import bench_devices

        settings, _ = collect(task="arithmetic", flags={"device": devices}, environment={})
        if len(settings.devices) == 1:
            raise UsageError("One device is nothing to compare.", "Name several, such as --devices cpu,cpu.")
        _print(bench_devices(size, settings.devices, repeats=repeats, tell=_tell), 23, json)
        return
    import torch

    from ftis_node.lab.bench.step import bench_step

    torch.set_num_threads(1)
    _print(bench_step(size, repeats=repeats, trace=trace, tell=_tell), 23, json)


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

    _print(asyncio.run(all_gather(Plan(nodes, per_process, groups, uplink_mbit=uplink), _tell)), 25, json)


def _print(figures: Mapping[str, object], width: int, json: bool) -> None:
    """Print JSON for a script, else a line for each figure with names so wide."""
    print_answer(figures, *(f"{key:{width}} {_human(value)}" for key, value in figures.items()), json=json)


def _tell(line: str) -> None:
    say(line, error=True)


def _human(value: object) -> str:
    """A figure, a spread of them, or what is not a number."""
    if isinstance(value, list):
        return " to ".join(_human(part) for part in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_human(part)}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
