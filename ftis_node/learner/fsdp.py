"""Weights in shards: full training beyond one card, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

The weights of each decoder layer, their gradients, masters and moments are cut along the first dimension, a part a
rank. A layer is made whole for its pass and put away again. Of embeddings, the last norm and the head each rank has all
weights and gradients, and a part of masters and moments. For generation all layers are whole at once, in the weights'
dtype.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ftis_node.learner.team import Team


class Shards:
    """The layers of a model, cut over so many ranks of which each has its own process."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        team: Team,
        device: torch.device,
    ) -> None:
        """
        Args:
            layers: with the same weights in all ranks.
        """
        mesh = init_device_mesh(device.type, (team.size,))
        self._team = team
        self._layers: list[Any] = []
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            assert isinstance(layer, FSDPModule)
            layer.set_gradient_divide_factor(1.0)  # a sum: the loss has the whole batch's denominator
            layer.set_force_sum_reduction_for_comms(enable=True)
            self._layers.append(layer)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All weights are there, as plain tensors. Every rank must enter and leave it."""
        with self._team.bound():
            for layer in self._layers:
                layer.set_reshard_after_forward(False, recurse=False)
                layer.unshard()
        try:
            yield
        finally:
            for layer in self._layers:
                layer.set_reshard_after_forward(True, recurse=False)
                layer.reshard()


def sharded(tensor: Tensor | None) -> bool:
    """Whether a parameter, or a gradient, is in shards."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it, in the same memory and without a graph."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        return tensor


def part_of(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's part of a tensor: FSDP2 cuts as `torch.chunk` does, so the last parts may be small, or nothing."""
    size = -(-len(whole) // ranks)
    return whole[rank * size : (rank + 1) * size]
