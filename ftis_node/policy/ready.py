"""Making a model ready, and trying on a few tokens whether this code computes what the model itself does."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
_NEAREST = {"llama": "Llama 3", "falcon": "Falcon", "gemma": "Gemma 3", "granite": "Granite", "mistral": "Mistral"}

# How far log-probs of one model may lie apart, on average, in layouts that mean the same. The first is for fp32. With
# fewer digits it is a multiple of what rounding alone does, between bounds: for this project's layouts of what the
# model's own padded batch does, for a refusal of the model of what another attention kernel does.
_EXACT = 1e-3
_NOISE = 2.5
_LEAST = 0.05  # a real 0.5B in NF4 lay 0.032 apart without a fault; the least of four faults gives 0.085
_MOST = 0.2
_MOST_OF_MODEL = 1.0
_UNKNOWN = 0.1  # where rounding cannot be measured

# And of their gradients, relative. In bf16 rounding alone gave 0.02 to 0.06; halves give 0.5. They are taken some
# layers below the head: each kind of layer is among these, and rounding adds up over few.
_SLOPE_EXACT = 1e-3
_SLOPE = 0.4
_SLOPE_LAYERS = 8

# The probe: tokens of each prompt and of its completions, from texts that have some variety; else ids are random.
_SHAPE = ((8, (9, 4)), (4, (1, 13)))
_DIFFERENT = 12
Probe = list[Prefixed]  # prompts with their completions
TEXTS = (
    "Anna bought three boxes of pencils with twelve in each. She gave a third of them to her brother and lost four. "
    "How many pencils does she have left? First count all pencils, then take away what is gone.",
)

_WINDOW = 5  # tokens: shorter than most of the probe's sequences

logger = logging.getLogger(__name__)


def ready(policy: Policy, texts: Sequence[str] = TEXTS) -> Policy:
    """The policy as all else expects it.

    texts: what this is tried on, questions of the task, from the first on as far as needed.

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
    try:
        padded = _logprobs(policy, probe)
        plain = _plain_logprobs(policy, probe)
        policy.model.train()
        training = _logprobs(policy, probe[:1])
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
    tolerance = _tolerance(policy, probe, plain)

    def unlike(some: Tensor, others: Tensor) -> bool:
        """Whether no attention kernel makes them differ so; this is asked only where it matters, for it takes time."""
        apart = _apart(some, others)
        return not (apart <= tolerance or apart <= _tolerance_of_model(policy, probe, plain))

    if unlike(padded, plain):
        raise UsageError(f"{policy.name} changes its logits in a way that scoring does not know.", other)
    if unlike(padded[: len(training)], training):
        raise UsageError(f"{policy.name} has a dropout that cannot be switched off.", other)
    policy, layout = _packed(policy, probe, tolerance)
    with _narrow(policy.causal_lm) as windows:
        if windows:
            padded = _logprobs(replace(policy, packed=False), probe)
        policy, engine = _generating(replace(policy, native=False), probe, padded, tolerance)
    return replace(policy, way=f"Sequences are {layout}. {policy.name} {engine}.")


def refuse_past(model: Any, name: str) -> None:
    """Raises UsageError for a model, such as Mamba, whose past is no keys and values: the engine cannot ask it."""
    if "past_key_values" not in signature(model.forward).parameters:
        raise UsageError(f"{name} keeps its past in a way of its own, and cannot generate here.", _other_family(model))


def _other_family(model: Any) -> str:
    kind = str(model.config.model_type)
    nearest = next((name for begins, name in _NEAREST.items() if kind.startswith(begins)), "Qwen2.5")
    return f"Use a model of another family, for example {nearest}."


def _remove_dropout(model: torch.nn.Module) -> None:
    """Remove the dropout of modules, and set to 0 the rates that modules hand to functions."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name):
                setattr(module, name, 0.0)


def _packed(policy: Policy, probe: Probe, tolerance: float) -> tuple[Policy, str]:
    """The policy, and how its sequences are laid out, in words."""
    model = policy.causal_lm
    config = policy.causal_lm.config
    why = unpackable(model)
    if why:
        return policy, f"padded, which takes longer, for {why}"
    packed = replace(policy, packed=True)
    refused = ""
    flash = policy.device.type == "cuda" and policy.dtype != torch.float32
    before = config._attn_implementation
    with _narrow(model):
        expected = _passed(policy, probe)
        fastest, *slower = ATTENTIONS
        for name in [fastest, *slower] if flash else slower:
            model.set_attn_implementation(name)
            right, why = _like(expected, packed, probe, tolerance)
            if right:
                break
            refused = f", not by FlashAttention ({why})"
        else:
            model.set_attn_implementation(before)
            return policy, f"padded, which takes longer, for packing gives something else ({why})"
        kernels = ""
        if policy.graphs and understood(model):
            kernels = _fused(expected, packed, probe, tolerance)
    if name == fastest:
        refused = ", by FlashAttention"
    return packed, f"packed{refused} ({why}){kernels}"


def _fused(expected: tuple[Tensor, Tensor], policy: Policy, probe: Probe, tolerance: float) -> str:
    """Fused kernels in its modules, if they are to be had and give the same; which, in words."""
    try:
        undo = fuse(policy.causal_lm)
    except ImportError as error:
        return f", without liger-kernel's fused kernels ({first_line(error, 100)})"
    right, why = _like(expected, policy, probe, tolerance)
    if right:
        return f", with liger-kernel's fused kernels ({why})"
    undo()
    logger.warning("%s is trained without liger-kernel's fused kernels: %s.", policy.name, why)
    return f", without liger-kernel's fused kernels ({why})"


@contextmanager
def _narrow(model: Any) -> Iterator[list[Any]]:
    """Within, windows are shorter than the probe's sequences: it would not show a longer one that is left out. Yield
    what has one, nothing if all see everything."""
    found = [one for one in (model.config, *model.modules()) if isinstance(vars(one).get("sliding_window"), int)]
    before = [one.sliding_window for one in found]
    try:
        for one in found:
            one.sliding_window = min(one.sliding_window, _WINDOW)
        yield found
    finally:
        for one, window in zip(found, before, strict=True):
            one.sliding_window = window


def _passed(policy: Policy, probe: Probe) -> tuple[Tensor, Tensor]:
    """The probe's log-probs, and the gradient of an uneven sum of them by two matrices that are trained.

    Two, because a fresh LoRA layer's first has none.
    """
    trained = _below_some_layers(policy)
    with torch.enable_grad():
        logprobs = completion_logprobs(policy, probe, 1.0)[0]
        value = (logprobs * torch.linspace(-1, 2, len(logprobs), device=policy.device)).sum()
        slopes: tuple[Tensor, ...] = ()
        if trained:
            slopes = torch.autograd.grad(value, trained, allow_unused=True, materialize_grads=True)
    flat = [slope.flatten().float() for slope in slopes]
    return logprobs.detach(), torch.cat([logprobs.new_zeros(1), *flat])


def _below_some_layers(policy: Policy) -> list[torch.nn.Parameter]:
    """The first two trained matrices of the last layers, else of the model."""
    embedding = policy.causal_lm.get_input_embeddings().weight
    first = max(0, int(getattr(policy.causal_lm.config.get_text_config(), "num_hidden_layers", 0)) - _SLOPE_LAYERS)
    all_of_them = []
    near = []
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad and parameter.dim() > 1 and parameter is not embedding:
            all_of_them.append(parameter)
            number = re.search(r"\.(\d+)\.", name)
            if number is not None and int(number[1]) >= first:
                near.append(parameter)
    return (near if len(near) > 1 else all_of_them)[:2]


def _like(expected: tuple[Tensor, Tensor], policy: Policy, probe: Probe, tolerance: float) -> tuple[bool, str]:
    """Whether `_passed` gives this too; and how far off it is, or why it fails."""
    try:
        logprobs, slope = _passed(policy, probe)
    except Exception as error:  # a model's code that takes no such arguments, a kernel that knows no such GPU
        return False, first_line(error, 100)
    apart = _apart(expected[0], logprobs)
    if not apart <= tolerance:
        return False, _compared(apart, tolerance)
    off = float((slope - expected[1]).norm())
    whole = float(expected[1].norm())
    most = _SLOPE_EXACT if policy.dtype == torch.float32 else _SLOPE
    if not off <= most * whole:
        return False, f"the gradient differs by {off / whole:.2g} of itself"
    return True, _compared(apart, tolerance)


def _generating(policy: Policy, probe: Probe, expected: Tensor, tolerance: float) -> tuple[Policy, str]:
    """Choose what generates: the native decoder if it gives what the model's own modules give, else these.

    If the decoder agrees without CUDA graphs only, it goes without them.

    Args:
        expected: log-probs of the probe by transformers' modules. tolerance: in nats, the mean over its tokens.

    Returns:
        The policy with `native` and `graphs` as chosen; and why, in words.
    """
    slow = "generates by transformers' modules, which takes longer"
    if not understood(policy.causal_lm):
        return policy, f"{slow}, for the native decoder does not know them all"
    try:
        apart = _apart(expected, decoder_logprobs(policy, probe))
    except Exception as error:  # what a GPU or its drivers cannot do: the model's own modules go another way
        logger.warning("Transformers' modules generate with %s, which takes longer: %r", policy.name, error)
        return policy, f"{slow}, for the native decoder failed ({first_line(error, 100)})"
    if apart <= tolerance:
        graphs = "with" if policy.graphs else "without"
        how = f"generates by the native decoder ({_compared(apart, tolerance)}), {graphs} CUDA graphs"
        return replace(policy, native=True), how
    if policy.graphs:
        logger.warning("%s generates without CUDA graphs: %s.", policy.name, _compared(apart, tolerance))
        return _generating(replace(policy, graphs=False), probe, expected, tolerance)
    return policy, f"{slow}, for the native decoder gives something else ({_compared(apart, tolerance)})"


def _compared(apart: float, tolerance: float) -> str:
    return f"log-probs differ by {apart:.2g}, {tolerance:.2g} is allowed"


def _tolerance(policy: Policy, probe: Probe, plain: Tensor) -> float:
    """How far log-probs of this project's layouts may lie from the model's own, by `_EXACT` and what follows it.

    To measure rounding, the model's own code computes row by row and as a padded batch. This project's layouts play no
    part in it.
    """
    if policy.dtype == torch.float32:
        return _EXACT
    try:
        noise = _apart(plain, _batch_logprobs(policy, probe))
    except Exception:  # as many kinds as there are architectures
        noise = 0.0
    return _allowed(noise, _MOST)


def _tolerance_of_model(policy: Policy, probe: Probe, plain: Tensor) -> float:
    """As `_tolerance`, for what refuses the model: by another attention kernel, which sums in another order."""
    if policy.dtype == torch.float32:
        return _EXACT
    model = policy.causal_lm
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        noise = _apart(plain, _plain_logprobs(policy, probe))
    except Exception:  # as above, and some have no other kernel
        noise = 0.0
    finally:
        model.set_attn_implementation(before)
    return _allowed(noise, _MOST_OF_MODEL)


def _allowed(noise: float, most: float) -> float:
    if noise > 0:
        return min(max(_NOISE * noise, _LEAST), most)
    return _UNKNOWN


def _probe(policy: Policy, texts: Sequence[str]) -> Probe:
    needed = sum(prompt + sum(completions) for prompt, completions in _SHAPE)
    ids = _ids_of(policy, texts, needed)
    if len(ids) < needed or len(set(ids)) < _DIFFERENT:
        ids = np.random.default_rng(0).integers(policy.vocabulary, size=needed).tolist()
    left = iter(ids)
    probe = []
    for prompt, completions in _SHAPE:
        taken = [next(left) for _ in range(prompt)]
        answers = [np.asarray([next(left) for _ in range(count)]) for count in completions]
        probe.append(Prefixed(taken, answers))
    return probe


def _ids_of(policy: Policy, texts: Sequence[str], needed: int) -> list[int]:
    """So many tokens of these texts, one after another, behind what the tokenizer puts in front of a text."""
    ids: list[int] = []
    for text in texts:
        found = policy.tokenizer(text, add_special_tokens=not ids)["input_ids"]
        ids += [one for one in found if one < policy.vocabulary]
        if len(ids) >= needed:
            break
    return ids[:needed]


@torch.no_grad()
def _logprobs(policy: Policy, probe: Probe) -> Tensor:
    return completion_logprobs(policy, probe, 1.0)[0]


@torch.no_grad()
def _plain_logprobs(policy: Policy, probe: Probe) -> Tensor:
    """The same by the whole model's own forward pass, every completion by itself."""
    out = []
    for group in probe:
        for completion in group.completions:
            first = len(group.prompt)
            ids = torch.tensor([[*group.prompt, *completion.tolist()]], device=policy.device)
            logits: Any = policy.causal_lm(input_ids=ids).logits
            logprobs = logits[0, first - 1 : -1, : policy.vocabulary].float().log_softmax(-1)
            out.append(logprobs.gather(1, ids[0, first:, None])[:, 0])
    return torch.cat(out)


@torch.no_grad()
def _batch_logprobs(policy: Policy, probe: Probe) -> Tensor:
    """The same by the whole model's own forward pass over all completions in one batch, padded on the left."""
    rows = [[*group.prompt, *completion.tolist()] for group in probe for completion in group.completions]
    ids, mask = left_padded(rows)
    ids = ids.to(policy.device)
    mask = mask.to(policy.device)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits: Any = policy.causal_lm(input_ids=ids, attention_mask=mask, position_ids=places).logits
    logprobs = logits[:, :-1, : policy.vocabulary].float().log_softmax(-1)
    found = logprobs.gather(2, ids[:, 1:, None])[:, :, 0]
    lengths = [len(completion) for group in probe for completion in group.completions]
    return torch.cat([row[-length:] for row, length in zip(found, lengths, strict=True)])


def _apart(one: Tensor, other: Tensor) -> float:
    """The mean distance of log-probs; nan where some are none, which is no distance within any tolerance."""
    return float((one - other).abs().mean())
