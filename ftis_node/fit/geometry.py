"""The shape of a causal language model in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from ftis_node.errors import UsageError
from ftis_node.fit.context import Context


@dataclass(frozen=True)
class Linear:
    """Linear modules of one shape: `path` within its layer (self_attn.q_proj), and how many the model has."""

    path: str
    inputs: int
    outputs: int
    count: int


@dataclass(frozen=True)
class Geometry:
    """A causal language model in numbers.

    parameters            elements of all parameters, shared ones once
    largest               elements of the largest parameter
    vocabulary            rows of the embedding; the tokenizer may have fewer ids
    decoded               tokens of the longest sequence that `decoder` generates, 0 if it does not know the model
    padded                why its sequences cannot be packed for training; "" if they can
    context               tokens of the longest sequence that the model takes
    linears               every linear module, those of like path and shape together
    """

    name: str
    parameters: int
    largest: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    decoded: float
    padded: str
    context: Context
    linears: tuple[Linear, ...]

    @property
    def packed(self) -> bool:
        """Whether scoring lays sequences out without padding."""
        return not self.padded

    def targeted(self, targets: Sequence[str]) -> tuple[Linear, ...]:
        """The linear modules that LoRA targets mean: those whose path is, or ends with, one of them.

        Raises:
            UsageError: there is none.
        """
        found = self.among(targets)
        if not found:
            names = sorted({linear.path.rpartition(".")[2] for linear in self.linears})
            what = f"{self.name} has no module {' or '.join(targets)} for LoRA."
            fix = f"Its modules are {', '.join(names)}: name some with --set lora_targets=…, or train it with --full."
            raise UsageError(what, fix)
        return found

    @property
    def within_layers(self) -> tuple[Linear, ...]:
        """The linear modules that every layer has: all but the head's."""
        return tuple(linear for linear in self.linears if linear.count >= self.layers)

    def among(self, targets: Sequence[str]) -> tuple[Linear, ...]:
        """As `targeted`; nothing where there is none."""
        return tuple(
            linear for linear in self.linears if any(f".{linear.path}".endswith(f".{target}") for target in targets)
        )

    def lora_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Elements of the LoRA matrices A and B. Raises UsageError if the model has none of `targets`."""
        return sum(rank * (linear.inputs + linear.outputs) * linear.count for linear in self.targeted(targets))
