"""What a whole step costs, from prompts to changed weights: ours and TRL's, taken in turns in one process."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ftis_node.errors import UsageError
from ftis_node.lab.bench.model import Size, geometry, small_config
from ftis_node.lab.bench.train import SETTINGS, Tell, cpu_seconds, device_name, spread
from ftis_node.lab.bench.trl import WholeTrl
from ftis_node.lab.bench.whole import WholeNode, questions, rewards

PARTS = ("generate", "score", "train")


def bench_step(size: Size, *, repeats: int, trace: Path | None, tell: Tell) -> dict[str, Any]:
    """CPU-seconds of a whole step: generate, score, encode, admit, store, train; and of TRL's, generation included.

    Args:
        trace: where a profiler's trace of one more step is written, in Chrome's format, which Perfetto opens.
        tell: is told of progress.

    Returns:
        Medians over `repeats` steps of each; `ratio` is ours over TRL's, `*_spread` minimum and maximum. `*_cpu_s` of
        a part are CPU-seconds of ours; `rest` is what is none of the three. `idle_share` is of wall time: the part of a
        step in which the model neither generates nor trains. What is TRL's is None if it is not installed.

    Raises:
        UsageError: the trace cannot be written.
        RuntimeError: a step took no update.
    """
    if trace is not None:
        _check_writable(trace)
    config = small_config()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(WholeNode(config, size, Path(folder))) as node:
        trl = _fastest_trl(config, node, Path(folder), tell)
        asyncio.run(node.step())  # to warm up
        ours_s, trl_s, devices = [], [], []
        for repeat in range(repeats):
            tell(f"step {repeat + 1} of {repeats}")
            ours_s.append(cpu_seconds(lambda: devices.append(asyncio.run(node.step())["device"])))
            if trl:
                trl_s.append(cpu_seconds(trl.step))
        if trace is not None:
            tell(f"tracing a step into {trace}")
            _trace(node, trace)
        parameters, device = node.engine.policy.parameters(), device_name(node.engine.policy.device)
    median = statistics.median(ours_s)
    trl_median = statistics.median(trl_s) if trl_s else None
    parts = {part: _median(each[f"cpu_{part}"] for each in devices) for part in PARTS}
    return {
        "ours_cpu_s": median,
        "trl_cpu_s": trl_median,
        "ratio": median / trl_median if trl_median else None,
        **{f"{part}_cpu_s": spent for part, spent in parts.items()},
        "rest_cpu_s": median - sum(parts.values()),
        "idle_share": _median(each["step_idle"] / each["step_total"] for each in devices),
        "parameters": parameters,
        "repeats": repeats,
        "ours_spread": spread(ours_s),
        "trl_spread": spread(trl_s),
        "threads": torch.get_num_threads(),
        "trl_micro_batch": trl.micro_batch if trl else None,
        "trace": str(trace) if trace is not None else None,
        "model": geometry(config),
        "batch": size.as_dict(),
        "device": device,
    }


def _fastest_trl(config: Any, node: WholeNode, folder: Path, tell: Tell) -> WholeTrl | None:
    """TRL with the micro-batch that takes it least CPU time here, warm."""
    prompts = questions(node.size, node.engine.policy.vocabulary)
    best: tuple[float, WholeTrl] | None = None
    for parts in (1, 2, 4, 8):
        if node.size.completions % parts:
            continue
        micro_batch = node.size.completions // parts
        try:
            trl = WholeTrl(config, prompts, rewards, node.size, SETTINGS, micro_batch, folder / "trl")
        except ImportError as error:
            tell(f"TRL is left out ({error}); to have it: pip install 'ftis-node[dev]'")
            return None
        trl.step()
        seconds = cpu_seconds(trl.step)
        tell(f"TRL in micro-batches of {micro_batch}: {seconds:.2f} CPU-s")
        if best is None or seconds < best[0]:
            best = (seconds, trl)
    assert best is not None
    return best[1]


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
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.", "Name a file in a folder that exists."
        ) from None


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values))
