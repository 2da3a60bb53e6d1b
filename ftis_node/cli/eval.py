"""``ftis-node eval``: how good a model or a checkpoint is at a task."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.common import JsonOption, parse_pairs, print_json
from ftis_node.errors import UsageError

if TYPE_CHECKING:
    from ftis_node.evaluation import Judged

_QUIET_SECONDS = 2.0


def evaluate(
    checkpoint: Annotated[
        str, typer.Option(help="A checkpoint, a node's home (its newest one), or a model: short name, hub id, folder.")
    ],
    task: Annotated[str, typer.Option(help="gsm8k, math500, arithmetic, or a .jsonl file (the tenth it holds out).")],
    data: Annotated[Path | None, typer.Option(help="A local copy of the questions; all of them are used.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the model of a checkpoint is now.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Only so many questions, the first ones.")] = None,
    completion_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest completion; default: the task's.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Questions answered side by side; default: what fits.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or auto.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any setting: --set KEY=VALUE, repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="A .jsonl file for every completion with its scores.")] = None,
    json: JsonOption = False,
) -> None:
    """Greedy pass@1 with its 95 % interval; beside it the rate of right formats, and accuracy whatever the format."""
    flags = parse_pairs(set_ or []) | {"device": device}
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from ftis_node.tasks import load_evaluation, scoring

    chosen = load_evaluation(task, data=data)
    examples = chosen.held_out[:prompts]
    with contextlib.ExitStack() as stack:
        scorer = stack.enter_context(scoring(chosen.reward))  # what is missing is told before a model is loaded
        lines = stack.enter_context(_writing(out)) if out is not None else None
        from transformers.utils.logging import disable_progress_bar

        from ftis_node.evaluation import batch_that_fits, tokenised
        from ftis_node.evaluation import evaluate as measure
        from ftis_node.policy.generate import Sampling
        from ftis_node.policy.tokenizer import end_ids
        from ftis_node.trained import find_checkpoint, load_trained, settings_for
        from ftis_node.worker.planning import memory_budget

        found = find_checkpoint(checkpoint)
        if found is None and model is not None:
            raise UsageError(
                f"{checkpoint} is a model and no checkpoint, so --model says nothing.", "Leave out --model."
            )
        name = model or (found.model if found else checkpoint)
        settings, origins = settings_for(found, name, flags, chosen.name)
        for path in found.skipped if found else ():
            _note(f"{path} is damaged; an older checkpoint is used.")
        if settings.lora and origins["lora_alpha"] not in ("checkpoint", "flags"):
            _note(
                f"The checkpoint does not say LoRA's alpha; {settings.lora_alpha} is taken ({origins['lora_alpha']}). "
                "For another: --set lora_alpha=…"
            )
        disable_progress_bar()  # of transformers, for it has one even for what takes no time
        policy = load_trained(settings, found)
        cap = completion_tokens or chosen.completion_tokens
        ids = tokenised(policy, chosen, examples, cap)
        budget = memory_budget(settings, policy.device)
        side_by_side = batch or batch_that_fits(policy, max(map(len, ids)), cap, budget)
        advance = stack.enter_context(_progress(len(examples)))

        def tell(judged: Sequence[Judged]) -> None:
            advance(len(judged))
            if lines is not None:
                lines.writelines(_line(one) for one in judged)
                lines.flush()

        sampling = Sampling(cap, 1.0, end_ids(policy.tokenizer), greedy=True)
        outcome = measure(policy, ids, examples, scorer, sampling, batch=side_by_side, tell=tell)
    figures = {
        "checkpoint": str(found.path) if found else None,
        "step": found.step if found else None,
        "model": name,
        "trained": policy.kind if found else None,
        "task": chosen.name,
        "data": chosen.data,
        "reward": chosen.reward,
        "completion_tokens": cap,
        "device": str(policy.device),
        "dtype": str(policy.dtype).removeprefix("torch."),
        "lora_alpha": settings.lora_alpha if settings.lora else None,
        **outcome.figures(),
    }
    if json:
        print_json(figures)
    else:
        _print(figures)


def _print(figures: dict[str, Any]) -> None:
    step = "" if figures["step"] is None else f", step {figures['step']}"
    trained = f" ({figures['trained']}{step})" if figures["trained"] else ""
    print(f"{figures['model']}{trained} on {figures['task']}, {figures['prompts']} questions, greedy\n")
    print(
        f"  pass@1     {_percent(figures['pass_at_1'])}  95 % between {_percent(figures['low']).strip()} and ", end=""
    )
    print(_percent(figures["high"]).strip())
    print(f"  formatted  {_percent(figures['formatted'])}  <think>…</think><answer>…</answer>, and nothing else")
    print(f"  lenient    {_percent(figures['lenient'])}  the last answer is right, whatever the format")
    print(f"  finished   {_percent(figures['finished'])}  within {figures['completion_tokens']} tokens")
    print(f"\n{figures['mean_tokens']:.0f} tokens a completion, {figures['seconds']:.1f} s on {figures['device']}")


def _percent(rate: float) -> str:
    return f"{100 * rate:5.1f} %"


def _line(one: Judged) -> str:
    row = {
        "question": one.example.question,
        "gold": one.example.answer,
        "completion": one.text,
        "tokens": one.tokens,
        "finished": one.finished,
        "reward": one.score.reward,
        "formatted": one.score.formatted,
        "lenient": one.score.lenient,
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[IO[str]]:
    try:
        file = path.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", "Name another --out.") from None
    with file:
        yield file


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that appears when it takes long; gives what is called with how many more are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("questions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    bar = progress.add_task("questions", total=total)
    timer = threading.Timer(_QUIET_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda count: progress.advance(bar, count)
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
