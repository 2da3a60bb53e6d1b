"""This machine's processor: in which dtype it multiplies fastest."""

import re
from pathlib import Path
from typing import Literal


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products in bfloat16, as Linux says of x86. Emulated they are slow.

    They are AVX512_BF16 (AMD since Zen 4), twice as fast as float32, and AMX (Intel's servers since 2023).
    """
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return re.search(r"^flags\b.*\b(avx512_bf16|amx_bf16)\b", described, re.MULTILINE) is not None


def cpu_dtype() -> Literal["bfloat16", "float32"]:
    """The dtype that the processor multiplies fastest."""
    if multiplies_bfloat16():
        return "bfloat16"
    return "float32"
