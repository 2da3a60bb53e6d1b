"""The cost of a training step: CPU time of ours and of TRL's on the same batch, taken in turns in one process."""

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftis_node.config.settings import Settings
from ftis_node.lab.bench import Tell, told
from ftis_node.lab.bench.measure import Figures, measured_on
from ftis_node.lab.bench.model import Size, Work, make_learner, own_work, training_groups
from ftis_node.lab.bench.trl import Trl, beside_trl, fastest
from ftis_node.lab.bench.whole import engine_of
from ftis_node.policy.policy import Policy

TOLERANCE = 1e-4  # relative, between two gradients of the same work in fp32


def bench_train(
    model: str | None,
    data: Path | None,
    given: Mapping[str, str],
    size: Size,
    *,
    repeats: int,
    tell: Tell = told,
) -> Figures:
    """CPU-seconds of a step (log-probs, loss, backward, clip, AdamW) with the objective `ftis`, and of TRL's update.

    Args:
        model, data, given: see `asked`.
        tell: is told of progress.

    Returns:
        As `beside_trl`; tokens are those of the completions.

    Raises:
        RuntimeError: a loss is not finite, or the gradients of the two are not those of the same work.
    """
    with engine_of(model, data, given, size) as (engine, size), tempfile.TemporaryDirectory() as folder:
        policy = engine.policy
        tell(f"sampling {size.completions} completions of {size.completion_tokens} tokens")
        work = own_work(policy, size, size.completions, engine.prompts[: size.groups])
        gradient = our_gradient(policy, work, engine.settings)
        learner = make_learner(policy, "ftis", engine.settings)
        groups = training_groups(work)

        def ours() -> None:
            report = learner.step(groups)
            whole = report.tokens == size.tokens
            if report.skipped or not whole or not math.isfinite(report.loss):
                raise RuntimeError(f"our step left samples out or took no update: {report}")

        def warm(micro_batch: int) -> Trl:
            trl = Trl(policy, engine.settings, work, size, micro_batch, Path(folder))
            with caught_gradient(trl.model) as theirs:
                trl.step()
            if policy.dtype == torch.float32:  # the masters of narrower weights have ours
                check_same_work(gradient, theirs)
            return trl

        trl = fastest(warm, policy, size, 2, tell)
        figures = beside_trl(ours, learner, trl, repeats, tell)
        figures["ours_tokens_per_s"] = size.tokens / figures["ours_cpu_s"]
        figures["trl_tokens_per_s"] = None
        if trl is not None:
            figures["trl_tokens_per_s"] = size.tokens / figures["trl_cpu_s"]
        return figures | measured_on(policy, size, repeats)


def our_gradient(policy: Policy, work: Work, settings: Settings) -> dict[str, Tensor]:
    """The gradient of the plain clipped objective (`nois`) by parameter's name, from a step that changes no weight."""
    learner = make_learner(policy, "nois", settings.model_copy(update={"learning_rate": 0.0}))
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
    """Fills the dictionary, by parameter's name, with a copy of the gradient that an optimiser, any, steps on within
    the context; the last step's, if there are several."""
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
    """The Euclidean norm of all their elements together."""
    squares = 0.0
    for tensor in tensors:
        squares += float(tensor.double().square().sum())
    return math.sqrt(squares)
