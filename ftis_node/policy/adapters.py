"""peft's parts that this project uses, without bitsandbytes.

peft imports bitsandbytes wherever that is installed, and again where layers are added. This takes more than a second in
every process, and fails where bitsandbytes is broken. No adapter here is quantised, and the 8-bit optimiser imports
bitsandbytes itself.
"""

import warnings
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ftis_node.host.quiet import without

with without("bitsandbytes"):
    import peft
    from peft import LoraConfig, PeftModel
    from peft.tuners.lora.layer import Linear as LoraLinear

__all__ = ["Conv1D", "LoraConfig", "LoraLinear", "PeftModel"]  # beside the functions below

_MAMBAS = (
    "falcon_h1",
    "falcon_mamba",
    "mamba",
    "mamba2",
    "nemotron_h",
)


def get_peft_model(model: Any, config: LoraConfig, **options: Any) -> Any:
    """As peft's, which puts LoRA layers into `model` itself; without its warning that it asks transformers by an old
    name."""
    with without("bitsandbytes"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(model, config, **options)


def linear_modules(model: Any) -> dict[str, nn.Module]:
    """A model's linear modules by their paths; GPT-2's are `Conv1D`, whose weight is `[inputs, outputs]`.

    Those that read text, not pictures; with the output head. Not `out_proj` of Mamba, whose kernels take its weight:
    peft refuses it. Call it before LoRA layers are added, which change paths; a model on the device "meta" will do.
    """
    inside = {*model.get_decoder().modules(), model.get_output_embeddings()}
    linears = (nn.Linear, Conv1D)
    mamba = model.config.model_type in _MAMBAS
    found = {}
    for path, one in model.named_modules():
        refused = mamba and path.endswith("out_proj")
        if isinstance(one, linears) and one in inside and not refused:
            found[path] = one
    return found


def inputs_and_outputs(module: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear module."""
    first, second = module.weight.shape  # type: ignore[misc]
    if isinstance(module, Conv1D):
        return first, second
    return second, first


def head_of(model: Any) -> str:
    """The path of a model's output head; empty if it has none."""
    head = model.get_output_embeddings()
    return next((path for path, module in model.named_modules() if module is head), "")
