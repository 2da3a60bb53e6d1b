"""Copies in main memory of tensors that lie on a GPU, through two small pinned buffers.

Into ordinary memory the driver copies through a buffer of its own and waits for each part. With two pinned buffers a
part is on its way while the one before it is moved on. The copies themselves are not pinned: PyTorch rounds pinned
memory up to a power of two and never gives it back.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PART = 32 << 20  # bytes of a buffer


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies on the CPU by the same names, complete when this returns."""
    made = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in tensors.items()}
    on_gpu = [name for name, tensor in tensors.items() if tensor.device.type == "cuda"]
    buffers = _pinned() if on_gpu else []
    if buffers:
        stream = torch.cuda.current_stream(tensors[on_gpu[0]].device)
        through(buffers, [(tensors[name], made[name]) for name in on_gpu], stream.record_event)
    for name, tensor in tensors.items():
        if not buffers or name not in on_gpu:
            made[name].copy_(tensor.detach())
    return made


def through(buffers: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor]], mark: Callable[[], Any]) -> None:
    """Copy each first tensor into the second, a buffer full at a time.

    Args:
        buffers: uint8 of one size; the copy into a buffer need not be done before the event that `mark` then gives.
        pairs: contiguous tensors of the same shape and dtype.
    """
    under_way: deque[tuple[Any, Tensor, Tensor]] = deque()
    parts = 0
    for source, target in pairs:
        out = _bytes(source)
        into = _bytes(target)
        for begin in range(0, len(out), len(buffers[0])):
            if len(under_way) == len(buffers):
                _arrive(*under_way.popleft())
            part = out[begin : begin + len(buffers[0])]
            buffer = buffers[parts % len(buffers)][: len(part)]
            buffer.copy_(part, non_blocking=True)
            under_way.append((mark(), buffer, into[begin : begin + len(part)]))
            parts += 1
    for one in under_way:
        _arrive(*one)


def _arrive(event: Any, buffer: Tensor, into: Tensor) -> None:
    event.synchronize()
    into.copy_(buffer)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _pinned() -> list[Tensor]:
    """Two buffers; none where the system gives no pinned memory."""
    try:
        return [torch.empty(PART, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    except RuntimeError:
        return []
