"""CUDA graphs: all kernels of a token in one launch. A small model's token takes a GPU less time than its launches."""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import torch
from torch import Tensor

from ftis_node.errors import first_line
from ftis_node.policy.room import out_of_memory

logger = logging.getLogger(__name__)

_failures: list[str] = []  # why a capture failed; there is no second one in this process
_streams: dict[torch.device, torch.cuda.Stream] = {}

Tensors: TypeAlias = tuple[Tensor, ...]
Step: TypeAlias = Callable[..., Tensors]
Captured: TypeAlias = tuple[torch.cuda.CUDAGraph, Tensors, Tensors]
"""A graph, and what it reads and writes."""


def failed() -> bool:
    """Whether a driver could not capture a graph, so that this process goes on without. From any thread."""
    return bool(_failures)


class Graphs:
    """Functions of tensors that are captured once for each of their shapes, and then replayed.

    At a shape's first call it runs as it is, on the stream on which the second call captures it: so libraries have
    their workspaces there, once for all captures of the process. If a capture fails, a warning says so once, and
    functions run as they are from then on; but a lack of memory is the caller's, who can make room.

    All graphs share a pool of memory. They last as long as what they read stays where it is; it may change. Nobody
    checks that here: the owner drops all graphs when memory moves, see `native._decoding`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._tried: set[Hashable] = set()
        self._graphs: dict[Hashable, Captured] = {}  # by shape

    def __call__(self, shape: Hashable, function: Step, *inputs: Tensor) -> Tensors:
        """The function of these inputs. A graph's outputs are copied, so no later call overwrites them.

        Args:
            shape: a key. A function of other work, of inputs of other shapes, or that reads other tensors has another.
            function: on the device, without a wait for it, random numbers, or numbers of the host that change.

        Raises:
            RuntimeError: there is too little memory.
        """
        if _failures:
            return function(*inputs)
        if shape not in self._tried:
            with self._aside():
                outputs = function(*inputs)
            self._tried.add(shape)
            return outputs
        if shape not in self._graphs and not self._capture(shape, function, inputs):
            return function(*inputs)
        graph, mine, outputs = self._graphs[shape]
        for one, new in zip(mine, inputs, strict=True):
            one.copy_(new)
        graph.replay()
        return tuple(output.clone() for output in outputs)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On the other stream, which waits for this one, and this one for it."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    def _capture(self, shape: Hashable, function: Step, inputs: Tensors) -> bool:
        """Capture the function for this shape, and return whether that worked.

        PyTorch cannot give cached memory back during a capture. Where that would have been needed, the cache is emptied
        and the capture is tried once more. After any other error this process captures no graph again.

        Raises:
            RuntimeError: there is no memory for it even so.
        """
        mine = tuple(one.clone() for one in inputs)
        for last in (False, True):
            try:
                self._graphs[shape] = self._captured(function, mine)
                return True
            except Exception as error:  # as many kinds as there are drivers
                if not out_of_memory(error):
                    _failures.append(first_line(error))
                    what = "Generation goes on without CUDA graphs, for one could not be captured"
                    logger.warning("%s: %s", what, _failures[0])
                    break
                if last:
                    raise
            if not self._graphs:  # the broken one was the pool's only user: torch takes no second one into such a pool
                self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()
        return False

    def _captured(self, function: Step, mine: Tensors) -> Captured:
        """As `torch.cuda.graph`, which would give all cached memory back to the driver before each capture.

        mine: the tensors that the graph will read its inputs from. Raises whatever the function or the driver raises.
        """
        graph = torch.cuda.CUDAGraph()
        with self._aside():
            # other threads may use the device meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = function(*mine)
            except BaseException:
                with suppress(RuntimeError):  # that this one is broken
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, mine, outputs
