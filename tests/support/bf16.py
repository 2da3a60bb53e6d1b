"""Products of bf16 matrices on a CPU without instructions for them, where they take six times as long as in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", " bf16 ")


def multiply_in_fp32():
    """Let linear layers over bf16 multiply in fp32 and round the sums to bf16, in this process, if that is faster here.

    This is the arithmetic of the instructions that this CPU lacks: factors in bf16, sums in fp32, one rounding.
    """
    about = Path("/proc/cpuinfo")
    flags = about.read_text() if about.exists() else ""
    if any(one in flags for one in _INSTRUCTIONS):
        return
    linear = torch.nn.functional.linear

    def rounded(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if input.is_cuda or input.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
            return linear(input, weight, bias)
        wide = bias.float() if bias is not None else None
        return linear(input.float(), weight.float(), wide).bfloat16()

    torch.nn.functional.linear = rounded
