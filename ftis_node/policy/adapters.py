"""peft's parts that this project uses, imported without bitsandbytes.

peft imports bitsandbytes wherever that is installed. This takes more than a second in every process, and on some CPUs
bitsandbytes then looks for compiled code at the hub. No adapter here is quantised, and the 8-bit optimiser imports
bitsandbytes itself.
"""

from __future__ import annotations

import sys
from typing import Any, cast

_bitsandbytes = sys.modules.get("bitsandbytes")
cast(dict[str, Any], sys.modules)["bitsandbytes"] = _bitsandbytes  # None: as if it were not installed
try:
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.tuners.lora.layer import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer
finally:
    if _bitsandbytes is None:
        del sys.modules["bitsandbytes"]

__all__ = ["BaseTunerLayer", "LoraConfig", "LoraLinear", "PeftModel", "get_peft_model"]
