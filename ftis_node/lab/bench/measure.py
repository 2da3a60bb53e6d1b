"""How the benchmarks measure: CPU time, time on the device, and the memory of tensors."""

import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ftis_node.lab.bench import Tell
from ftis_node.lab.bench.model import Size, geometry
from ftis_node.learner import Learner
from ftis_node.policy.policy import Policy

T = TypeVar("T")
Figures: TypeAlias = dict[str, Any]
"""By name, as JSON has them."""


def in_turns(
    ours: Callable[[], object],
    rival: Callable[[], object] | None,
    repeats: int,
    tell: Tell,
) -> tuple[list[float], list[float]]:
    """CPU-seconds of each step of ours and of a rival's, in turns; the caller has taken a first one of both. An empty
    list for a rival of None."""
    ours_s = []
    rival_s = []
    for repeat in range(repeats):
        tell(f"step {repeat + 1} of {repeats}")
        ours_s.append(cpu_seconds(ours))
        if rival:
            rival_s.append(cpu_seconds(rival))
    return ours_s, rival_s


def beside(ours_s: Sequence[float], trl_s: Sequence[float]) -> Figures:
    """Medians of CPU-seconds with minimum and maximum, and ours over TRL's; None where TRL is not installed."""
    ours = statistics.median(ours_s)
    figures: Figures = {
        "ours_cpu_s": ours,
        "ours_spread": [min(ours_s), max(ours_s)],
        "trl_cpu_s": None,
        "trl_spread": None,
        "ratio": None,
    }
    if trl_s:
        trl = statistics.median(trl_s)
        figures["trl_cpu_s"] = trl
        figures["trl_spread"] = [min(trl_s), max(trl_s)]
        figures["ratio"] = ours / trl
    return figures


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Return the result of `call`, and the seconds until the device was done."""
    began = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of the whole process, user and system, so that other work on the machine does not count."""
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def peak_mb(call: Callable[[], object], before: int, device: torch.device) -> float:
    """Megabytes (10⁶) that torch's tensors take at most during `call`, given that bytes `before` are there before it.
    It calls once; do not time that call.

    On a GPU by the allocator's own count. On the CPU from the profiler's record of every allocation: exact for tensors,
    and blind to Python and to the libraries.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        on_cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=on_cpu, profile_memory=True) as profile:
            call()
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    now = before
    peak = before
    for event in changes:
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak / 1e6


def held(learner: Learner) -> int:
    """Bytes that are there between steps: weights, their masters where those are others, and the optimiser's state."""
    masters, optimiser = learner.state(live=True)
    tensors = [*learner.policy.model.parameters(), *optimiser.values()]
    for name, master in masters.items():
        if master.dtype != learner.trainable[name].dtype:
            tensors.append(master)
    return nbytes(tensors)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of all of them together."""
    return sum(tensor.nbytes for tensor in tensors)


def device_name(device: torch.device) -> str:
    """For people: kind, and the GPU's name or the CPU's architecture."""
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    return f"{device.type}, {platform.machine()}"


def measured_on(policy: Policy, size: Size, repeats: int) -> Figures:
    """The model, work and machine that a figure was measured on."""
    return {
        "parameters": policy.parameters(),
        "vocabulary": policy.vocabulary,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "kind": policy.kind,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "model": geometry(policy.causal_lm.config),
        "batch": asdict(size),
        "device": device_name(policy.device),
    }
