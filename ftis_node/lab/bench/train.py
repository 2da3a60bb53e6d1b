"""The cost of a training step: CPU time of ours and of TRL's on the same batch, taken in turns in one process."""

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftis_node.lab.bench import model
from ftis_node.lab.bench.measure import Figures, Tell, beside, held, in_turns, measured_on, peak_memory
from ftis_node.lab.bench.model import SETTINGS, Size, Work, make_learner, training_groups
from ftis_node.lab.bench.trl import Trl, fastest
from ftis_node.policy.policy import Policy

TOLERANCE = 1e-4  # relative, between two gradients of the same work in fp32


def bench_train(size: Size, *, repeats: int, tell: Tell) -> Figures:
    """CPU-seconds of a step (log-probs, loss, backward, clip, AdamW) with the objective `ftis`, and of TRL's update.

    Args:
        tell: is told of progress.

    Returns:
        Medians over `repeats` steps of each, ours and TRL's in turns; `ratio` is ours over TRL's, `*_spread` minimum
        and maximum, tokens are those of the completions. TRL runs with the micro-batch that is its fastest here. TRL's
        figures are None if it is not installed. `peak_memory_mb`: see `peak_memory`.

    Raises:
        RuntimeError: a loss is not finite, or the gradients of the two are not those of the same work.
    """
    config = model.small_config()
    policy = model.random_policy(config, SETTINGS)
    tell(f"sampling {size.completions} completions of {size.completion_tokens} tokens")
    work = model.own_work(policy, size, size.completions)
    gradient = our_gradient(policy, work)
    learner = make_learner(policy, "ftis", SETTINGS)
    groups = training_groups(work)

    def ours() -> None:
        report = learner.step(groups)
        whole = report.tokens == size.tokens
        if report.skipped or not whole or not math.isfinite(report.loss):
            raise RuntimeError(f"our step left samples out or took no update: {report}")

    with tempfile.TemporaryDirectory() as folder:

        def warm(micro_batch: int) -> Trl:
            trl = Trl(config, work, size, micro_batch, Path(folder))
            with caught_gradient(trl.model) as theirs:
                trl.step()
            check_same_work(gradient, theirs)
            return trl

        trl = fastest(warm, size, 2, tell)
        ours()  # to warm up
        rival = None
        if trl is not None:
            rival = trl.step
        ours_s, trl_s = in_turns(ours, rival, repeats, tell)
    figures = beside(ours_s, trl_s)
    figures["ours_tokens_per_s"] = size.tokens / figures["ours_cpu_s"]
    figures["trl_tokens_per_s"] = None
    figures["trl_micro_batch"] = None
    if trl is not None:
        figures["trl_tokens_per_s"] = size.tokens / figures["trl_cpu_s"]
        figures["trl_micro_batch"] = trl.micro_batch
    figures["peak_memory_mb"] = peak_memory(ours, held(learner)) / 1e6
    return figures | measured_on(policy, size, repeats)


def our_gradient(policy: Policy, work: Work) -> dict[str, Tensor]:
    """The gradient of the plain clipped objective (`nois`) by parameter's name, taken from a real step."""
    learner = make_learner(policy, "nois", SETTINGS)
    with caught_gradient(policy.model) as gradient:
        learner.step(training_groups(work))
    return gradient


def check_same_work(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Raises RuntimeError unless two gradients agree to `TOLERANCE`, relative, as a whole."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(ours.keys() ^ theirs.keys())}")
    difference = _norm([ours[name] - theirs[name] for name in ours])
    whole = _norm(list(theirs.values()))
    if not difference <= TOLERANCE * whole:
        apart = f"our gradient and TRL's, {whole:.3g}, differ by {difference:.3g}"
        raise RuntimeError(f"{apart}: this is not the same work")


@contextlib.contextmanager
def caught_gradient(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Fills the dictionary with the gradient that an optimiser, any, steps on within the context."""
    gradient = {}

    def catch(*_: Any) -> None:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                gradient[name] = parameter.grad.detach().clone()

    handle = register_optimizer_step_pre_hook(catch)
    try:
        yield gradient
    finally:
        handle.remove()


def _norm(tensors: Sequence[Tensor]) -> float:
    """Of all their elements together."""
    squares = 0.0
    for tensor in tensors:
        squares += float(tensor.double().square().sum())
    return math.sqrt(squares)
