"""Processes that train one model together, each on a device of its own: the ranks of `torch.distributed`.

Each computes the gradient of its share of a batch; then all have the sum, and take the same step. What is reduced is
what the loss needs of the whole batch. Only tensors travel between them, and nothing is pickled.
"""

from __future__ import annotations

import datetime
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from ftis_node.errors import NO_ROOM, FtisError
from ftis_node.host.interruption import Interrupted, forget
from ftis_node.learner.batch import Prompted, portions
from ftis_node.policy.room import out_of_memory, patiently

# How long a rank waits for the others within a step: one may read a large model's weights from a slow disk.
PATIENCE = datetime.timedelta(minutes=30)
# Elements that are added up at a time, in fp32.
BUCKET = 1 << 24
OTHERS_SECONDS = 2.0
# What became of a rank's share, the worst last.
_DONE, _INTERRUPTED, _SHORT, _FAILED = range(4)


@dataclass(frozen=True)
class Team:
    """This rank's view of all: its number and how many there are."""

    rank: int
    size: int

    @classmethod
    def init_process_group(
        cls,
        rank: int,
        size: int,
        place: str,
        device: torch.device,
    ) -> Team:
        """Wait until all ranks are there.

        Args:
            place: a file that does not exist yet, in a directory of this user's only.
        """
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")  # nothing leaves this machine
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=dist.FileStore(place, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
        )
        return cls(rank, size)

    def share(self, prompted: Sequence[Prompted], packed: bool) -> list[Prompted]:
        """This rank's part of the prompts, so that all have about as many tokens to compute: largest first, each to
        the rank that has least."""
        loads = [0] * self.size
        mine = []
        for one in sorted(prompted, key=lambda p: (-p.cost(packed), p.samples[0].index)):
            rank = loads.index(min(loads))
            loads[rank] += one.cost(packed)
            if rank == self.rank:
                mine.append(one)
        return mine

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """What ends the block in one rank ends it in all.

        Raises:
            MemoryError: some rank ran out of memory. Interrupted: some rank was asked to give up. FtisError: some rank
                failed otherwise; that one raises what it met.
        """
        mine: BaseException | None = None
        try:
            yield
        except Exception as error:
            mine = error
        state = _state(mine)
        worst = self.most(state)
        if worst == _INTERRUPTED:
            forget()
            raise Interrupted("It was given up.") from None
        if worst == _SHORT:
            mine = None  # its traceback holds the tensors that were there
            raise MemoryError("Out of memory on one of several devices.") from None
        if worst == _FAILED:
            if mine is not None and state == _FAILED:
                raise mine
            raise FtisError("Another device of this node failed.")

    @contextmanager
    def bound(self, *, by_size: bool = False) -> Iterator[None]:
        """What must succeed in all ranks or in none: if it fails, this process ends, and with it all others.

        Args:
            by_size: with less at a time it might have had room. Then the exit code says that memory was short; the
                others, which lose their connection, let it go first.
        """
        try:
            yield
        except BaseException as error:
            traceback.print_exc()
            if by_size and out_of_memory(error):
                os._exit(NO_ROOM)
            time.sleep(OTHERS_SECONDS)
            os._exit(1)

    def add_up(self, parameters: Mapping[str, Parameter]) -> None:
        """Leave the sum of all ranks' gradients in the parameters; a parameter without any has none.

        Those in shards have it already.
        """
        whole = [parameter for parameter in parameters.values() if not isinstance(parameter, DTensor)]
        mine = [parameter.grad is not None for parameter in whole]
        somewhere = self._most(torch.tensor(mine, dtype=torch.int32))
        wanted = [parameter for parameter, one in zip(whole, somewhere.tolist(), strict=True) if one]
        for pieces in portions(_pieces(wanted), lambda some: sum(map(len, some)) <= BUCKET):
            _add_up(pieces)

    def first(self, *values: float) -> list[float]:
        """Return the first rank's value."""
        sent = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(sent, 0)
        return sent.tolist()

    def broadcast_parameters(self, tensors: Sequence[Tensor]) -> None:
        """Put the first rank's values into these tensors of all."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)

    def broadcast_parts(self, tensors: Sequence[Tensor]) -> None:
        """Put each rank's part, see `fsdp.part_of`, into these tensors of all."""
        for tensor in tensors:
            rows = -(-len(tensor) // self.size)
            for rank, part in enumerate(torch.split(tensor.detach(), rows)):
                dist.broadcast(part, rank)

    def total(self, value: float) -> float:
        """The sum of all ranks' values."""
        added = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(added)
        return float(added)

    def most(self, value: int) -> int:
        """The largest of all ranks' values."""
        return int(self._most(torch.tensor([value]))[0])

    def whole(self, part: Tensor, rows: int) -> Tensor:
        """The tensor of so many rows that the ranks' parts are of, see `fsdp.part_of`; on the first rank's CPU, and
        nothing on the others'."""
        size = -(-rows // self.size)
        mine = part.new_zeros(size, *part.shape[1:])
        mine[: len(part)] = part
        ranks = 0
        if self.rank == 0:
            ranks = self.size
        whole = torch.empty(ranks, *mine.shape, dtype=part.dtype)
        at_a_time = max(1, BUCKET // mine[0].numel())  # a GPU may have no room for an embedding
        begin = 0
        for piece in torch.split(mine, at_a_time):
            parts = [torch.empty_like(piece) for _ in range(ranks)]
            dist.gather(piece, parts or None)
            for rank, one in enumerate(parts):
                whole[rank, begin : begin + len(one)] = one
            begin += len(piece)
        return whole.flatten(0, 1)[:rows]

    def gathered(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Every rank's tensors, on the CPU, in the order of the ranks."""
        packed = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
        mine = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]))
        most = max(int(size) for size in sizes)
        buffers = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(buffers, torch.nn.functional.pad(mine, (0, most - len(mine))))  # all send as many bytes
        found = []
        for buffer, size in zip(buffers, sizes, strict=True):
            found.append(load(buffer[: int(size)].numpy().tobytes()))
        return found

    def _most(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values


class _Alone(Team):
    """A team of one rank, in which nothing travels, and errors are whatever they are."""

    def share(self, prompted: Sequence[Prompted], packed: bool) -> list[Prompted]:
        return list(prompted)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        yield

    @contextmanager
    def bound(self, *, by_size: bool = False) -> Iterator[None]:
        yield

    def add_up(self, parameters: Mapping[str, Parameter]) -> None: ...

    def first(self, *values: float) -> list[float]:
        return list(values)

    def broadcast_parts(self, tensors: Sequence[Tensor]) -> None: ...

    def total(self, value: float) -> float:
        return value

    def most(self, value: int) -> int:
        return value

    def whole(self, part: Tensor, rows: int) -> Tensor:
        return part


ALONE = _Alone(0, 1)


def _state(error: BaseException | None) -> int:
    """What became of a rank's share, by what it raised; None: nothing."""
    if error is None:
        return _DONE
    if isinstance(error, Interrupted):
        return _INTERRUPTED
    if out_of_memory(error):
        return _SHORT
    return _FAILED


def _pieces(parameters: Iterable[Parameter]) -> Iterator[Tensor]:
    """Parts of the gradients; a parameter without any gets zeros."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        parameter.grad = gradient.contiguous()
        yield from parameter.grad.view(-1).split(BUCKET)  # type: ignore[no-untyped-call]


def _add_up(pieces: Sequence[Tensor]) -> None:
    """Put the sums of all ranks' pieces in their place, added up in fp32."""
    whole = patiently(lambda: torch.cat([piece.float() for piece in pieces]))
    dist.all_reduce(whole)
    begin = 0
    for piece in pieces:
        piece.copy_(whole[begin : begin + len(piece)])
        begin += len(piece)
