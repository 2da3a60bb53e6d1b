"""How the weights change: AdamW with clipping and warm-up, over fp32 masters where the weights have fewer digits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError
from ftis_node.fit.memory import UPDATE_ELEMENTS
from ftis_node.learner.batch import portions
from ftis_node.learner.fsdp import local, part_of, sharded
from ftis_node.learner.state import flattened, unflattened
from ftis_node.learner.team import ALONE, Team
from ftis_node.policy.nf4 import bitsandbytes
from ftis_node.policy.room import patiently

# Devices on which AdamW is one kernel that allocates nothing: short of memory, it has changed nothing.
_FUSED = ("cuda",)
# Each optimiser's name of its first moment, by which a state is told from another optimiser's.
_MOMENT = {"adamw": "exp_avg", "adamw8bit": "state1"}

NamedTensors = dict[str, Tensor]  # by name


class Optimiser:
    """AdamW over named parameters.

    A bf16 weight of size 1 has steps of 2⁻⁸: an update of 1e-6 would be rounded away, every time. Such a parameter has
    a master copy in fp32, which the update goes to and the weight is rounded from.

    updates: how often the weights changed; the warm-up counts these. A checkpoint has the number as AdamW's own `step`.

    Where weights are in shards, each rank updates its part of the others too (ZeRO, arXiv 1910.02054, stage 1).
    """

    def __init__(
        self,
        trainable: Mapping[str, Parameter],
        settings: Settings,
        learning_rate: float,
        team: Team = ALONE,
    ) -> None:
        """
        Args:
            team: whose ranks have the other parts, where parameters are in shards.

        Raises:
            UsageError: 8-bit AdamW is wanted and bitsandbytes is missing.
        """
        self.updates = 0
        self._trainable = dict(trainable)
        self._team: Team = ALONE  # whose parts make up every parameter
        if any(map(sharded, trainable.values())):
            self._team = team
        self._in_parts = self._team is not ALONE
        self._masters = {}
        for name, parameter in trainable.items():
            self._masters[name] = _master(parameter, self._part(parameter))
        self._rate = learning_rate
        self._warmup = settings.warmup_steps
        self._clip = settings.gradient_clip
        self._moment = _MOMENT[settings.optimiser or "adamw"]
        masters = list(self._masters.values())
        self._retried = all(master.device.type in _FUSED for master in masters)
        options: dict[str, Any] = {
            "lr": learning_rate,
            "betas": settings.betas,
            "weight_decay": settings.weight_decay,
        }
        if settings.optimiser == "adamw8bit":
            self._adam = eight_bit()(masters, **options)
        else:
            self._adam = torch.optim.AdamW(masters, fused=self._retried or None, **options)

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, in fp32."""
        gradients = self._gradients().values()
        cut = [gradient for gradient in gradients if sharded(gradient)]
        whole = [gradient for gradient in gradients if not sharded(gradient)]
        cut_norm = _norm(cut)
        if self._in_parts:
            square = self._team.total(cut_norm**2)
            cut_norm = math.sqrt(square)
        return math.hypot(cut_norm, _norm(whole))

    def step(self, *, norm: float, scale: float) -> None:
        """Take one step on the gradients that lie in the parameters, and drop them. On a GPU that has too little memory
        for this at the moment it is tried again.

        Args:
            norm: what `gradient_norm` gave.
            scale: what the gradient is multiplied by before it is clipped.
        """
        clip = min(1.0, self._clip / max(norm * scale, 1e-12))
        warm = min(1.0, (self.updates + 1) / max(self._warmup, 1))
        for group in self._adam.param_groups:
            group["lr"] = self._rate * warm
        gradients = self._gradients()
        self.drop_gradients()
        for names in self._slices(gradients):
            self._step_slice(names, gradients, scale * clip)
        self.updates += 1
        whole = [parameter for parameter in self._trainable.values() if not sharded(parameter)]
        self._team.broadcast_parts(whole)

    def _step_slice(
        self,
        names: Sequence[str],
        gradients: NamedTensors,
        factor: float,
    ) -> None:
        """Update these parameters by their gradients times a factor, and take the gradients out of the dictionary."""
        self._try(lambda: self._hand_over(names, gradients))
        masters = [self._masters[name] for name in names]
        if factor != 1:
            handed_over = [master.grad for master in masters if master.grad is not None]
            torch._foreach_mul_(handed_over, factor)
        self._try(lambda: self._update(masters))
        with torch.no_grad():
            for name, master in zip(names, masters, strict=True):
                master.grad = None
                if not self._alike(name):
                    weight = self._part(self._trainable[name])
                    weight.copy_(master)

    def _try(self, attempt: Callable[[], None]) -> None:
        """Make the attempt; short of memory, again where a failed one has changed nothing."""
        if self._retried:
            patiently(attempt)
        else:
            attempt()

    def _hand_over(self, names: Sequence[str], gradients: NamedTensors) -> None:
        """Move gradients to the masters, in fp32. Called again, it goes on."""
        for name in names:
            if name in gradients:
                self._masters[name].grad = self._part(gradients[name]).float()
                del gradients[name]

    def _update(self, masters: Sequence[Parameter]) -> None:
        """AdamW's update of the masters. Moments that it has only begun to make are dropped."""
        new = [master for master in masters if not self._adam.state.get(master)]
        try:
            self._adam.step()
        except (RuntimeError, MemoryError):
            for master in new:
                self._adam.state.pop(master, None)
            raise

    def drop_gradients(self) -> None:
        for parameter in (*self._trainable.values(), *self._masters.values()):
            parameter.grad = None

    def state(self, *, live: bool = False) -> tuple[NamedTensors, NamedTensors]:
        """Copies of the (master) weights by name, and of the optimiser's state as ``name/key``, on the CPU.

        Of parts the first rank gets all, in copies; every rank must ask.

        Args:
            live: no copies where there are no parts, but what the next step will change.

        Raises:
            FtisError: the optimiser keeps something that no checkpoint can hold, which is named.
        """
        # Not of `state_dict`: bitsandbytes nests what it gives there, otherwise in each version.
        state = {}
        for name, master in self._masters.items():
            kept = self._adam.state.get(master, {})
            for key, value in flattened(kept).items():
                state[f"{name}/{key}"] = self._whole(name, value)
        weights = {name: self._whole(name, master.detach()) for name, master in self._masters.items()}
        if live or self._in_parts:
            return weights, state
        return _copied(weights), _copied(state)

    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave.

        Raises:
            FtisError: it is of another model, another choice of trainable parameters, or another optimiser.
        """
        entries: dict[str, NamedTensors] = {}  # by parameter
        for full, value in state.items():
            name, _, key = full.rpartition("/")
            entries.setdefault(name, {})[key] = value
        self._refuse_other(weights, entries)
        with torch.no_grad():
            for name, parameter in self._trainable.items():
                master = self._masters[name]
                master.copy_(self._mine(name, weights[name]))
                restored = weights[name]
                if sharded(parameter):
                    restored = master
                local(parameter).copy_(restored)
        states = {}
        self.updates = 0
        for position, name in enumerate(self._trainable):
            if name not in entries:
                continue
            mine = {key: self._mine(name, value) for key, value in entries[name].items()}
            found = unflattened(mine)
            states[position] = found
            self.updates = max(self.updates, int(found.get("step", 0)))
        self._adam.state.clear()  # a GPU has no room for two of each
        self._adam.load_state_dict({**self._adam.state_dict(), "state": states})

    def _refuse_other(self, weights: Mapping[str, Tensor], entries: Mapping[str, NamedTensors]) -> None:
        """Raise FtisError unless these weights and states are of this model and this optimiser."""
        for entry in entries.values():
            if self._moment not in entry:
                raise FtisError("The checkpoint belongs to another optimiser.")
        shapes = {name: parameter.shape for name, parameter in self._trainable.items()}
        found = {name: weight.shape for name, weight in weights.items()}
        if found != shapes or entries.keys() - shapes.keys():
            raise FtisError("The checkpoint belongs to another model or to another choice of trainable parameters.")

    def _whole(self, name: str, value: Tensor) -> Tensor:
        """All ranks' parts of a parameter, or of what the optimiser keeps of each of its elements."""
        if not self._in_parts:
            return value
        if value.shape != self._masters[name].shape:
            return value.to("cpu", copy=True)
        return self._team.whole(value, len(self._trainable[name]))

    def _mine(self, name: str, value: Tensor) -> Tensor:
        """The way back."""
        if not self._in_parts or value.shape != self._trainable[name].shape:
            return value
        return part_of(value, self._team.rank, self._team.size)

    def _part(self, tensor: Tensor) -> Tensor:
        """What this rank updates of a parameter, or of its gradient, in the same memory."""
        if not self._in_parts or sharded(tensor):
            return local(tensor)
        return part_of(tensor.detach(), self._team.rank, self._team.size)

    def _alike(self, name: str) -> bool:
        """Whether the master is the weight itself."""
        return self._trainable[name].dtype == torch.float32

    def _gradients(self) -> NamedTensors:
        """The gradients that lie in the parameters, by name."""
        return {name: one.grad for name, one in self._trainable.items() if one.grad is not None}

    def _slices(self, gradients: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """Names with a gradient: those without a copy at once, the others a few at a time, as each needs room.

        8-bit AdamW makes a parameter's moments just before it updates it, so there a new parameter comes alone.
        """
        alone = self._moment == _MOMENT["adamw8bit"]
        alike = []
        with_copies = []
        for name in list(gradients):  # which the caller takes out as it goes
            if alone and not self._adam.state.get(self._masters[name]):
                yield [name]
            elif self._alike(name):
                alike.append(name)
            else:
                with_copies.append(name)
        if alike:
            yield alike

        def fits(names: Sequence[str]) -> bool:
            elements = sum(self._trainable[name].numel() for name in names)
            return elements <= UPDATE_ELEMENTS

        yield from portions(with_copies, fits)


def _master(parameter: Parameter, part: Tensor) -> Parameter:
    """The fp32 parameter that AdamW updates: where the weight is one and whole, the weight itself."""
    if parameter.dtype == torch.float32:
        if part.shape == parameter.shape and not sharded(parameter):
            return parameter
        return Parameter(part)
    return Parameter(part.detach().float())


def _norm(gradients: Sequence[Tensor]) -> float:
    """The 2-norm of this rank's parts of the gradients; 0 without any."""
    if not gradients:
        return 0.0
    norms = []
    for gradient in gradients:
        norms.append(torch.linalg.vector_norm(local(gradient), dtype=torch.float32))
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return float(norm)


def _copied(tensors: Mapping[str, Tensor]) -> NamedTensors:
    """Copies on the CPU by the same names."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def eight_bit() -> Any:
    """bitsandbytes' AdamW, whose two moments take a byte each. Raises UsageError where that is missing."""
    return bitsandbytes("optim", "8-bit AdamW", "--set optimiser=adamw").AdamW8bit
