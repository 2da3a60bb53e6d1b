"""liger-kernel's Triton kernels in a model's modules on a GPU: RMSNorm, RoPE, SwiGLU and GeGLU, each in one pass.

The modules' own code reads and writes a layer's activations again for each operation, and keeps more of them.
liger-kernel's fused loss is not used: the weight of a token hangs on the log-probs of its whole sample, so `score`
needs those first, with their entropy.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import unwrap
from types import MethodType
from typing import Any


def fuse(model: Any) -> Callable[[], None]:
    """Put the kernels into a model's modules, for its forward passes in scoring and training on a GPU.

    Modules get another `forward`, and keep their weights. An MLP whose activation has no kernel stays as it is. RoPE is
    a function of the family's Python module, so other models of this process take it, too.

    `ready` calls it, and undoes it where the kernels give something else than the modules did.

    Args:
        model: a transformers model that `generate.decoder.understood` accepts.

    Returns:
        A function that takes the kernels out again; call it once at most. It takes RoPE out for other models, too.

    Raises:
        ImportError: liger-kernel or Triton is missing.
    """
    ops: Any = import_module("liger_kernel.ops")
    code: Any = sys.modules[type(model).__module__]
    plain = unwrap(code.apply_rotary_pos_emb)  # not what an earlier model of the family put there

    # Each of these takes the place of a module's `forward`: x `[…, hidden]` → the same shape.
    in_place = False  # the backward pass would write into a gradient that other modules read, too

    def norm(self: Any, x: Any) -> Any:
        """RMSNorm of all families but Gemma."""
        return ops.LigerRMSNormFunction.apply(
            x,
            self.weight,
            self.variance_epsilon,
            0.0,  # what is added to the weight
            "llama",  # what is computed in fp32
            in_place,
        )

    def gemma_norm(self: Any, x: Any) -> Any:
        """Gemma 3's, which multiplies by 1 + weight."""
        return ops.LigerRMSNormFunction.apply(
            x,
            self.weight,
            self.eps,
            1.0,
            "gemma",
            in_place,
        )

    def swiglu(self: Any, x: Any) -> Any:
        """An MLP with SiLU."""
        gated = ops.LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x), 1.0, 1.0)
        return self.down_proj(gated)

    def geglu(self: Any, x: Any) -> Any:
        """An MLP with GELU, by its approximation with tanh."""
        return self.down_proj(ops.LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))

    @wraps(plain)
    def turned(query: Any, key: Any, cos: Any, sin: Any) -> Any:
        """Query and key, turned by their positions; on a CPU by the family's own function."""
        if query.is_cuda:
            return ops.LigerRopeFunction.apply(query, key, cos, sin)
        return plain(query, key, cos, sin)

    config = model.config
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    mlp = {"silu": swiglu, "gelu_pytorch_tanh": geglu}.get(activation)
    fused = {}
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            fused[module] = norm
        elif type(module).__name__ == "Gemma3RMSNorm":
            fused[module] = gemma_norm
        elif hasattr(module, "gate_proj") and mlp is not None:
            fused[module] = mlp
    for module, forward in fused.items():
        module.forward = MethodType(forward, module)
    code.apply_rotary_pos_emb = turned

    def undo() -> None:
        """Take the kernels out again."""
        code.apply_rotary_pos_emb = plain
        for module in fused:
            del module.forward

    return undo
