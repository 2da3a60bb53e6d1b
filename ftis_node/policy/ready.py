"""Making a model ready, and trying on a few tokens whether this code computes what the model itself does."""

import logging
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis_node.errors import UsageError, first_line
from ftis_node.policy.generate.decoder import understood
from ftis_node.policy.generate.native import decoder_logprobs
from ftis_node.policy.generate.sampling import DivergedError, left_padded, not_finite
from ftis_node.policy.kernels import fuse
from ftis_node.policy.packing import ATTENTIONS, Prefixed, unpackable
from ftis_node.policy.policy import Policy
from ftis_node.policy.score import completion_logprobs

# Families that load, by how the type of a relative begins.
_NEAREST = {
    "llama": "Llama 3",
    "falcon": "Falcon",
    "gemma": "Gemma 3",
    "granite": "Granite",
    "mistral": "Mistral",
}

# How far log-probs of one model may lie apart, on average, in layouts that mean the same. The first is for fp32. With
# fewer digits it is a multiple of what rounding alone does, between bounds. For a `_twin` that is what its own padded
# batch does; for the model, and for what refuses it, what another attention kernel does.
_EXACT = 1e-3
_NOISE = 2.5
_LEAST = 0.05
_MOST = 0.2
_MOST_OF_MODEL = 1.0
_UNKNOWN = 0.1  # where rounding cannot be measured

# And of their gradients, relative. In bf16 rounding alone gave 0.02 to 0.06; halves give 0.5. They are taken some
# layers below the head: each kind of layer is among these, and rounding adds up over few.
_SLOPE_EXACT = 1e-3
_SLOPE = 0.4
_SLOPE_LAYERS = 8

# The probe: tokens of each prompt and of its completions, from texts that have some variety; else ids are random. So
# many tokens at the beginning of the prompts are the same.
_SHAPE = ((8, (9, 4)), (4, (1, 13)))
_SHARED = 2
_DIFFERENT = 12
Probe = list[Prefixed]  # prompts with their completions
TEXTS = (
    "Anna bought three boxes of pencils with twelve in each. She gave a third of them to her brother and lost four. "
    "How many pencils does she have left? First count all pencils, then take away what is gone.",
)

_WINDOW = 5  # tokens: shorter than most of the probe's sequences
_TWIN_VOCABULARY = 512
_TWIN_WIDTH = 512  # of the layers between attention, at most
_TWIN_SPREAD = 2.0  # of what a matrix makes of normalised numbers: attention is sharp

_SLOW = "generates by transformers' modules, which takes longer"

logger = logging.getLogger(__name__)


def ready(policy: Policy, texts: Sequence[str] = TEXTS, *, trains: bool = True) -> Policy:
    """The policy as all else expects it: another `Policy` of the same model, which is changed and left in eval mode.

    `load.make_policy` and `worker.restore` call it once, after loading. It takes some passes of a few dozen tokens.

    texts: what this is tried on, questions of the task, from the first on as far as needed; none: random ids.
    trains: whether it is to be trained; if not, nothing is said or tried of that.

    Dropout is off, because log-probs of training must be those of sampling. Packed, if its attention goes through
    transformers' interface, and gives what padding gives; with fused kernels where `graphs` allows, if those do too.
    Native, if the native decoder knows it and gives that too. `way` says which it is, and why.

    Raises:
        UsageError: its log-probs are no numbers, or not those of its hidden states and head, or it keeps some dropout.
    """
    _remove_dropout(policy.model)
    policy.model.eval()
    other = _other_family(policy.causal_lm)
    if policy.causal_lm.get_decoder() is policy.causal_lm:
        raise UsageError(f"{policy.name} cannot be scored: its layers come with its head only.", other)
    refuse_past(policy.causal_lm, policy.name)
    probe = _probe(policy, texts)
    policy = replace(policy, packed=False, native=False)
    try:
        plain = _plain_logprobs(policy, probe)
        if trains:
            expected = _passed(policy, probe)
            policy.model.train()  # a dropout that is left would show
            training = _logprobs(policy, probe[:1])
        else:
            expected = (_logprobs(policy, probe), plain.new_zeros(0))
            training = expected[0]
    except Exception as error:  # as many kinds as there are architectures
        raise UsageError(f"{policy.name} cannot be scored: {first_line(error)}", other) from error
    finally:
        policy.model.eval()
    if not plain.isfinite().all():
        fault = not_finite(policy)
        if isinstance(fault, DivergedError):
            raise UsageError(
                f"{policy.name} is not finite in {str(policy.dtype).removeprefix('torch.')}.",
                "Its weights are damaged: download or copy the model again.",
            )
        raise fault
    tolerance = _tolerance(policy, plain, partial(_eager_logprobs, policy, probe), _MOST_OF_MODEL)
    padded = expected[0]
    if not _apart(padded, plain) <= tolerance:
        raise UsageError(f"{policy.name} changes its logits in a way that scoring does not know.", other)
    if not _apart(padded[: len(training)], training) <= tolerance:
        raise UsageError(f"{policy.name} has a dropout that cannot be switched off.", other)
    twin = _tried_twin(policy)
    if twin is None and _windowed(policy):  # the probe is too short to show a window that is left out
        return replace(policy, way=f"Sequences are padded. {policy.name} {_SLOW}, for its windows cannot be tried.")
    if twin is None:
        # without a twin the model itself must come closer
        strict = _tolerance(policy, plain, partial(_batch_logprobs, policy, probe), _MOST)
        trials = [_Trial(policy, probe, expected, strict)]
    else:
        trials = [twin, _Trial(policy, probe, expected, tolerance)]
    layout = ""
    if trains:
        policy, layout = _packed(policy, trials)
        layout = f"Sequences are {layout}. "
    policy, engine = _generating(policy, trials)
    return replace(policy, way=f"{layout}{policy.name} {engine}.")


@dataclass(frozen=True, eq=False)
class _Trial:
    """What a fast path is tried on: a model, or its twin.

    expected: `_passed` of the probe in padded rows; for a model that is not to be trained its gradient is empty.
    tolerance: nats that log-probs may lie apart, on average.
    """

    policy: Policy
    probe: Probe
    expected: tuple[Tensor, Tensor]
    tolerance: float


def _tried_twin(policy: Policy) -> _Trial | None:
    """The twin of a model, with what fast paths must give on it; None where it has none, or none that computes."""
    try:
        twin = _twin(policy)
        probe = _probe(twin, ())
        expected = _passed(twin, probe)
        tolerance = _tolerance(
            twin,
            _plain_logprobs(twin, probe),
            partial(_batch_logprobs, twin, probe),
            _MOST,
        )
    except Exception as error:  # as many kinds as there are architectures
        logger.debug("%s has no twin to try fast paths on: %r", policy.name, error)
        return None
    if not expected[0].isfinite().all():
        return None
    return _Trial(twin, probe, expected, tolerance)


def _twin(policy: Policy) -> Policy:
    """A model of the same class with one layer of each kind, two at least, random weights and sharp attention, in the
    same dtype, on the same device, without LoRA layers; its windows are shorter than the probe's sequences.

    Rounding adds up over layers, and trained weights enlarge it. A real Gemma 3 in bf16 lies 0.1 to 0.25 nats from
    itself by another kernel, as far as some faults would put it. In few layers a fault stands out.

    Raises:
        Exception: whatever its class raises at such sizes.
    """
    model = policy.causal_lm
    config = deepcopy(model.config)
    text = config.get_text_config()
    for name in config.sub_configs:  # of images and sound: as small as can be
        part = getattr(config, name)
        if part is not text and hasattr(part, "num_hidden_layers"):
            part.num_hidden_layers = 1
    named = getattr(text, "layer_types", None)
    kinds = list(dict.fromkeys(named or ["full_attention"]))
    if len(kinds) < 2:
        kinds = 2 * kinds
    text.num_hidden_layers = len(kinds)
    if named:
        text.layer_types = kinds
    if isinstance(getattr(text, "sliding_window", None), int):
        text.sliding_window = _WINDOW
    text.vocab_size = _TWIN_VOCABULARY
    text.intermediate_size = min(text.intermediate_size, _TWIN_WIDTH)
    text.initializer_range = _TWIN_SPREAD / text.hidden_size**0.5
    text.pad_token_id = None  # it may lie beyond so few rows
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = type(model)(config)
    return replace(policy, model=twin.to(policy.device, policy.dtype).eval())


def _windowed(policy: Policy) -> bool:
    """Whether any of its layers sees a window only."""
    model = policy.causal_lm
    return any(isinstance(vars(one).get("sliding_window"), int) for one in (model.config, *model.modules()))


def refuse_past(model: Any, name: str) -> None:
    """Raise UsageError for a model, such as Mamba, whose past is no keys and values: nothing here generates with it."""
    if "past_key_values" not in signature(model.forward).parameters:
        raise UsageError(f"{name} keeps its past in a way of its own, and cannot generate here.", _other_family(model))


def _other_family(model: Any) -> str:
    """Advice: a family that loads, the nearest relative of this model."""
    kind = str(model.config.model_type)
    nearest = next((name for begins, name in _NEAREST.items() if kind.startswith(begins)), "Qwen2.5")
    return f"Use a model of another family, for example {nearest}."


def _remove_dropout(model: torch.nn.Module) -> None:
    """Remove the dropout of modules for good, and set to 0 the rates that modules hand to functions."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def _packed(policy: Policy, trials: Sequence[_Trial]) -> tuple[Policy, str]:
    """The policy, `packed` if packing gives what padding gives; and how its sequences are laid out, in words.

    The models of all trials are left with the attention that was chosen, and the policy's, which is the last, with
    fused kernels where they do. If none will do, attention is as it was.
    """
    model = policy.causal_lm
    why = unpackable(model)
    if why:
        return policy, f"padded, which takes longer, for {why}"
    attention = ""
    flash = policy.device.type == "cuda" and policy.dtype != torch.float32
    before = model.config._attn_implementation
    fastest, *slower = ATTENTIONS
    tried = slower
    if flash:
        tried = [fastest, *slower]
    for name in tried:
        _attend_by(name, trials)
        right, why = _like_packed(trials)
        if right:
            break
        attention = f", not by FlashAttention ({why})"
    else:
        _attend_by(before, trials)
        return policy, f"padded, which takes longer, for packing gives something else ({why})"
    kernels = ""
    if policy.graphs and understood(model):
        kernels = _fused(trials[-1])
    if name == fastest:
        attention = ", by FlashAttention"
    return replace(policy, packed=True), f"packed{attention} ({why}){kernels}"


def _attend_by(name: str, trials: Sequence[_Trial]) -> None:
    """Let all of them attend by this one of transformers' implementations."""
    for trial in trials:
        trial.policy.causal_lm.set_attn_implementation(name)


def _fused(trial: _Trial) -> str:
    """Put fused kernels into the model's modules, and leave them if they give the same; say so in words."""
    model = trial.policy.causal_lm
    try:
        undo = fuse(model)
    except ImportError as error:
        return f", without liger-kernel's fused kernels ({first_line(error, 100)})"
    right, why = _like_packed([trial])
    if right:
        return f", with liger-kernel's fused kernels ({why})"
    undo()
    logger.warning("%s is trained without liger-kernel's fused kernels: %s.", trial.policy.name, why)
    return f", without liger-kernel's fused kernels ({why})"


def _passed(policy: Policy, probe: Probe) -> tuple[Tensor, Tensor]:
    """The probe's log-probs, and the gradient of an uneven sum of them by two matrices that are trained.

    Two, because a fresh LoRA layer's first has none. Log-probs are fp32 `[Σ lengths]`; the gradient is one fp32 vector,
    a 0 and then both matrices, and nothing of it stays in the parameters.
    """
    trained = _below_some_layers(policy)
    with torch.enable_grad():
        logprobs = completion_logprobs(policy, probe, 1.0)[0]
        uneven = torch.linspace(-1, 2, len(logprobs), device=policy.device)
        value = (logprobs * uneven).sum()
        slopes: tuple[Tensor, ...] = ()
        if trained:
            slopes = torch.autograd.grad(
                value,
                trained,
                allow_unused=True,
                materialize_grads=True,
            )
    flat = [slope.flatten().float() for slope in slopes]
    return logprobs.detach(), torch.cat([logprobs.new_zeros(1), *flat])


def _below_some_layers(policy: Policy) -> list[torch.nn.Parameter]:
    """The first two trained matrices of the last `_SLOPE_LAYERS` layers, else of the model; fewer if it has fewer."""
    embedding = policy.causal_lm.get_input_embeddings().weight
    config = policy.causal_lm.config.get_text_config()
    layers = int(getattr(config, "num_hidden_layers", 0))
    first = max(0, layers - _SLOPE_LAYERS)
    all_of_them = []
    near = []
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad and parameter.dim() > 1 and parameter is not embedding:
            all_of_them.append(parameter)
            number = re.search(r"\.(\d+)\.", name)
            if number is not None and int(number[1]) >= first:
                near.append(parameter)
    if len(near) > 1:
        return near[:2]
    return all_of_them[:2]


def _like_packed(trials: Sequence[_Trial]) -> tuple[bool, str]:
    """Whether packing gives on all of them what is expected; and how far off it is on the last, or why it fails."""
    why = ""
    for trial in trials:
        expected, expected_slope = trial.expected
        try:
            logprobs, slope = _passed(replace(trial.policy, packed=True), trial.probe)
        except Exception as error:  # a model's code that takes no such arguments, a kernel that knows no such GPU
            return False, first_line(error, 100)
        apart = _apart(expected, logprobs)
        why = _compared(apart, trial.tolerance)
        if not apart <= trial.tolerance:
            return False, why
        off = float((slope - expected_slope).norm())
        whole = float(expected_slope.norm())
        most = _SLOPE
        if trial.policy.dtype == torch.float32:
            most = _SLOPE_EXACT
        if not off <= most * whole:
            return False, f"the gradient differs by {off / whole:.2g} of itself"
    return True, why


def _generating(policy: Policy, trials: Sequence[_Trial]) -> tuple[Policy, str]:
    """Choose what generates: the native decoder if it gives what the model's own modules give, else these.

    If the decoder agrees without CUDA graphs only, it goes without them.

    Returns:
        The policy with `native` and `graphs` as chosen; and why, in words.
    """
    if not understood(policy.causal_lm):
        return policy, f"{_SLOW}, for the native decoder does not know them all"
    why = ""
    for trial in trials:
        tried = replace(trial.policy, packed=policy.packed, graphs=policy.graphs)
        try:
            apart = _apart(trial.expected[0], decoder_logprobs(tried, trial.probe))
        except Exception as error:  # what a GPU or its drivers cannot do: the model's own modules go another way
            logger.warning("Transformers' modules generate with %s, which takes longer: %r", policy.name, error)
            return policy, f"{_SLOW}, for the native decoder failed ({first_line(error, 100)})"
        why = _compared(apart, trial.tolerance)
        if not apart <= trial.tolerance:
            if not policy.graphs:
                return policy, f"{_SLOW}, for the native decoder gives something else ({why})"
            logger.warning("%s generates without CUDA graphs: %s.", policy.name, why)
            return _generating(replace(policy, graphs=False), trials)
    graphs = "without"
    if policy.graphs:
        graphs = "with"
    return replace(policy, native=True), f"generates by the native decoder ({why}), {graphs} CUDA graphs"


def _compared(apart: float, tolerance: float) -> str:
    """Both in nats, in words."""
    return f"log-probs differ by {apart:.2g}, {tolerance:.2g} is allowed"


def _tolerance(policy: Policy, plain: Tensor, again: Callable[[], Tensor], most: float) -> float:
    """How far log-probs of this project's layouts may lie from the model's own, by `_EXACT` and what follows it.

    Args:
        plain: log-probs by the model's own code.
        again: gives the same by its own code in another way. This project's layouts play no part in it.
        most: the result is no larger, in nats on average.
    """
    if policy.dtype == torch.float32:
        return _EXACT
    try:
        noise = _apart(plain, again())
    except Exception:  # as many kinds as there are architectures, and some have no other kernel
        noise = 0.0
    if noise > 0:
        return min(max(_NOISE * noise, _LEAST), most)
    return _UNKNOWN


def _probe(policy: Policy, texts: Sequence[str]) -> Probe:
    """Prompts and completions of `_SHAPE`, with tokens of these texts; with random ones where they have too few."""
    needed = sum(prompt + sum(completions) for prompt, completions in _SHAPE)
    ids = _ids_of(policy, texts, needed)
    if len(ids) < needed or len(set(ids)) < _DIFFERENT:
        ids = np.random.default_rng(0).integers(policy.vocabulary, size=needed).tolist()
    left = iter(ids)
    probe: Probe = []
    for prompt, completions in _SHAPE:
        taken = [next(left) for _ in range(prompt)]
        if probe:
            taken[:_SHARED] = probe[0].prompt[:_SHARED]
        answers = [np.asarray([next(left) for _ in range(count)]) for count in completions]
        probe.append(Prefixed(taken, answers))
    return probe


def _ids_of(policy: Policy, texts: Sequence[str], needed: int) -> list[int]:
    """So many tokens of these texts, or fewer if they have fewer, behind what the tokenizer puts in front of a text."""
    ids: list[int] = []
    for text in texts:
        found = policy.tokenizer(text, add_special_tokens=not ids)["input_ids"]
        ids += [one for one in found if one < policy.vocabulary]
        if len(ids) >= needed:
            break
    return ids[:needed]


@torch.no_grad()
def _logprobs(policy: Policy, probe: Probe) -> Tensor:
    """The probe's log-probs as `score` computes them, fp32 `[Σ lengths]`, without gradient."""
    return completion_logprobs(policy, probe, 1.0)[0]


@torch.no_grad()
def _plain_logprobs(policy: Policy, probe: Probe) -> Tensor:
    """The same by the whole model's own forward pass, every completion by itself."""
    out = []
    for group in probe:
        for completion in group.completions:
            first = len(group.prompt)
            ids = torch.tensor([[*group.prompt, *completion.tolist()]], device=policy.device)
            logits = policy.causal_lm(input_ids=ids).logits
            logprobs = logits[0, first - 1 : -1, : policy.vocabulary].float().log_softmax(-1)
            out.append(logprobs.gather(1, ids[0, first:, None])[:, 0])
    return torch.cat(out)


def _eager_logprobs(policy: Policy, probe: Probe) -> Tensor:
    """`_plain_logprobs` by another attention kernel, which sums in another order."""
    model = policy.causal_lm
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        return _plain_logprobs(policy, probe)
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def _batch_logprobs(policy: Policy, probe: Probe) -> Tensor:
    """The same by the whole model's own forward pass over all completions in one batch, padded on the left."""
    rows = []
    lengths = []
    for group in probe:
        for completion in group.completions:
            rows.append([*group.prompt, *completion.tolist()])
            lengths.append(len(completion))
    ids, mask = left_padded(rows)
    ids = ids.to(policy.device)
    mask = mask.to(policy.device)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits = policy.causal_lm(
        input_ids=ids,
        attention_mask=mask,
        position_ids=places,
    ).logits
    logprobs = logits[:, :-1, : policy.vocabulary].float().log_softmax(-1)
    found = logprobs.gather(2, ids[:, 1:, None])[:, :, 0]
    return torch.cat([row[-length:] for row, length in zip(found, lengths, strict=True)])


def _apart(one: Tensor, other: Tensor) -> float:
    """The mean distance of log-probs, in nats; nan where some are none, which is within no tolerance."""
    return float((one - other).abs().mean())
