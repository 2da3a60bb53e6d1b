"""What this machine's processor can do."""

import re
from pathlib import Path


def multiplies_bfloat16() -> bool:
    """Whether it has instructions for products in bfloat16, as Linux says of x86. Emulated they are slow.

    They are AVX512_BF16 (AMD since Zen 4), twice as fast as float32, and AMX (Intel's servers since 2023).
    """
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return re.search(r"^flags\b.*\b(avx512_bf16|amx_bf16)\b", described, re.MULTILINE) is not None
