"""TRL's side of the training benchmark: the update of its GRPOTrainer, without what comes before and after it."""

from __future__ import annotations

import importlib
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis_node.lab.bench.model import TEMPERATURE, Size, Work, advantages, random_model, word_tokenizer
from ftis_node.settings import Settings


class Trl:
    """TRL 1.16's `GRPOTrainer` on a batch whose completions are already there.

    In: `training_step` as its training loop calls it (shuffling and splitting the batch, `compute_loss` with the
    metrics it keeps, backward) for each micro-batch, the clip, AdamW's step, and `zero_grad`. Out: generation,
    tokenisation, rewards and advantages, the data loader, callbacks, the learning-rate schedule, and logging.

    Its fastest setting: fp32 on the CPU as ours, no gradient checkpointing, no reference model (β = 0), fused AdamW,
    and no `old_per_token_logps`: with one update a batch it takes them from the forward pass of the update.
    """

    def __init__(self, config: Any, work: Work, size: Size, settings: Settings, micro_batch: int, folder: Path) -> None:
        """
        Args:
            micro_batch: completions in a forward pass; divides the number of completions.
            folder: where TRL may write.

        Raises:
            ImportError: TRL is not installed.
        """
        trl = importlib.import_module("trl")
        datasets = importlib.import_module("datasets")
        self.model = random_model(config, torch.device("cpu"))
        self.micro_batch = micro_batch
        self.passes = size.completions // micro_batch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = trl.GRPOConfig(
                output_dir=str(folder),
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                beta=0.0,
                loss_type="grpo",
                temperature=TEMPERATURE,
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
                save_strategy="no",
                disable_tqdm=True,
            )
            self._trainer = trl.GRPOTrainer(
                self.model,
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=arguments,
                train_dataset=datasets.Dataset.from_dict({"prompt": ["w1"] * size.groups}),
                processing_class=word_tokenizer(config.vocab_size),
            )
        self._batch = _batch(work)
        self._items = self._batch["num_items_in_batch"]
        self._trainer._generate_and_score_completions = lambda _: dict(self._batch)
        self._trainer.create_optimizer_and_scheduler(num_training_steps=1_000_000)
        self._wrapped, self._trainer.optimizer = self._trainer.accelerator.prepare(self.model, self._trainer.optimizer)
        self._trainer.current_gradient_accumulation_steps = self.passes

    def step(self) -> tuple[float, float]:
        """One update; returns its loss and the norm of its gradient before the clip.

        Raises:
            RuntimeError: one of them is not finite.
        """
        trainer, loss = self._trainer, 0.0
        for index in range(self.passes):
            trainer.accelerator.gradient_state._set_sync_gradients(index + 1 == self.passes)
            loss += float(trainer.training_step(self._wrapped, [], self._items))
        norm = float(trainer._clip_grad_norm(self._wrapped))
        trainer.optimizer.step()
        self._wrapped.zero_grad()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RuntimeError(f"TRL's loss is {loss}, the norm of its gradient {norm}")
        return loss, norm


def _batch(work: Work) -> dict[str, Tensor]:
    """What TRL has when it has generated and scored: ids and masks `[N, L]`, advantages `[N]`; nothing is padded."""
    prompts = torch.tensor(
        [prompt for prompt, group in zip(work.prompts, work.completions, strict=True) for _ in group]
    )
    completions = torch.from_numpy(
        np.stack([c.token_ids.astype(np.int64) for group in work.completions for c in group])
    )
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": advantages(work),
        "num_items_in_batch": torch.tensor(completions.numel()),
    }
