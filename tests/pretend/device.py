"""A pretend GPU: its tensors say that they lie on `pretend:0`, and compute on the CPU.

It is torch's PrivateUse1 backend, set up in Python. An operation that CUDA would refuse because its tensors lie on
different devices raises `PretendError`. Launches of kernels and waits of the host are counted by the line of ftis_node
that caused them. The product's sources are read with `pretend` for `cuda`, so that its CUDA branches run.

Not covered: memory, time, streams, random numbers of the device, kernels that CUDA lacks for a dtype. A launch is one
operation that is no view; real kernels may be more.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.pretend import graphs
from tests.pretend.counts import PACKAGE, PretendError, counting_now, fault, launch, wait

NAME = "pretend"

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_VIEWS = frozenset(
    """
    view _unsafe_view t transpose permute slice select expand unsqueeze squeeze detach alias as_strided split unbind
    split_with_sizes diagonal unfold lift_fresh empty empty_like new_empty empty_strided new_empty_strided narrow
    _reshape_alias set_data record_stream _local_scalar_dense
    """.split()  # noqa: SIM905
)
_WAITS = frozenset(
    """
    _local_scalar_dense nonzero equal masked_select _unique2 unique_dim bincount is_nonzero
    """.split()  # noqa: SIM905
)
_INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
_WHOLE = frozenset(("_fused_rms_norm", "scaled_dot_product_attention"))  # one kernel on CUDA


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """Use the device in this thread; a backward pass stays in it, so that its lines are known."""
    with torch.autograd.set_multithreading_enabled(False), _Mode():
        yield


def install():
    """Set the device up for this process, before ftis_node is imported."""
    global _library
    assert not any(name.split(".")[0] == PACKAGE for name in sys.modules), "ftis_node is imported already"
    sys.dont_write_bytecode = True
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    _library = _registered()
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.version.pretend = "13.0"
    functional.scaled_dot_product_attention = _attention
    varlen.varlen_attn = _varlen
    sys.meta_path.insert(0, _Finder())


# --- tensors, operations ----------------------------------------------------------------------------------------------


class Pretend(torch.Tensor):
    """A tensor of the device, with the CPU tensor that it stands for."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretend:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.inner = inner
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Pretend({self.inner})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise fault("a device tensor is no numpy array")

    __array__ = numpy

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """For operations without a device tensor among their arguments: factories, and copies from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _computing() -> contextlib.AbstractContextManager[Any]:
    """Around what the device computes."""
    return graphs.capturing[0] if graphs.capturing else contextlib.nullcontext()


def _inner(value: Any) -> Any:
    if isinstance(value, Pretend):
        return value.inner
    if isinstance(value, list | tuple):
        return [_inner(one) for one in value]
    return _CPU if isinstance(value, torch.device) and value.type == NAME else value


def _outer(value: Any, known: dict[int, Pretend]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_outer(one, known) for one in value)
    if id(value) in known:
        return known[id(value)]
    return Pretend(value) if isinstance(value, torch.Tensor) else value


def _on_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.split("::")[-1]
    flat = graphs.leaves((args, kwargs))
    mine = [value for value in flat if isinstance(value, Pretend)]
    device = kwargs.get("device") or next((value for value in flat if isinstance(value, torch.device)), None)
    if not mine and not _on_device(device):
        return func(*args, **kwargs)
    if graphs.is_composite(func) and name not in _WHOLE:
        with _Mode():
            return func.decompose(*args, **kwargs)
    if func in (_aten.copy_.default, _aten._copy_from.default):
        first, second, *more = args
        non_blocking = bool(kwargs.get("non_blocking")) or more == [True]
        if func is _aten.copy_.default:
            return _copied(first, second, non_blocking)
        return _copied(second, first, non_blocking)
    if func is _aten._to_copy.default:
        return _moved(args[0], device, kwargs)
    if any(isinstance(value, torch.Generator) for value in flat):
        raise fault(f"a CPU generator for the device: {func}")
    others = [value for value in flat if isinstance(value, torch.Tensor) and not isinstance(value, Pretend)]
    if mine and others:
        _check(func, name, args, others)
    if name in _WAITS or _by_mask(name, args) or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        wait()
    if name not in _VIEWS:
        launch()
    if name == "bmm" and (len(args) > 2 or "out_dtype" in kwargs):
        dtype = args[2] if len(args) > 2 else kwargs["out_dtype"]
        with _computing():
            return Pretend(torch.bmm(args[0].inner.to(dtype), args[1].inner.to(dtype)))
    with _computing():
        made = func(*map(_inner, args), **{key: _inner(value) for key, value in kwargs.items()})
    if func is _aten._local_scalar_dense.default:
        return made
    if func._schema.is_mutable:
        return _outer(made, {id(value.inner): value for value in mine})
    if torch.is_inference_mode_enabled() and mine and not mine[0].is_inference() and name in _VIEWS:
        with torch.inference_mode(False):  # a view of a tensor from outside counts versions as that does
            return _outer(made, {})
    return _outer(made, {})


def _by_mask(name: str, args: Any) -> bool:
    """Whether an operation looks for the places where a mask is true."""
    if name not in _INDEXING:
        return False
    return any(isinstance(index, Pretend) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _check(func: Any, name: str, args: Any, others: list[torch.Tensor]):
    """Raise where CUDA would: CPU tensors among a device's, but for scalars in pointwise operations.

    CUDA takes indices of the CPU too. To upload them it waits, so they are refused here.
    """
    scalars = all(value.dim() == 0 for value in others)
    pointwise = torch.Tag.pointwise in func.tags or name.rstrip("_") in ("masked_fill", "fill", "where")
    many = name.startswith(("_foreach", "_fused"))
    own = not func._schema.is_mutable or many or isinstance(args[0], Pretend)
    if not (scalars and (pointwise or many) and own):
        raise fault(f"tensors of the device and of the CPU: {func}")


def _copied(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    mine = isinstance(to, Pretend)
    theirs = isinstance(source, Pretend)
    if mine and theirs:
        launch()
    elif theirs or not non_blocking:
        wait()
    with _computing():
        _inner(to).copy_(_inner(source))
    return to


def _moved(source: torch.Tensor, device: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
    mine = isinstance(source, Pretend)
    with _computing():
        made = torch.ops.aten._to_copy.default(_inner(source), **rest)
    if mine and device is not None and not _on_device(device):
        wait()
        return made
    if mine:
        launch()
    elif not kwargs.get("non_blocking"):
        wait()
    return Pretend(made)


class _Attention(torch.autograd.Function):
    """Fused attention: one kernel forward, two backward."""

    @staticmethod
    def forward(ctx: Any, computed: Callable[..., Any], query: Any, key: Any, value: Any, *more: Any) -> Any:
        if not all(isinstance(one, Pretend) for one in (query, key, value, *more) if isinstance(one, torch.Tensor)):
            raise fault("attention over tensors of the device and of the CPU")
        launch()
        ctx.computed = computed
        ctx.more = [_inner(one) for one in more]
        ctx.save_for_backward(query, key, value)
        return Pretend(computed(*(one.inner.detach() for one in (query, key, value)), *ctx.more))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        launch()
        launch()
        with torch.enable_grad():
            inner = [one.inner.detach().requires_grad_() for one in ctx.saved_tensors]
            out = ctx.computed(*inner, *ctx.more)
        return (
            None,
            *(Pretend(one) for one in torch.autograd.grad(out, inner, gradient.inner)),
            *(None,) * len(ctx.more),
        )


_sdpa = functional.scaled_dot_product_attention


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
    if any(isinstance(one, Pretend) for one in (query, key, value, attn_mask)):
        return _Attention.apply(partial(_sdpa, **kwargs), query, key, value, attn_mask)
    return _sdpa(query, key, value, attn_mask, **kwargs)


def by_sequence(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What `varlen_attn` computes by its documentation, one sequence after another; for causal windows only."""
    assert enable_gqa
    assert window_size[1] == 0
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    out = []
    queries = pairwise(cu_seq_q.tolist())
    keys = pairwise(cu_seq_k.tolist())
    for (first, end), (first_k, end_k) in zip(queries, keys, strict=True):
        assert end - first <= max_q
        assert end_k - first_k <= max_k
        q = query[first:end]
        k = key[first_k:end_k]
        v = value[first_k:end_k]
        past = len(k) - len(q) + torch.arange(len(q))[:, None] - torch.arange(len(k))  # the last are one
        seen = (past >= 0) & ((window_size[0] < 0) | (past <= window_size[0]))
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        out.append(_sdpa(q, k, v, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


@wraps(by_sequence)
def _varlen(query: Any, key: Any, value: Any, *sizes: Any, **kwargs: Any) -> Any:
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise PretendError("FlashAttention only supports fp16 and bf16 data type")
    return _Attention.apply(partial(by_sequence, **kwargs), query, key, value, *sizes)


# --- what torch and the product find of the device --------------------------------------------------------------------


class _Graph(graphs.CUDAGraph):
    def capture_begin(self, pool: Any, capture_error_mode: str):
        for counts in counting_now:
            counts.captures += 1
        super().capture_begin(pool, capture_error_mode)

    def replay(self):
        launch(self.kernels)
        super().replay()


class _Module(_DummyBackendModule):
    """torch.pretend, in the place of torch.cuda: a card of 24 GiB with bf16."""

    OutOfMemoryError = torch.OutOfMemoryError

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 22 << 30, 24 << 30

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return 8, 9

    CUDAGraph = _Graph
    Stream = graphs.Stream
    stream = staticmethod(graphs.stream)
    current_stream = staticmethod(graphs.current_stream)
    set_stream = staticmethod(graphs.set_stream)
    graph_pool_handle = staticmethod(graphs.graph_pool_handle)

    def set_device(self, device: Any):
        for counts in counting_now:
            counts.current.append((str(device), sum(counts.launches.values())))


def _registered() -> torch.library.Library:
    """For copies that torch makes below Python's modes, such as torch.tensor(…, device=…), and for other threads."""
    library = torch.library.Library("aten", "IMPL")

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
        return Pretend(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return _copied(to, source, non_blocking)

    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    return library


class _Loader(importlib.machinery.SourceFileLoader):
    """Reads the product with `pretend` for `cuda`, line for line."""

    def get_code(self, fullname: str) -> Any:
        text = re.sub(r"(?<!backends\.)\bcuda\b", NAME, self.get_data(self.path).decode())
        return compile(text.replace("is_cuda", f"is_{NAME}"), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
