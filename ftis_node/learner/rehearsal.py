"""Whether an optimiser's state survives a checkpoint, found out on a few numbers before anything is trained."""

import functools

import torch
from safetensors.torch import load, save
from torch.nn import Parameter

from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError, UserError, first_line
from ftis_node.fit.memory import OptimiserName
from ftis_node.learner.optimiser import Optimiser
from ftis_node.policy.room import out_of_memory

_SIZES = {"large": 2**13 + 1, "small": 3}  # bitsandbytes keeps fewer than 4,096 numbers in fp32


@functools.lru_cache
def unsaveable(name: OptimiserName, device: torch.device) -> str | None:
    """Why the optimiser cannot be used on this device, in words; None if a state saved after a step can be restored and
    trained on. It takes milliseconds, and draws no random numbers.

    Raises:
        Exception: the device has no memory for so little, which says nothing of the optimiser.
    """
    try:
        settings = Settings(optimiser=name)
        (one, weights), (other, others) = (_made(settings, device) for _ in range(2))
        _step(one, weights)
        written = [save(part) for part in one.state()]
        other.restore(*(load(part) for part in written))
        if [save(part) for part in other.state()] != written:
            raise FtisError("Its state is not what was saved.")
        _step(other, others)
    except UserError as error:
        return error.what
    except Exception as error:  # of a library in whichever version, and of a driver
        if out_of_memory(error):
            raise
        return first_line(error, 300)
    return None


def _made(settings: Settings, device: torch.device) -> tuple[Optimiser, dict[str, Parameter]]:
    weights = {name: Parameter(torch.ones(size, device=device)) for name, size in _SIZES.items()}
    return Optimiser(weights, settings, 1e-3), weights


def _step(optimiser: Optimiser, weights: dict[str, Parameter]) -> None:
    for weight in weights.values():
        weight.grad = torch.linspace(-1, 2, weight.numel(), device=weight.device)
    optimiser.step(norm=optimiser.gradient_norm(), scale=1.0)
