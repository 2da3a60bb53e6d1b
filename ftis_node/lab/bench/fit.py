"""Measured memory of a model in steps and generation on this machine, beside its plan."""

import statistics
from dataclasses import replace

from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError
from ftis_node.fit.plan import Plan
from ftis_node.lab.bench import Tell
from ftis_node.lab.bench.measure import Figures, held, measured_on, peak_mb, timed
from ftis_node.lab.bench.model import Size, make_learner, named_policy, own_work, planned, training_groups
from ftis_node.policy.generate.kept import let_go
from ftis_node.policy.room import out_of_memory


def bench_fit(
    settings: Settings,
    size: Size,
    *,
    repeats: int,
    tell: Tell,
    trained: int | None = None,
) -> Figures:
    """Tokens a second and memory of steps with the objective `ftis`, and of generating their batch; weights are random.

    Only the model's configuration is needed; nothing is downloaded for a Qwen2.5.

    Args:
        settings: model, device, LoRA or not, and the limit on memory, which is enforced on a GPU; the plan fills in
            what they leave open.
        repeats: timed steps, after one that is not.
        trained: on so many of the groups that are generated; None: on all.

    Returns:
        Completion tokens a second of wall time; megabytes (10⁶) of tensors at their peak, and as the plan has them,
        its reserve for the CUDA context and fragmentation (`predicted_overhead_mb`) apart. `memory_ratio` is peak over
        predicted. The peak: see `peak_mb`.

    Raises:
        UserError: model or plan are not to be had here.
        FtisError: it does not fit into the memory.
        RuntimeError: a step did not change the weights.
    """
    settings, chosen = planned(settings, size, steps=True)
    try:
        return _measure(settings, chosen, size, repeats, tell, trained)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise FtisError(f"{settings.model} does not fit into {chosen.budget / 1e6:,.0f} MB: {error}") from error


def _measure(
    settings: Settings,
    chosen: Plan,
    size: Size,
    repeats: int,
    tell: Tell,
    trained: int | None,
) -> Figures:
    """What `bench_fit` returns, by a plan that fits. Raises RuntimeError where memory is short even so."""
    tell(f"making {settings.model}")
    policy = named_policy(settings, random_weights=True)
    learner = make_learner(policy, "ftis", settings)
    batch = settings.generation_batch or size.completions
    short = replace(size, groups=1, completion_tokens=2)
    own_work(policy, short, batch)  # a GPU's kernels are loaded at first use
    tell(f"generating {size.completions} completions of {size.completion_tokens} tokens")
    work, generation_s = timed(lambda: own_work(policy, size, batch), policy.device)
    groups = training_groups(work)[:trained]
    steps = []
    for repeat in range(repeats + 1):
        if repeat:
            tell(f"step {repeat} of {repeats}")
        else:
            tell("a step to warm up")
        report, took = timed(lambda: learner.step(groups), policy.device)
        if report.skipped:
            raise RuntimeError(f"the step took no update: {report.skipped}")
        steps.append((report, took))
    step_s = statistics.median(took for _, took in steps[1:])

    tell("measuring memory")
    let_go()  # of the caches that generation keeps: a node does so where these and training have no room together
    memory = chosen.memory
    training = peak_mb(lambda: learner.step(groups), held(learner), policy.device)
    generating = peak_mb(lambda: own_work(policy, size, batch), held(learner), policy.device)
    peak = max(training, generating)
    needed = (memory.total - memory.overhead) / 1e6
    return {
        "train_tokens_per_s": size.tokens * len(groups) / size.groups / step_s,
        "generate_tokens_per_s": size.tokens / generation_s,
        "step_s": step_s,
        "generation_s": generation_s,
        "peak_memory_mb": peak,
        "peak_training_mb": training,
        "peak_generating_mb": generating,
        "predicted_memory_mb": needed,
        "predicted_training_mb": (memory.training - memory.overhead) / 1e6,
        "predicted_generating_mb": (memory.generating - memory.overhead) / 1e6,
        "predicted_overhead_mb": memory.overhead / 1e6,
        "memory_ratio": peak / needed,
        "budget_mb": chosen.budget / 1e6,
        "way": policy.way,
        "fits": chosen.fits,
        "optimiser": chosen.optimiser,
        "gradient_checkpointing": chosen.gradient_checkpointing,
        "micro_batch_tokens": steps[-1][0].micro_batch_tokens,
        "memory_retries": sum(report.memory_retries for report, _ in steps),
        "generation_batch": chosen.generation_batch,
        **measured_on(policy, size, repeats),
    }
