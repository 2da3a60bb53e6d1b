"""All that the next step depends on as files: the trained weights, the optimiser's state and random numbers."""

import errno
import logging
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor

from ftis_node.errors import FtisError, UsageError, UserError
from ftis_node.learner import Learner
from ftis_node.learner.tensorfile import write_tensors
from ftis_node.policy.room import out_of_memory
from ftis_node.text import rounded

# Files of a checkpoint, and the key of LoRA's alpha in the metadata of the weights: no tensor shows it.
WEIGHTS = "trainable.safetensors"
OPTIMISER = "optimiser.safetensors"
ALPHA = "lora_alpha"
_RANDOM = "random.safetensors"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
SPARE = 1.2  # free main memory that a snapshot needs, as a multiple of the checkpoint's size

TensorsByFile = dict[str, dict[str, Tensor]]  # tensors by file and name

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores a learner and the random numbers of its samples."""

    def __init__(self, learner: Learner, random: torch.Generator, metadata: Mapping[str, str] | None) -> None:
        """
        Args:
            metadata: of the file of weights.
        """
        self._learner = learner
        self._random = random
        self._metadata = metadata
        self._snapshot: TensorsByFile = {}
        self._warned_no_room = False

    def state(self, *, live: bool = False) -> TensorsByFile:
        """Copies of the tensors by file and name, on the CPU; with `live` the tensors themselves. Where weights are in
        shards all ranks must call it, and the first gets them whole."""
        weights, optimiser = self._learner.state(live=live)
        random = {"torch": torch.get_rng_state(), "sampling": self._random.get_state()}
        return {
            WEIGHTS: weights,
            OPTIMISER: optimiser,
            _RANDOM: random,
        }

    def save(self, directory: str) -> None:
        """Write the files into an existing directory. Raises UserError if the disk is full."""
        self._write(self.state(live=True), Path(directory))

    def snapshot(self, directory: str) -> None:
        """Copy the state for `write` into main memory; as `save` where it has no room for that."""
        self._snapshot = self._copy()
        if not self._snapshot:
            self.save(directory)

    def write(self, directory: str) -> None:
        """As `save`, the latest snapshot, once. Call it from any thread."""
        snapshot = self._snapshot
        self._snapshot = {}
        self._write(snapshot, Path(directory))

    def restore(self, directory: str, steps: int) -> None:
        """Restore the files of `save`. Raises UsageError if they are of another model."""
        path = Path(directory)
        try:
            self._learner.restore(load_file(path / WEIGHTS), load_file(path / OPTIMISER), steps)
        except FtisError as error:
            raise UsageError(
                str(error), "Use the model, --lora/--full and optimiser of the first start, or a fresh --home."
            ) from error
        random = load_file(path / _RANDOM)
        torch.set_rng_state(random["torch"])
        sampling = random["sampling"]
        if sampling.shape == self._random.get_state().shape:  # early versions drew from a GPU's
            self._random.set_state(sampling)

    def _copy(self) -> TensorsByFile:
        """A copy of the state; empty if main memory has no room for it."""
        if self._learner.in_shards:  # to write it, it must be whole in any case
            return self.state()
        size = sum(tensor.nbytes for tensors in self.state(live=True).values() for tensor in tensors.values())
        free = psutil.virtual_memory().available
        if free >= SPARE * size:
            try:
                return self.state()
            except (RuntimeError, MemoryError) as error:  # the available memory is an estimate
                if not out_of_memory(error):
                    raise
        if not self._warned_no_room:
            self._warned_no_room = True
            logger.warning(
                "Main memory (%s free) cannot hold a copy of a checkpoint (%s): training waits while it is written.",
                rounded(free),
                rounded(size),
            )
        return {}

    def _write(self, state: Mapping[str, Mapping[str, Tensor]], directory: Path) -> None:
        """Write files of these tensors. Raises UserError if the disk is full."""
        try:
            for name, tensors in state.items():
                write_tensors(directory / name, tensors, self._metadata if name == WEIGHTS else None)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise UserError(
                    f"There is no room for a checkpoint in {directory.parent}: {error}.",
                    "Make room on its disk and start the same command again; it goes on from the last checkpoint.",
                ) from error
            raise
