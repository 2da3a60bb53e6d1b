"""TRL's side of the benchmarks of a step: the update of its GRPOTrainer alone, or with its generation."""

import copy
import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ftis_node.config.settings import Settings
from ftis_node.lab.bench import Tell, model
from ftis_node.lab.bench.measure import Figures, beside, cpu_seconds, held, in_turns, nbytes, peak_mb
from ftis_node.lab.bench.model import Size, Work
from ftis_node.learner import Learner
from ftis_node.policy.generate.sampling import left_padded
from ftis_node.policy.policy import Policy

LOGITS_BYTES = 1 << 30  # of a micro-batch: TRL keeps several of this size


class _Trainer:
    """TRL 1.16's `GRPOTrainer` around a copy of a policy's model, made ready as its training loop would.

    Its fastest setting: weights of the dtype that ours have, no fp32 masters, no reference model (β = 0), fused AdamW,
    and no `old_per_token_logps`: with one update a batch it takes them from the forward pass of the update.
    """

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        prompts: Sequence[str],
        size: Size,
        micro_batch: int,
        folder: Path,
    ) -> None:
        """
        Args:
            micro_batch: completions in a forward pass; divides the number of completions.
            folder: where TRL may write.

        Raises:
            ImportError: TRL is not installed.
        """
        self.model: Any = copy.deepcopy(policy.model)
        replace(policy, model=self.model).causal_lm.set_attn_implementation("sdpa")  # ours is not for others
        self.micro_batch = micro_batch
        self.passes = size.completions // micro_batch
        trl = importlib.import_module("trl")
        datasets = importlib.import_module("datasets")
        rows = datasets.Dataset.from_dict({"prompt": list(prompts)})

        def rewarded(completions: Sequence[Any], **_: Any) -> list[float]:
            groups = len(completions) // size.group
            return groups * model.rewards(size.group)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = trl.GRPOConfig(
                output_dir=str(folder),
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=bool(settings.gradient_checkpointing),
                beta=0.0,
                loss_type="grpo",
                temperature=model.TEMPERATURE,
                num_generations=size.group,
                max_completion_length=size.completion_tokens,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=self.passes,
                learning_rate=settings.learning_rate,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                weight_decay=settings.weight_decay,
                max_grad_norm=settings.gradient_clip,
                report_to=[],
            )
            self.trainer = trl.GRPOTrainer(
                self.model,
                reward_funcs=rewarded,
                args=arguments,
                train_dataset=rows,
                processing_class=copy.deepcopy(policy.tokenizer),
            )
        self.trainer.create_optimizer_and_scheduler(num_training_steps=1_000_000)
        accelerator = self.trainer.accelerator
        self._wrapped, self.trainer.optimizer = accelerator.prepare(self.model, self.trainer.optimizer)
        self.trainer.current_gradient_accumulation_steps = self.passes

    def held(self) -> int:
        """Bytes that are there between steps: weights, and the optimiser's state, which the first step makes."""
        tensors = [*self.model.parameters()]
        for state in self.trainer.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return nbytes(tensors)

    def step(self) -> tuple[float, float]:
        """One update, or a whole step; returns as `update` does."""
        raise NotImplementedError

    def update(self, inputs: Sequence[Any], items: Tensor | None) -> tuple[float, float]:
        """One optimiser step in so many passes; returns its loss and the norm of its gradient before the clip.

        Raises:
            RuntimeError: one of them is not finite.
        """
        trainer = self.trainer
        loss = 0.0
        for index in range(self.passes):
            last = index + 1 == self.passes
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            loss += float(trainer.training_step(self._wrapped, inputs, items))
        norm = float(trainer._clip_grad_norm(self._wrapped))
        trainer.optimizer.step()
        self._wrapped.zero_grad()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RuntimeError(f"TRL's loss is {loss}, the norm of its gradient {norm}")
        return loss, norm


class Trl(_Trainer):
    """TRL on a batch whose completions are already there.

    In: `training_step` as its training loop calls it (shuffling and splitting the batch, `compute_loss` with the
    metrics it keeps, backward) for each micro-batch, the clip, AdamW's step, and `zero_grad`. Out: generation,
    tokenisation, rewards and advantages, the data loader, callbacks, the learning-rate schedule, and logging.
    """

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        work: Work,
        size: Size,
        micro_batch: int,
        folder: Path,
    ) -> None:
        unread = ["w1"] * size.groups  # prompts: TRL wants a data set, and these are never sampled from
        super().__init__(policy, settings, unread, size, micro_batch, folder)
        batch = _batch(work)
        self._items = batch["num_items_in_batch"]
        # A new dict for each step, as TRL's own method makes one: what TRL might put into it or take out of it must not
        # reach the next step. The tensors are the same in all; TRL shuffles and splits them into new ones.
        self.trainer._generate_and_score_completions = lambda _: dict(batch)

    def step(self) -> tuple[float, float]:
        """One update; returns as `update` does."""
        return self.update([], self._items)


class WholeTrl(_Trainer):
    """A whole step of TRL: prompts are tokenised, completions generated by its own means (transformers' `generate`),
    decoded and rewarded, and the update follows. In and out of the update as in `Trl`.
    """

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        prompts: Sequence[str],
        size: Size,
        micro_batch: int,
        folder: Path,
    ) -> None:
        """prompts: `size.groups` for each step, one step after the other, from the beginning again after the last."""
        super().__init__(policy, settings, prompts, size, micro_batch, folder)
        self._size = size
        self._prompts = itertools.cycle(prompts)

    def step(self) -> tuple[float, float]:
        """A whole step; returns as `update` does."""
        rows = []
        for prompt in itertools.islice(self._prompts, self._size.groups):
            rows += [{"prompt": prompt}] * self._size.group
        return self.update(rows, None)


AnyTrl = TypeVar("AnyTrl", Trl, WholeTrl)


def fastest(warm: Callable[[int], AnyTrl], policy: Policy, size: Size, runs: int, tell: Tell) -> AnyTrl | None:
    """TRL with the micro-batch that takes it least CPU time here; None if it is not installed.

    Args:
        warm: makes it for a micro-batch, and takes a first step.
        runs: timed steps of each, of which the fastest counts.

    Four sizes are tried at most, the largest first; one at a time is in memory.
    """
    seconds: dict[int, float] = {}
    positions = size.prompt_tokens + size.completion_tokens
    for parts in (1, 2, 4, 8, 16, size.completions):
        rows = size.completions // parts
        too_large = 4 * rows * positions * policy.vocabulary > LOGITS_BYTES and rows > 1
        if size.completions % parts or too_large:
            continue
        try:
            trl = warm(rows)
        except ImportError as error:
            tell(f"TRL is left out ({error}); it is of the extra dev")
            return None
        seconds[rows] = min(cpu_seconds(trl.step) for _ in range(runs))
        del trl  # the next one needs its memory
        tell(f"TRL in micro-batches of {rows}: {seconds[rows]:.2f} CPU-s")
        if len(seconds) == 4:
            break
    return warm(min(seconds, key=seconds.__getitem__))


def beside_trl(ours: Callable[[], object], learner: Learner, trl: _Trainer | None, repeats: int, tell: Tell) -> Figures:
    """Compare steps of both.

    Returns:
        Medians of CPU-seconds over `repeats` steps of each, ours and TRL's in turns; `ratio` is ours over TRL's,
        `*_spread` minimum and maximum. TRL runs with the micro-batch that is its fastest here. `*peak_memory_mb`: see
        `peak_mb`, of one more step. TRL's figures are None if it is not installed.
    """
    ours()  # to warm up
    rival = None
    if trl is not None:
        rival = trl.step
    ours_s, trl_s = in_turns(ours, rival, repeats, tell)
    figures = beside(ours_s, trl_s)
    tell("measuring memory")
    device = learner.policy.device
    figures["peak_memory_mb"] = peak_mb(ours, held(learner), device)
    figures["trl_peak_memory_mb"] = None
    figures["trl_micro_batch"] = None
    if trl is not None:
        figures["trl_peak_memory_mb"] = peak_mb(trl.step, trl.held(), device)
        figures["trl_micro_batch"] = trl.micro_batch
    return figures


def _batch(work: Work) -> dict[str, Tensor]:
    """TRL's batch after generation and scoring: ids and masks `[N, L]`, advantages `[N]`."""
    prompt_rows: list[Sequence[int]] = []
    completion_rows = []
    for prompt, group in zip(work.prompts, work.completions, strict=True):
        for completion in group:
            prompt_rows.append(prompt)
            completion_rows.append(completion.token_ids.astype(np.int64))
    prompts, mask = left_padded(prompt_rows)
    completions = torch.from_numpy(np.stack(completion_rows))
    return {
        "prompt_ids": prompts,
        "prompt_mask": mask,
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": model.advantages(work),
        "num_items_in_batch": torch.tensor(completions.numel()),
    }
