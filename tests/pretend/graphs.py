"""CUDA graphs as CUDA has them, of tensors on the CPU: operations are recorded with the very tensors that they take.

A capture computes nothing: what it wrote is undone, and what it made is filled with NaN. A replay repeats the recorded
operations on those tensors. So a number of the host that changes from token to token, or a tensor that is made anew
outside, shows as other tokens. Reading a value and drawing random numbers while capturing raise, as with CUDA.
"""

from __future__ import annotations

import contextlib
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode

capturing: list[CUDAGraph] = []  # at most one
_pools: dict[Any, WeakSet[CUDAGraph]] = {}  # those that captured into each
_handles = count(1)


def leaves(value: Any) -> list[Any]:
    """What lies in tuples, lists and dictionaries."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return [value]
    return [leaf for one in value for leaf in leaves(one)]


@cache
def is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


class CaptureError(RuntimeError):
    """What CUDA refuses while a stream is captured."""


class CUDAGraph(TorchDispatchMode):
    """Records what is done while it is entered.

    kernels   how many launches it stands for
    replayed  how often
    """

    def __init__(self):
        super().__init__()
        self.kernels = self.replayed = 0
        self._steps: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default or torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(f"operation not permitted when stream is capturing: {func}")
        given = [one for one in leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if func._schema.is_mutable:
            for one in given:  # also what is only read: it is the same afterwards
                storage = one.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        made = func(*args, **kwargs)
        known = {one.untyped_storage().data_ptr() for one in given}
        results = [one for one in leaves(made) if isinstance(one, torch.Tensor)]
        new = [one for one in results if one.untyped_storage().data_ptr() not in known]
        assert not new or len(new) == len(results), func
        if new or func._schema.is_mutable:
            self._steps.append((func, args, kwargs, new))
        return made

    def capture_begin(self, pool: Any, capture_error_mode: str):
        """From here on all is recorded. The pretend device enters the graph by itself when it computes."""
        if not _pools.get(pool, True):
            raise CaptureError("use_count > 0 INTERNAL ASSERT FAILED: all graphs of this pool are gone")
        _pools.setdefault(pool, WeakSet()).add(self)
        capturing.append(self)

    def capture_end(self):
        """Up to here."""
        capturing.remove(self)
        self.undo()

    def replay(self):
        """Do it all again."""
        self.replayed += 1
        for func, args, kwargs, new in self._steps:
            made = [one for one in leaves(func(*args, **kwargs)) if isinstance(one, torch.Tensor)]
            for to, result in zip(new, made, strict=False):
                to.copy_(result)

    def undo(self):
        """Leave all as it was before the capture."""
        for storage, before in self._before.values():
            storage.copy_(before)
        for *_, new in self._steps:
            for one in new:
                if one.is_floating_point():
                    one.fill_(torch.nan)
        self._before.clear()


class OnTheCPU(CUDAGraph):
    """The same for tensors of the CPU."""

    def capture_begin(self, pool: Any, capture_error_mode: str):
        super().capture_begin(pool, capture_error_mode)
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)
        super().capture_end()


class Stream:
    """No second one."""

    def __init__(self, device: Any = None):
        self.device = device

    def wait_stream(self, other: Any):
        pass


def stream(_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def current_stream(device: Any = None) -> Stream:
    return Stream(device)


def set_stream(_: Any):
    pass


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_handles)
