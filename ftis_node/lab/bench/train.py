"""What a training step costs: CPU time of ours and of TRL's on the same batch, taken in turns in one process."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftis_node.config.settings import Settings
from ftis_node.lab.bench.model import (
    Size,
    Work,
    geometry,
    make_learner,
    own_work,
    random_policy,
    small_config,
    training_groups,
)
from ftis_node.lab.bench.trl import Trl
from ftis_node.learner import Learner
from ftis_node.policy.policy import Policy

TOLERANCE = 1e-4  # relative, between two gradients of the same work in fp32
SETTINGS = Settings(model="random", device="cpu", learning_rate=1e-6)

Tell = Callable[[str], None]


def bench_train(size: Size, *, repeats: int, tell: Tell) -> dict[str, Any]:
    """CPU-seconds of a step (log-probs, loss, backward, clip, AdamW) with the objective `ftis`, and of TRL's update.

    Args:
        tell: is told of progress.

    Returns:
        Medians over `repeats` steps of each, ours and TRL's in turns; `ratio` is ours over TRL's, `*_spread` minimum
        and maximum, tokens are those of the completions. TRL runs with the micro-batch that is its fastest here. What
        is TRL's is None if it is not installed. `peak_memory_mb`: see `peak_memory`.

    Raises:
        RuntimeError: a loss is not finite, or the gradients of the two are not those of the same work.
    """
    config = small_config()
    policy = random_policy(config, SETTINGS)
    tell(f"sampling {size.completions} completions of {size.completion_tokens} tokens")
    work = own_work(policy, size, size.completions)
    gradient = our_gradient(policy, work)
    learner, groups = make_learner(policy, "ftis", SETTINGS), training_groups(work)

    def ours() -> None:
        report = learner.step(groups)
        if report.skipped or not math.isfinite(report.loss) or report.tokens != size.tokens:
            raise RuntimeError(f"our step left samples out or took no update: {report}")

    with tempfile.TemporaryDirectory() as folder:
        trl = _fastest_trl(config, work, size, gradient, Path(folder), tell)
        ours_s, trl_s = _in_turns(ours, trl, repeats, tell)
    median = statistics.median(ours_s)
    trl_median = statistics.median(trl_s) if trl_s else None
    return {
        "ours_cpu_s": median,
        "trl_cpu_s": trl_median,
        "ratio": median / trl_median if trl_median else None,
        "ours_tokens_per_s": size.tokens / median,
        "trl_tokens_per_s": size.tokens / trl_median if trl_median else None,
        "peak_memory_mb": peak_memory(ours, held(learner)) / 1e6,
        "parameters": policy.parameters(),
        "vocabulary": policy.vocabulary,
        "repeats": repeats,
        "ours_spread": spread(ours_s),
        "trl_spread": spread(trl_s),
        "threads": torch.get_num_threads(),
        "trl_micro_batch": trl.micro_batch if trl else None,
        "model": geometry(config),
        "batch": size.as_dict(),
        "device": device_name(policy.device),
    }


def _in_turns(ours: Callable[[], None], trl: Trl | None, repeats: int, tell: Tell) -> tuple[list[float], list[float]]:
    """CPU-seconds of each step of ours, after one to warm up, and of TRL's, which is warm."""
    ours()
    ours_s, trl_s = [], []
    for repeat in range(repeats):
        tell(f"step {repeat + 1} of {repeats}")
        ours_s.append(cpu_seconds(ours))
        if trl:
            trl_s.append(cpu_seconds(trl.step))
    return ours_s, trl_s


def our_gradient(policy: Policy, work: Work) -> dict[str, Tensor]:
    """The gradient of the plain clipped objective (`nois`), by parameter, taken from a real step."""
    learner = make_learner(policy, "nois", SETTINGS)
    with caught_gradient(policy.model) as gradient:
        learner.step(training_groups(work))
    return gradient


def check_same_work(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """RuntimeError unless two gradients agree to `TOLERANCE`, relative, as a whole."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(ours.keys() ^ theirs.keys())}")
    difference, whole = _norm([ours[name] - theirs[name] for name in ours]), _norm(list(theirs.values()))
    if not difference <= TOLERANCE * whole:
        raise RuntimeError(
            f"our gradient and TRL's, {whole:.3g}, differ by {difference:.3g}: this is not the same work"
        )


@contextlib.contextmanager
def caught_gradient(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Fills the dictionary with the gradient that an optimiser, any, steps on within the context."""
    gradient: dict[str, Tensor] = {}

    def catch(*_: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient[name] = parameter.grad.detach().clone()

    handle = register_optimizer_step_pre_hook(catch)
    try:
        yield gradient
    finally:
        handle.remove()


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of the whole process, user and system, so that other work on the machine does not count."""
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def peak_memory(call: Callable[[], object], before: int) -> float:
    """Bytes that torch's tensors take at most during `call` on the CPU, given that `before` are there before it.

    From the profiler's record of every allocation: exact for tensors, and blind to Python and to the libraries.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            call()
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    now = peak = before
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def held(learner: Learner) -> int:
    """Bytes that are there between steps: weights, their masters where those are others, and the optimiser's state."""
    masters, optimiser = learner.state(live=True)
    apart = [master for name, master in masters.items() if master.dtype != learner.trainable[name].dtype]
    return sum(tensor.nbytes for tensor in [*learner.policy.model.parameters(), *apart, *optimiser.values()])


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    return f"{device.type}, {platform.machine()}"


def _fastest_trl(
    config: Any, work: Work, size: Size, gradient: dict[str, Tensor], folder: Path, tell: Tell
) -> Trl | None:
    """TRL with the micro-batch that takes it least CPU time here, warm; each one's first gradient is compared."""
    best: tuple[float, Trl] | None = None
    for parts in (1, 2, 4, 8):
        if size.completions % parts:
            continue
        try:
            trl = Trl(config, work, size, SETTINGS, size.completions // parts, folder)
        except ImportError as error:
            tell(f"TRL is left out ({error}); to have it: pip install 'ftis-node[dev]'")
            return None
        with caught_gradient(trl.model) as theirs:
            trl.step()
        check_same_work(gradient, theirs)
        seconds = min(cpu_seconds(trl.step) for _ in range(2))
        tell(f"TRL in micro-batches of {trl.micro_batch}: {seconds:.2f} CPU-s")
        if best is None or seconds < best[0]:
            best = (seconds, trl)
    assert best is not None
    return best[1]


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def spread(seconds: Sequence[float]) -> list[float] | None:
    """Minimum and maximum, if there are any."""
    return [min(seconds), max(seconds)] if seconds else None
