"""``ftis-node bench``: measurements that anyone can repeat."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ftis_node.cli.common import JsonOption, print_json

app = typer.Typer(no_args_is_help=True, help="Measurements.")


@app.callback()
def bench() -> None:
    """Measurements that anyone can repeat."""


@app.command("wire")
def wire(
    repeats: Annotated[int, typer.Option(min=1, help="How often each operation is timed.")] = 200,
    json: JsonOption = False,
) -> None:
    """Size of a 12 × 256-token packet, and the time to encode, decode and admit it."""
    from ftis_node.lab.bench_wire import bench_wire

    figures = bench_wire(repeats)
    if json:
        print_json(figures)
    else:
        for key, value in figures.items():
            print(f"{key:20} {value:.4g}")


@app.command("train")
def train(
    groups: Annotated[int, typer.Option(min=1, help="Prompts in a step.")] = 8,
    group: Annotated[int, typer.Option(min=2, help="Completions of each.")] = 12,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 40,
    completion_tokens: Annotated[int, typer.Option(min=1)] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    json: JsonOption = False,
) -> None:
    """CPU time of a training step of a small model, ours beside that of TRL's GRPOTrainer on the same batch."""
    from ftis_node.lab.bench_model import Size
    from ftis_node.lab.bench_train import bench_train

    size = Size(groups, group, prompt_tokens, completion_tokens)
    figures = bench_train(size, repeats=repeats, threads=threads, tell=_tell)
    if json:
        print_json(figures)
    else:
        for key, value in figures.items():
            print(f"{key:20} {_human(value)}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _human(value: object) -> str:
    """A figure, a spread of them, or what is not a number."""
    if isinstance(value, list):
        return " to ".join(_human(part) for part in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)
