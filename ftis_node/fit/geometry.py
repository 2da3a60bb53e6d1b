"""The shape of a causal language model in numbers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ftis_node.errors import UsageError, did_you_mean
from ftis_node.fit.context import Context

ALL_LINEAR = "all-linear"
"""The LoRA target that means every linear module but the output head, as in peft."""

# Names of Llama's linear modules, which the defaults are of, and the module that does the work of each in models that
# have made one of several (Phi-3). A model may lack some of them: its MLP may have no gate.
_USUAL = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **{"o_proj": "o_proj", "down_proj": "down_proj"},
}

_DEFAULTS = ({"q_proj", "v_proj"}, set(_USUAL))
"""The targets of the settings and of the built-in task's profile, which are for any model."""


def modules_meant(paths: Collection[str], head: str, targets: Sequence[str], model: str) -> set[str]:
    """Those of a model's linear modules that LoRA targets mean: whose path is, or ends with, one of them.

    Args:
        paths: of its linear modules; head: the output head's. model: its name, for messages.

    Raises:
        UsageError: a target is no linear module, or is the head; or none of the usual names is there.
    """
    meant: set[str] = set()
    unknown = []
    for target in targets:
        if target == ALL_LINEAR:
            found = {path for path in paths if path != head}
        else:
            found = _ending_with(paths, target) or _ending_with(paths, _USUAL.get(target, target))
        if head in found:
            raise UsageError(
                "LoRA on the output head is not supported: its export would be another model where it is tied.",
                f"Leave {target} out of lora_targets.",
            )
        if not found and target not in _USUAL:
            unknown.append(target)
        meant |= found
    if unknown or not meant:
        names = sorted({path.rpartition(".")[2] for path in paths if path != head})
        near = "".join(did_you_mean(target, names) for target in unknown)
        what = f"{model} has no linear module {' or '.join(unknown or targets)} for LoRA."
        fix = f"{near}Its modules are {', '.join(names)}, all of them {ALL_LINEAR}: name some with "
        raise UsageError(what, f"{fix}--set lora_targets=…, or train it with --full.")
    return meant


def _ending_with(paths: Collection[str], target: str) -> set[str]:
    return {path for path in paths if f".{path}".endswith(f".{target}")}


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
    normed                elements that the norms of a layer are given for a token
    vocabulary            rows of the embedding; the tokenizer may have fewer ids
    decoded               whether `decoder` knows the model
    padded                why its sequences cannot be packed for training; "" if they can
    context               tokens of the longest sequence that the model takes
    linears               every linear module, those of like path and shape together
    head                  the path of the output head
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
    normed: int
    vocabulary: int
    decoded: bool
    padded: str
    context: Context
    linears: tuple[Linear, ...]
    head: str

    @property
    def packed(self) -> bool:
        """Whether scoring lays sequences out without padding."""
        return not self.padded

    def targeted(self, targets: Sequence[str]) -> tuple[Linear, ...]:
        """The linear modules that LoRA targets mean. Raises UsageError as `modules_meant` does."""
        meant = modules_meant([linear.path for linear in self.linears], self.head, targets, self.name)
        return tuple(linear for linear in self.linears if linear.path in meant)

    def without_meaning(self, targets: Sequence[str]) -> list[str]:
        """The usual names in a chosen list of LoRA targets that mean no module here: `modules_meant` drops them."""
        if set(targets) in _DEFAULTS:
            return []
        paths = [linear.path for linear in self.linears]
        usual = [target for target in targets if target in _USUAL]
        return [target for target in usual if not _ending_with(paths, target) | _ending_with(paths, _USUAL[target])]

    @property
    def within_layers(self) -> tuple[Linear, ...]:
        """The linear modules that every layer has: all but the head's."""
        return tuple(linear for linear in self.linears if linear.count >= self.layers)

    def takes(self, targets: Sequence[str]) -> bool:
        """Whether LoRA layers can go there. Raises UsageError for a target other than Llama's, which a person chose."""
        try:
            return bool(self.targeted(targets))
        except UsageError:
            if not _USUAL.keys() >= set(targets):
                raise
            return False

    def lora_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Elements of the LoRA matrices A and B. Raises UsageError if the model has none of `targets`."""
        return sum(rank * (linear.inputs + linear.outputs) * linear.count for linear in self.targeted(targets))
