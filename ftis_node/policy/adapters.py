"""peft's parts that this project uses, without bitsandbytes.

peft imports bitsandbytes wherever that is installed, and again where layers are added. This takes more than a second in
every process, and fails where bitsandbytes is broken. No adapter here is quantised, and the 8-bit optimiser imports
bitsandbytes itself.
"""

from typing import Any

from ftis_node.host.quiet import without

with without("bitsandbytes"):
    import peft
    from peft import LoraConfig, PeftModel
    from peft.tuners.lora.layer import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer

__all__ = ["BaseTunerLayer", "LoraConfig", "LoraLinear", "PeftModel", "get_peft_model"]


def get_peft_model(model: Any, config: LoraConfig, **options: Any) -> Any:
    """As peft's."""
    with without("bitsandbytes"):
        return peft.get_peft_model(model, config, **options)
