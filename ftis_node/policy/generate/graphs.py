"""CUDA graphs: all kernels of a token in one launch. A small model's token takes a GPU less time than its launches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ftis_node.errors import first_line

logger = logging.getLogger(__name__)

_failures: list[str] = []  # why a capture failed; there is no second one in this process
_streams: dict[torch.device, torch.cuda.Stream] = {}


class Graphs:
    """A function of tensors that is captured once for each of its shapes, and then replayed.

    At a shape's first call it runs as it is, on the stream on which the second call captures it: so libraries have
    their workspaces there, once for all captures of the process. If a capture fails, a warning says so once, and
    functions run as they are from then on.

    There is one graph at a time, as rows only become fewer and own tokens more. All captures share a pool of memory.
    Graphs end with the call of `generate`: training needs their memory, and the next call has a cache of its own.
    Weights cannot move in between, but may change.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], device: torch.device) -> None:
        """
        Args:
            function: on `device`, without a wait for it, random numbers, or numbers of the host that change.
        """
        self._function = function
        self._stream = _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._shape: Hashable = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: Hashable = None  # the shape of the graph
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, shape: Hashable, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The function of these inputs; shape: changes when its shapes or any of its tensors do."""
        if _failures:
            return self._function(*inputs)
        if shape != self._shape:
            self._shape = shape
            return self._aside(inputs)
        if self._captured != shape and not self._capture(inputs):
            return self._function(*inputs)
        assert self._graph is not None
        for mine, new in zip(self._inputs, inputs, strict=True):
            mine.copy_(new)
        self._graph.replay()
        return tuple(output.clone() for output in self._outputs)

    def _aside(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run it on the other stream, which waits for this one, and this one for it."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            outputs = self._function(*inputs)
        here.wait_stream(self._stream)
        return outputs

    def _capture(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether it could be captured. The pool needs a graph that lives, so the old one goes afterwards."""
        here = torch.cuda.current_stream(self._stream.device)
        self._inputs = tuple(one.clone() for one in inputs)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._outputs = self._function(*self._inputs)
        except Exception as error:  # as many kinds as there are drivers
            torch.cuda.set_stream(here)
            _failures.append(first_line(error))
            logger.warning("Generation goes on without CUDA graphs, for one could not be captured: %s", _failures[0])
            return False
        self._graph, self._captured = graph, self._shape
        return True
