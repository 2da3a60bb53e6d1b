"""peft's parts that this project uses, without bitsandbytes.

peft imports bitsandbytes wherever that is installed, and again where layers are added. This takes more than a second in
every process, and fails where bitsandbytes is broken. No adapter here is quantised, and the 8-bit optimiser imports
bitsandbytes itself.
"""

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ftis_node.host.quiet import without

with without("bitsandbytes"):
    import peft
    from peft import LoraConfig, PeftModel
    from peft.tuners.lora.layer import Linear as LoraLinear

__all__ = [
    "Conv1D",
    "LoraConfig",
    "LoraLinear",
    "PeftModel",
    "get_peft_model",
    "head_of",
    "inputs_and_outputs",
    "linear_modules",
]


def get_peft_model(model: Any, config: LoraConfig, **options: Any) -> Any:
    """As peft's."""
    with without("bitsandbytes"):
        return peft.get_peft_model(model, config, **options)


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """A model's linear modules by their paths; GPT-2's are `Conv1D`, whose weight is `[inputs, outputs]`."""
    return {path: module for path, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}


def inputs_and_outputs(module: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear module."""
    first, second = module.weight.shape  # type: ignore[misc]
    return (first, second) if isinstance(module, Conv1D) else (second, first)


def head_of(model: Any) -> str:
    """The path of a model's output head; empty if it has none."""
    head = model.get_output_embeddings()
    return next((path for path, module in model.named_modules() if module is head), "")
