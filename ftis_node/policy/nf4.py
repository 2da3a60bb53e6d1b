"""Frozen weights in four bits: NF4 of QLoRA (arXiv 2305.14314), with quantised block scales, by bitsandbytes' kernels.

bitsandbytes' own module is not used: on some CPUs it lays weights out anew for inference, so that a node would sample
from other products than it scores with. torchao has no NF4 kernel for the CPU. Training dequantises one matrix at a
time. Decoding leaves it to bitsandbytes, which on a GPU has a fused kernel for few rows, and dequantises elsewhere; a
kernel that gives something else than training is found out by `ready`, which then leaves the decoder alone.
"""

import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as nn_functional

from ftis_node.errors import UsageError
from ftis_node.fit.memory import NF4_BLOCK
from ftis_node.host.allocator import in_own_pages
from ftis_node.host.quiet import without
from ftis_node.installed import to_install


class NF4Linear(nn.Module):
    """A frozen linear module whose weight is held in four bits; computes in the dtype that the weight had.

    It must stay on its device: `to` would not move its scales. Its weight is in no checkpoint; a start quantises the
    model's own again.
    """

    packed: Tensor

    def __init__(self, linear: nn.Linear, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Quantise the weight of `linear` on `device`. Its bias is taken over as it is; `linear` stays as it was.

        dtype: the weight is cast to it before, and `forward` computes in it; None: the weight's own.

        Raises:
            UsageError: bitsandbytes is missing.
        """
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        packed, self._scales = kernels().quantize_4bit(
            linear.weight.detach().to(device, dtype).contiguous(),
            blocksize=NF4_BLOCK,
            compress_statistics=True,
            quant_type="nf4",
        )
        self.register_buffer("packed", packed, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the dequantised weight."""
        return self._scales.dtype  # type: ignore[no-any-return]

    def dense(self) -> Tensor:
        """The weight, dequantised anew at each call: `[outputs, inputs]` of `dtype`. On a CPU it lies in pages of its
        own."""
        pages: AbstractContextManager[None] = nullcontext()
        if self.packed.device.type == "cpu":
            pages = in_own_pages()
        with pages:
            return kernels().dequantize_4bit(self.packed, self._scales)  # type: ignore[no-any-return]

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x · Wᵀ plus this bias, not the module's own: `[rows, outputs]`, without gradients. For the native decoder.

        x: `[rows, inputs]` of the weight's dtype.
        """
        if self.in_features % NF4_BLOCK == 0:  # for others it warns, and dequantises
            return fused(x, self.packed, self._scales, bias=bias)  # type: ignore[no-any-return]
        return nn_functional.linear(x, self.dense(), bias)

    def forward(self, x: Tensor) -> Tensor:
        """x `[…, inputs]` → `[…, outputs]`, with the module's own bias. Only x gets a gradient."""
        product: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        if self.bias is None:
            return product
        return product + self.bias


class _Product(torch.autograd.Function):
    """x · Wᵀ; the backward pass dequantises W again, so that no dense weight is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: NF4Linear) -> Tensor:
        ctx.module = module
        return nn_functional.linear(x, module.dense())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.module.dense(), None


def quantise(
    model: nn.Module,
    head: nn.Module,
    device: torch.device,
    name: str,
    casts: dict[nn.Module, torch.dtype] | None = None,
) -> None:
    """Replace every frozen linear module of `model` but its head; dense weights reach the device one at a time.

    Call it once, after LoRA layers were added. These are trained, so they stay as they are; the rest is frozen then.

    Args:
        name: the model's, for messages.
        casts: the dtypes that weights of modules get before; what is replaced is taken out. None: all have theirs.

    Raises:
        UsageError: no linear module is frozen, or bitsandbytes is missing.
    """
    found = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent.named_children()
        if type(child) is nn.Linear and child is not head and not child.weight.requires_grad
    ]
    if not found:
        raise UsageError(f"{name} has no linear modules for NF4.", "Use --set quantisation=none.")
    while found:  # of which none is kept
        parent, key, child = found.pop()
        setattr(parent, key, NF4Linear(child, device, (casts or {}).pop(child, None)))


def elements(model: nn.Module) -> int:
    """How many weights the model holds in four bits."""
    return sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, NF4Linear))


@cache
def kernels() -> Any:
    """bitsandbytes' functions, imported at the first call. Raises UsageError where it is missing."""
    return bitsandbytes("functional", "NF4", "bfloat16")


def fused(*args: Any, **options: Any) -> Any:
    """bitsandbytes' product with a matrix of four bits, by whichever kernel it takes; after `kernels` only."""
    return sys.modules["bitsandbytes"].matmul_4bit(*args, **options)


def bitsandbytes(part: str, what: str, instead: str) -> Any:
    """Import a module of the library, such as `functional` or `optim`, and silence the library's warnings for good.

    Raises:
        UsageError: the library is missing. It says that `what` needs it, and that `instead` does without.
    """
    try:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a kernel which no node uses
        with without("kernels"):  # or it takes compiled code from the hub, which nothing here needs
            import_module("bitsandbytes")
            return import_module(f"bitsandbytes.{part}")
    except ImportError:
        raise UsageError(
            f"{what} needs bitsandbytes.", f"Run: {to_install('ftis-node[gpu]')}; or use {instead}."
        ) from None
