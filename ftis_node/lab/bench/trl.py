"""TRL's side of the benchmarks of a step: the update of its GRPOTrainer alone, or with its generation."""

import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ftis_node.lab.bench import model
from ftis_node.lab.bench.measure import Tell, cpu_seconds
from ftis_node.lab.bench.model import SETTINGS, Size, Work


class _Trainer:
    """TRL 1.16's `GRPOTrainer` around a model of random weights, made ready as its training loop would.

    Its fastest setting: fp32 on the CPU as ours, no gradient checkpointing, no reference model (β = 0), fused AdamW,
    and no `old_per_token_logps`: with one update a batch it takes them from the forward pass of the update.
    """

    def __init__(
        self,
        config: Any,
        prompts: Sequence[str],
        size: Size,
        micro_batch: int,
        folder: Path,
    ) -> None:
        """
        Args:
            config: of the model, in transformers' form.
            micro_batch: completions in a forward pass; divides the number of completions.
            folder: where TRL may write.

        Raises:
            ImportError: TRL is not installed.
        """
        self.model = model.random_model(config, torch.device("cpu"))
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
                gradient_checkpointing=False,
                beta=0.0,
                loss_type="grpo",
                temperature=model.TEMPERATURE,
                num_generations=size.group,
                max_completion_length=size.completion_tokens,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=self.passes,
                learning_rate=SETTINGS.learning_rate,
                adam_beta1=SETTINGS.betas[0],
                adam_beta2=SETTINGS.betas[1],
                weight_decay=SETTINGS.weight_decay,
                max_grad_norm=SETTINGS.gradient_clip,
                report_to=[],
            )
            self.trainer = trl.GRPOTrainer(
                self.model,
                reward_funcs=rewarded,
                args=arguments,
                train_dataset=rows,
                processing_class=model.word_tokenizer(self.model.config.vocab_size),
            )
        self.trainer.create_optimizer_and_scheduler(num_training_steps=1_000_000)
        accelerator = self.trainer.accelerator
        self._wrapped, self.trainer.optimizer = accelerator.prepare(self.model, self.trainer.optimizer)
        self.trainer.current_gradient_accumulation_steps = self.passes

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
        config: Any,
        work: Work,
        size: Size,
        micro_batch: int,
        folder: Path,
    ) -> None:
        super().__init__(config, ["w1"] * size.groups, size, micro_batch, folder)
        batch = _batch(work)
        self._items = batch["num_items_in_batch"]
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
        config: Any,
        prompts: Sequence[str],
        size: Size,
        micro_batch: int,
        folder: Path,
    ) -> None:
        """prompts: `size.groups` for each step, one step after the other, from the beginning again after the last."""
        super().__init__(config, prompts, size, micro_batch, folder)
        self._size = size
        self._prompts = itertools.cycle(prompts)

    def step(self) -> tuple[float, float]:
        """A whole step; returns as `update` does."""
        rows = []
        for prompt in itertools.islice(self._prompts, self._size.groups):
            rows += [{"prompt": prompt}] * self._size.group
        return self.update(rows, None)


AnyTrl = TypeVar("AnyTrl", Trl, WholeTrl)


def fastest(warm: Callable[[int], AnyTrl], size: Size, runs: int, tell: Tell) -> AnyTrl | None:
    """TRL with the micro-batch that takes it least CPU time here; None if it is not installed.

    Args:
        warm: makes it for a micro-batch, and takes a first step.
        runs: timed steps of each, of which the fastest counts.
    """
    best = None
    least = math.inf
    for parts in (1, 2, 4, 8):
        if size.completions % parts:
            continue
        try:
            trl = warm(size.completions // parts)
        except ImportError as error:
            tell(f"TRL is left out ({error}); it is of the extra dev")
            return None
        seconds = min(cpu_seconds(trl.step) for _ in range(runs))
        tell(f"TRL in micro-batches of {trl.micro_batch}: {seconds:.2f} CPU-s")
        if seconds < least:
            least = seconds
            best = trl
    return best


def _batch(work: Work) -> dict[str, Tensor]:
    """TRL's batch after generation and scoring: ids and masks `[N, L]`, advantages `[N]`; nothing is padded."""
    prompt_rows = []
    completion_rows = []
    for prompt, group in zip(work.prompts, work.completions, strict=True):
        for completion in group:
            prompt_rows.append(prompt)
            completion_rows.append(completion.token_ids.astype(np.int64))
    prompts = torch.tensor(prompt_rows)
    completions = torch.from_numpy(np.stack(completion_rows))
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": model.advantages(work),
        "num_items_in_batch": torch.tensor(completions.numel()),
    }
