"""The cost of a whole step, from prompts to changed weights: ours and TRL's, taken in turns in one process."""

import asyncio
import contextlib
import statistics
import tempfile
from pathlib import Path

import torch

from ftis_node.errors import UsageError
from ftis_node.lab.bench.measure import Figures, Tell, beside, in_turns, measured_on
from ftis_node.lab.bench.model import Size, small_config
from ftis_node.lab.bench.trl import WholeTrl, fastest
from ftis_node.lab.bench.whole import WholeNode, questions

PARTS = ("generate", "score", "train")


def bench_step(size: Size, *, repeats: int, trace: Path | None, tell: Tell) -> Figures:
    """CPU-seconds of a whole step: generate, score, encode, admit, store, train; and of TRL's, generation included.

    Args:
        trace: where a profiler's trace of one more step is written, in Chrome's format, which Perfetto opens.
        tell: is told of progress.

    Returns:
        Medians over `repeats` steps of each; `ratio` is ours over TRL's, `*_spread` minimum and maximum. `*_cpu_s` of
        a part are CPU-seconds of ours; `rest` is what is none of the three. `idle_share` is of wall time: the part of a
        step in which the model neither generates nor trains. TRL's figures are None if it is not installed.

    Raises:
        UsageError: the trace cannot be written.
        RuntimeError: a step took no update.
    """
    if trace is not None:
        _check_writable(trace)
    config = small_config()
    traced = None
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        node = stack.enter_context(contextlib.closing(WholeNode(config, size, folder)))
        prompts = questions(size, node.engine.policy.vocabulary)

        def warm(micro_batch: int) -> WholeTrl:
            trl = WholeTrl(config, prompts, size, micro_batch, folder / "trl")
            trl.step()
            return trl

        steps = []

        def ours() -> None:
            steps.append(asyncio.run(node.step()))

        trl = fastest(warm, size, 1, tell)
        asyncio.run(node.step())  # to warm up
        rival = None
        rival_size = None
        if trl is not None:
            rival = trl.step
            rival_size = trl.micro_batch
        ours_s, trl_s = in_turns(ours, rival, repeats, tell)
        if trace is not None:
            tell(f"tracing a step into {trace}")
            _trace(node, trace)
            traced = str(trace)
        machine = measured_on(node.engine.policy, size, repeats)
    parts = {}
    for part in PARTS:
        parts[f"{part}_cpu_s"] = statistics.median(each[f"cpu_{part}"] for each in steps)
    idle = [each["step_idle"] / each["step_total"] for each in steps]
    return {
        **beside(ours_s, trl_s),
        **parts,
        "rest_cpu_s": statistics.median(ours_s) - sum(parts.values()),
        "idle_share": statistics.median(idle),
        "trl_micro_batch": rival_size,
        "trace": traced,
        **machine,
    }


def _trace(node: WholeNode, path: Path) -> None:
    """Records every operator of a step, under the names of its parts."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        asyncio.run(node.step())
    profile.export_chrome_trace(str(path))


def _check_writable(path: Path) -> None:
    """Told before the steps, not after."""
    try:
        path.touch()
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}."
        raise UsageError(what, "Name a file in a folder that exists.") from None
