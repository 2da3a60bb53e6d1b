"""``ftis-node bench``: measurements that anyone can repeat."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.common import JsonOption, print_answer
from ftis_node.errors import UsageError
from ftis_node.text import say

if TYPE_CHECKING:
    from ftis_node.config.settings import Settings
    from ftis_node.lab.bench.model import Size

Threads = Annotated[int, typer.Option(min=1, help="Threads of torch.")]


@dataclass(frozen=True)
class Measured:
    """The options of what is measured on a small model, or on another."""

    model: Annotated[str | None, typer.Option(help="Measure this model instead of a small one.")] = None
    random_weights: Annotated[bool, typer.Option("--random-weights", help="With --model: its geometry only.")] = False
    vram: Annotated[float | None, typer.Option(help="With --model: memory in GB, enforced on a GPU.")] = None
    lora: Annotated[bool | None, typer.Option("--lora/--full", help="With --model; else as the plan says.")] = None
    device: Annotated[str, typer.Option(help="With --model.")] = "auto"
    groups: Annotated[int | None, typer.Option(min=1, help="Prompts in a step; 8, with --model 24.")] = None
    group: Annotated[int, typer.Option(min=1, help="Completions of each.")] = 12
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="40, with --model 60.")] = None
    completion_tokens: Annotated[int | None, typer.Option(min=2, help="64, with --model 256.")] = None
    repeats: Annotated[int | None, typer.Option(min=1, help="How often; 7, with --model 3.")] = None
    threads: Threads = 1
    json: JsonOption = False

    @property
    def size(self) -> Size:
        """Less with the small model, by default."""
        from ftis_node.lab.bench.model import Size

        groups, prompt, completion = (8, 40, 64) if self.model is None else (24, 60, 256)
        return Size(
            self.groups or groups, self.group, self.prompt_tokens or prompt, self.completion_tokens or completion
        )

    @property
    def times(self) -> int:
        return self.repeats or (7 if self.model is None else 3)

    def settings(self) -> Settings:
        from ftis_node.config.settings import collect

        flags = {"model": self.model, "lora": self.lora, "vram_gb": self.vram, "device": self.device}
        return collect(task="", flags=flags)[0]


def measured(command: Callable[[Measured], None]) -> Callable[..., None]:
    """Give a command the options of `Measured`."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        import torch

        asked = Measured(**given)
        if asked.model is None and (asked.random_weights or asked.vram is not None or asked.lora is not None):
            raise UsageError("--random-weights, --vram, --lora and --full need a model.", "Name one with --model.")
        torch.set_num_threads(asked.threads)
        command(asked)

    run.__signature__ = signature = inspect.signature(Measured, eval_str=True)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    return run


app = typer.Typer(no_args_is_help=True, help="Measure speed and traffic.")


@app.command("wire")
def wire(
    repeats: Annotated[int, typer.Option(min=1, help="How often each operation is timed.")] = 200,
    json: JsonOption = False,
) -> None:
    """Size of a 12 × 256-token packet; the time to encode, decode, admit it, and to read it between tokenizers."""
    from ftis_node.lab.bench.wire import bench_wire

    _print(bench_wire(repeats), 21, json)


@app.command("train")
@measured
def train(asked: Measured) -> None:
    """CPU time of a step of a small model, beside TRL's GRPOTrainer on the same batch; or what --model takes here."""
    if asked.model is None:
        from ftis_node.lab.bench.train import bench_train

        figures = bench_train(asked.size, repeats=asked.times, tell=_tell)
    else:
        from ftis_node.lab.bench.fit import bench_fit

        random = asked.random_weights
        figures = bench_fit(asked.settings(), asked.size, random_weights=random, repeats=asked.times, tell=_tell)
    _print(figures, 23, asked.json)


@app.command("generate")
@measured
def generate(asked: Measured) -> None:
    """Tokens a second of generation: our engine, and transformers' generate, in turns."""
    from ftis_node.lab.bench.generate import bench_generate, sized_policy, small_policy

    if asked.model is None:
        policy, batch = small_policy(), asked.size.completions
    else:
        policy, batch = sized_policy(asked.settings(), asked.size, random_weights=asked.random_weights)
    _print(bench_generate(policy, asked.size, batch=batch, repeats=asked.times, tell=_tell), 27, asked.json)


@app.command("step")
def step(
    groups: Annotated[int, typer.Option(min=1, help="Prompts in a step.")] = 8,
    group: Annotated[int, typer.Option(min=2, help="Completions of each.")] = 12,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 40,
    completion_tokens: Annotated[int, typer.Option(min=2)] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 7,
    threads: Threads = 1,
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

    torch.set_num_threads(threads)
    _print(bench_step(size, repeats=repeats, trace=trace, tell=_tell), 23, json)


@app.command("swarm")
def swarm(
    nodes: Annotated[int, typer.Option(min=2, max=64, help="How many; each has a p2pd of its own.")] = 16,
    per_process: Annotated[int, typer.Option(min=1, help="Nodes that share a process.")] = 4,
    groups: Annotated[int, typer.Option(min=1, max=64, help="Packets that a node makes at a time.")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="Of each of a packet's 12 completions.")] = 384,
    repetitions: Annotated[int, typer.Option(min=1, help="How often everybody sends everything to everybody.")] = 20,
    exchange_peers: Annotated[int, typer.Option(min=1, max=32, help="Peers that a node asks for news at a time.")] = 6,
    uplink: Annotated[float | None, typer.Option(min=0.1, help="Mbit/s, in network namespaces; needs root.")] = None,
    json: JsonOption = False,
) -> None:
    """All-gather of packets by announcing and pulling, beside a plain push of the same."""
    import asyncio

    from ftis_node.lab.bench.swarm import Plan, all_gather

    plan = Plan(nodes, per_process, groups, tokens, repetitions, uplink_mbit=uplink, exchange_peers=exchange_peers)
    _print(asyncio.run(all_gather(plan, _tell)), 25, json)


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
