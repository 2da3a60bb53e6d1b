"""Greedy pass@1: what a policy makes of questions, scored and counted."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ftis_node.evaluate.episodes import Episodes
from ftis_node.evaluate.evaluation import Evaluation
from ftis_node.evaluate.intervals import wilson
from ftis_node.evaluate.judging import Judged, judge
from ftis_node.evaluate.playing import play, sampled
from ftis_node.fit.context import context_of, refuse_prompts
from ftis_node.fit.memory import FRAGMENTATION, Device, Setup, Workload, estimate
from ftis_node.host.doing import doing
from ftis_node.policy.generate.sampling import Prompts, Sampling
from ftis_node.policy.measure import geometry_of
from ftis_node.policy.policy import Policy
from ftis_node.policy.room import Room
from ftis_node.tasks import Example, Scorer, Task
from ftis_node.tokenizer.asking import prompt_ids
from ftis_node.tokenizer.chat import Chat

LARGEST_BATCH = 256


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """The outcome of all questions; `batch` is the number that fitted into memory side by side."""

    judged: Sequence[Judged]
    seconds: float
    batch: int

    def figures(self) -> Evaluation:
        """Rates, the interval of pass@1, and the counts they come from."""
        totals: dict[str, float] = {
            "formatted": sum(one.score.formatted for one in self.judged),
            "lenient": sum(one.score.lenient for one in self.judged),
            "finished": sum(one.finished for one in self.judged),
            "mean_tokens": sum(one.tokens for one in self.judged),
        }
        correct = sum(one.score.reward == 1.0 for one in self.judged)
        return _evaluation(correct, len(self.judged), totals, self.seconds, self.batch)


def merged(parts: Sequence[Evaluation]) -> Evaluation:
    """The figures of questions that were answered in parts side by side."""
    prompts = sum(part.prompts for part in parts)
    correct = sum(part.correct for part in parts)
    means = ("formatted", "lenient", "finished", "mean_tokens")
    totals = {name: sum(getattr(part, name) * part.prompts for part in parts) for name in means}
    seconds = max(part.seconds for part in parts)
    batch = sum(part.batch for part in parts)
    return _evaluation(correct, prompts, totals, seconds, batch)


def _evaluation(correct: int, prompts: int, totals: Mapping[str, float], seconds: float, batch: int) -> Evaluation:
    """totals: of what is a mean over all questions."""
    count = max(1, prompts)
    rates = {"pass_at_1": correct / count} | {name: total / count for name, total in totals.items()}
    low, high = wilson(correct, prompts)
    return Evaluation(**rates, low=low, high=high, correct=correct, prompts=prompts, seconds=seconds, batch=batch)


def evaluate(
    policy: Policy,
    prompts: Prompts,
    examples: Sequence[Example],
    scorer: Scorer,
    sampling: Sampling,
    *,
    episodes: Episodes | None = None,
    batch: int = LARGEST_BATCH,
    room: Room | None = None,
    tell: Callable[[Sequence[Judged]], None] | None = None,
) -> GreedyResult:
    """One completion of every prompt, scored against its example.

    An unfinished completion is wrong and without format, whatever it says; it may be lenient.

    Args:
        prompts: token ids, none empty.
        episodes: how they go on where a completion has several answers.
        batch: how many are generated side by side, fewer when they do not fit into memory; `room` takes its place, and
            remembers what fitted.
        tell: called with what became of each batch.

    Raises:
        FtisError: a single prompt does not fit into memory, or the weights have diverged.
    """
    began = time.perf_counter()
    room = room or Room(batch)
    judged: list[Judged] = []
    with doing("evaluating", len(prompts), "questions"):
        while len(judged) < len(prompts):
            some = slice(len(judged), len(judged) + room.size)
            groups = sampled(policy, prompts[some], sampling, room)
            if episodes is not None:
                shown = (prompts[some], groups, examples[some])
                groups = play(policy, episodes, *shown, scorer, sampling, room=room)
            done = [
                judge(policy.tokenizer, completion, example, scorer, episodes)
                for (completion,), example in zip(groups, examples[some], strict=True)
            ]
            judged += done
            if tell is not None:
                tell(done)
    return GreedyResult(judged, time.perf_counter() - began, room.size)


def tokenised(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    completion_tokens: int,
    chat: Chat | None = None,
    prefix: Sequence[int] | None = None,
) -> list[list[int]]:
    """The prompts of `examples` as token ids, by default in plain text. chat, prefix: as for `prompt_ids`.

    Raises:
        UsageError: the tokenizer cannot write one, or the model has no room for it and its completion.
    """
    prompts = [prompt_ids(policy.tokenizer, task.template, example.question, chat, prefix) for example in examples]
    refuse_prompts(
        policy.name,
        context_of(policy.causal_lm.config),
        prompts,
        examples,
        task.name,
        completion_tokens=completion_tokens,
        spelled=lambda index: str(policy.tokenizer.convert_ids_to_tokens(index)),
        shorter="Use fewer --completion-tokens, or a model with a longer context.",
    )
    return prompts


def batch_that_fits(policy: Policy, prompt_tokens: int, completion_tokens: int, budget: int) -> int:
    """How many sequences of these lengths may be generated side by side in `budget` bytes; at least 1."""
    shape = geometry_of(policy.causal_lm.config, policy.name)
    width = policy.dtype.itemsize
    device: Device = "cuda" if policy.device.type == "cuda" else "cpu"
    workload = Workload(prompt_tokens, completion_tokens, group=1, batch_groups=1)
    batch = LARGEST_BATCH
    while batch > 1:
        setup = Setup(
            dtype="bfloat16" if width == 2 else "float32",
            micro_batch_tokens=workload.longest,
            generation_batch=batch,
        )
        memory = estimate(shape, workload, setup, device)
        if memory.kv_cache + memory.sampling <= budget * (1 - FRAGMENTATION):
            break
        batch //= 2
    return batch
