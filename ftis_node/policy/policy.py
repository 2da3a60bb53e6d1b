"""A policy: a model with its tokenizer, made ready for sampling, scoring and training."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ftis_node.fit.memory import trained_part
from ftis_node.policy.adapters import PeftModel
from ftis_node.policy.nf4 import elements
from ftis_node.tokenizer.asking import usable


@dataclass(frozen=True, eq=False)
class Policy:
    """A model with its tokenizer. `model` is the trainable module (with LoRA a `PeftModel`).

    It lives in the compute process, and is in eval mode but for a step's passes. A step changes its weights in place.
    `ready` chooses `packed`, `native`, `graphs` and `way`, and the engine adds `server`: each makes another `Policy` of
    the same model.

    name: as the owner named the model; for messages.
    packed: sequences are scored in one row without padding (`packing`); else padded, one row each.
    native: the native decoder (`generate.decoder`) generates with it; else transformers' modules do.
    graphs: whether generation captures its steps as CUDA graphs, with shapes that change rarely.
    server: a `generate.vllm.Server` that samples in its place while it can; None: there is none.
    way: how sequences are scored and generated and why, in words; people read it among the plan's reasons.
    """

    name: str
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    packed: bool = False
    native: bool = False
    graphs: bool = False
    way: str = ""
    server: Any = None

    @property
    def causal_lm(self) -> Any:
        """The transformers model itself; LoRA layers, if any, sit inside it."""
        if isinstance(self.model, PeftModel):
            return self.model.get_base_model()
        return self.model

    @cached_property
    def vocabulary(self) -> int:
        """Number of token ids that can be sampled, from 0 on: those that the tokenizer names, and that have rows."""
        rows: int = self.causal_lm.get_input_embeddings().num_embeddings
        head = self.causal_lm.get_output_embeddings()
        return usable(self.tokenizer, min(rows, getattr(head, "out_features", rows)))

    @property
    def kind(self) -> str:
        """Which part is trained, "lora" or "full", as labels of checkpoints have it."""
        return trained_part(isinstance(self.model, PeftModel))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that are computed with."""
        return self.causal_lm.get_input_embeddings().weight.dtype  # type: ignore[no-any-return]

    def trainable(self) -> int:
        """Number of parameters that training changes."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def parameters(self) -> int:
        """Number of parameters of the whole model, with LoRA layers, and with those that are held in four bits."""
        return sum(p.numel() for p in self.model.parameters()) + elements(self.model)
