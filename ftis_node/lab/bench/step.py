"""The cost of a whole step, from prompts to changed weights: ours and TRL's, taken in turns in one process."""

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ftis_node.errors import UsageError
from ftis_node.lab.bench import Tell, told
from ftis_node.lab.bench.measure import Figures, measured_on
from ftis_node.lab.bench.model import Size
from ftis_node.lab.bench.trl import WholeTrl, beside_trl, fastest
from ftis_node.lab.bench.whole import WholeNode, asked

PARTS = ("generate", "score", "train")


def bench_step(
    model: str | None,
    data: Path | None,
    given: Mapping[str, str],
    size: Size,
    *,
    repeats: int,
    trace: Path | None,
    tell: Tell = told,
) -> Figures:
    """CPU-seconds of a whole step: generate, score, encode, admit, store, train; and of TRL's, generation included.

    Args:
        model, data, given: see `asked`.
        trace: where a profiler's trace of one more step is written, in Chrome's format, which Perfetto opens.
        tell: is told of progress.

    Returns:
        As `beside_trl`. `*_cpu_s` of a part are CPU-seconds of ours; `rest` is what is none of the three. `idle_share`
        is of wall time: the part of a step in which the model neither generates nor trains.

    Raises:
        UsageError: the trace cannot be written.
        RuntimeError: a step took no update.
    """
    if trace is not None:
        _check_writable(trace)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings, task = asked(model, data, given, size, folder)
        node = stack.enter_context(contextlib.closing(WholeNode(settings, size, task, folder)))
        engine = node.engine
        prompts = [engine.policy.tokenizer.decode(prompt) for prompt in engine.prompts]

        def warm(micro_batch: int) -> WholeTrl:
            trl = WholeTrl(engine.policy, engine.settings, prompts, size, micro_batch, folder / "trl")
            trl.step()
            return trl

        steps = []

        def ours() -> None:
            steps.append(asyncio.run(node.step()))

        longest = max(map(len, engine.prompts))
        size = replace(size, prompt_tokens=longest)
        trl = fastest(warm, engine.policy, size, 1, tell)
        figures = beside_trl(ours, engine.learner, trl, repeats, tell)
        traced = None
        if trace is not None:
            tell(f"tracing a step into {trace}")
            _trace(node, trace)
            traced = str(trace)
        machine = measured_on(engine.policy, size, repeats)
    timed = steps[1 : 1 + repeats]
    parts = {}
    for part in PARTS:
        parts[f"{part}_cpu_s"] = statistics.median(each[f"cpu_{part}"] for each in timed)
    idle = [each["step_idle"] / each["step_total"] for each in timed]
    return {
        **figures,
        **parts,
        "rest_cpu_s": figures["ours_cpu_s"] - sum(parts.values()),
        "idle_share": statistics.median(idle),
        "trace": traced,
        **machine,
    }


def _trace(node: WholeNode, path: Path) -> None:
    """Records every operator of one more step, under the names of its parts, into a file."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        asyncio.run(node.step())
    profile.export_chrome_trace(str(path))


def _check_writable(path: Path) -> None:
    """Makes the file, empty if it is new. Raises UsageError where that fails: before the steps, not after."""
    try:
        path.touch()
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}."
        raise UsageError(what, "Name a file in a folder that exists.") from None
