"""Making a model ready, and trying on a few tokens whether this code computes what the model itself does."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis_node.errors import UsageError, first_line
from ftis_node.policy.adapters import BaseTunerLayer
from ftis_node.policy.generate.decoder import understood
from ftis_node.policy.generate.native import decoder_logprobs
from ftis_node.policy.kernels import fuse
from ftis_node.policy.packing import ATTENTIONS, Prefixed, unpackable
from ftis_node.policy.policy import Policy
from ftis_node.policy.score import completion_logprobs

# Families that load, by how the type of a relative begins.
_NEAREST = {"llama": "Llama 3", "falcon": "Falcon", "gemma": "Gemma 3", "granite": "Granite", "mistral": "Mistral"}

# How far log-probs of one model may lie apart, on average, in layouts that mean the same. The first is for fp32; with
# fewer digits it is a multiple of rounding alone, between bounds. Random Qwen2 of 2 to 28 layers, sharp and not, needed
# 1.3 of it at most. Positions shifted by one made more than 7 of it where they changed a log-prob by a tenth or more.
_EXACT = 1e-3
_NOISE, _LEAST, _MOST = 2.5, 0.01, 1.0
_UNKNOWN = 0.1  # where rounding cannot be measured

# And of their gradients, relative. In bf16 rounding alone gave 0.02 to 0.06, of 28 sharp layers 0.25; halves give 0.5.
_SLOPE_EXACT, _SLOPE = 1e-3, 0.4

_WINDOW = 5  # tokens: shorter than most of the probe's sequences

logger = logging.getLogger(__name__)


def ready(policy: Policy) -> Policy:
    """The policy as all else expects it.

    Dropout is off, because log-probs of training must be those of sampling. Packed, if its attention goes through
    transformers' interface, and gives what padding gives; with fused kernels where `graphs` allows, if those do too.
    Lean, if `decoder` knows it and gives that too. `way` says which it is, and why.

    Raises:
        UsageError: its log-probs are no numbers, or not those of its hidden states and head, or it keeps some dropout.
    """
    _remove_dropout(policy.model)
    policy.model.eval()
    if isinstance(policy.causal_lm.get_output_embeddings(), BaseTunerLayer):
        raise UsageError("LoRA on the output head is not supported.", "Leave it out of lora_targets.")
    kind = str(policy.causal_lm.config.model_type)
    nearest = next((name for begins, name in _NEAREST.items() if kind.startswith(begins)), "Qwen2.5")
    other = f"Use a model of another family, for example {nearest}."
    if policy.causal_lm.get_decoder() is policy.causal_lm:
        raise UsageError(f"{policy.name} cannot be scored: its layers come with its head only.", other)
    probe = _probe(policy)
    try:
        padded, plain = _logprobs(policy, probe), _plain_logprobs(policy, probe)
        policy.model.train()
        training = _logprobs(policy, probe)
    except Exception as error:  # as many kinds as there are architectures
        raise UsageError(f"{policy.name} cannot be scored: {first_line(error)}", other) from error
    finally:
        policy.model.eval()
    if not plain.isfinite().all():
        wider = policy.dtype != torch.float32
        raise UsageError(
            f"{policy.name} is not finite in {str(policy.dtype).removeprefix('torch.')}.",
            "Its activations are too large for that dtype: use --set dtype=bfloat16 (slow before Ampere) or float32."
            if wider
            else "Its weights are damaged: download or copy the model again.",
        )
    tolerance = _tolerance(policy, probe, plain)
    if not _apart(padded, plain) <= tolerance:
        raise UsageError(f"{policy.name} changes its logits in a way that scoring does not know.", other)
    if not _apart(padded, training) <= tolerance:
        raise UsageError(f"{policy.name} has a dropout that cannot be switched off.", other)
    policy, layout = _packed(policy, probe, tolerance)
    policy, engine = _lean(replace(policy, lean=False), probe, padded, tolerance)
    return replace(policy, way=f"Sequences are {layout}. {policy.name} {engine}.")


def _remove_dropout(model: torch.nn.Module) -> None:
    """Remove the dropout of modules, and set to 0 the rates that modules hand to functions."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name):
                setattr(module, name, 0.0)


def _packed(policy: Policy, probe: list[Prefixed], tolerance: float) -> tuple[Policy, str]:
    """The policy, and how its sequences are laid out, in words."""
    model, config = policy.causal_lm, policy.causal_lm.config
    if why := unpackable(model):
        return policy, f"padded, which takes longer, for {why}"
    packed, why, refused = replace(policy, packed=True), "", ""
    flash, before = policy.device.type == "cuda" and policy.dtype != torch.float32, config._attn_implementation
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
        kernels = _fused(expected, packed, probe, tolerance) if policy.graphs and understood(model) else ""
    return packed, f"packed{', by FlashAttention' if name == fastest else refused} ({why}){kernels}"


def _fused(expected: tuple[Tensor, Tensor], policy: Policy, probe: list[Prefixed], tolerance: float) -> str:
    """Fused kernels in its modules, if they are to be had and give the same; which, in words."""
    try:
        undo = fuse(policy.causal_lm)
    except ImportError as error:
        return f", without liger-kernel's fused kernels ({first_line(error, 100)})"
    right, why = _like(expected, policy, probe, tolerance)
    if not right:
        undo()
        logger.warning("%s is trained without liger-kernel's fused kernels: %s.", policy.name, why)
    return f", with{'' if right else 'out'} liger-kernel's fused kernels ({why})"


@contextmanager
def _narrow(model: Any) -> Iterator[None]:
    """Within, windows are shorter than the probe's sequences: it would not show a longer one that is left out."""
    found = [one for one in (model.config, *model.modules()) if isinstance(vars(one).get("sliding_window"), int)]
    before = [one.sliding_window for one in found]
    try:
        for one in found:
            one.sliding_window = min(one.sliding_window, _WINDOW)
        yield
    finally:
        for one, window in zip(found, before, strict=True):
            one.sliding_window = window


def _passed(policy: Policy, probe: list[Prefixed]) -> tuple[Tensor, Tensor]:
    """The probe's log-probs, and the gradient of an uneven sum of them by the first two matrices that are trained.

    Two, because a fresh LoRA layer's first has none.
    """
    embedding = policy.causal_lm.get_input_embeddings().weight
    trained = [p for p in policy.model.parameters() if p.requires_grad and p.dim() > 1 and p is not embedding]
    with torch.enable_grad():
        logprobs = completion_logprobs(policy, probe, 1.0)[0]
        value = (logprobs * torch.linspace(-1, 2, len(logprobs), device=policy.device)).sum()
        slopes = torch.autograd.grad(value, trained[:2], allow_unused=True, materialize_grads=True) if trained else ()
    return logprobs.detach(), torch.cat([logprobs.new_zeros(1), *(slope.flatten().float() for slope in slopes)])


def _like(expected: tuple[Tensor, Tensor], policy: Policy, probe: list[Prefixed], tolerance: float) -> tuple[bool, str]:
    """Whether `_passed` gives this too; and how far off it is, or why it fails."""
    try:
        logprobs, slope = _passed(policy, probe)
    except Exception as error:  # a model's code that takes no such arguments, a kernel that knows no such GPU
        return False, first_line(error, 100)
    apart = _apart(expected[0], logprobs)
    if not apart <= tolerance:
        return False, _compared(apart, tolerance)
    off, most = float((slope - expected[1]).norm()), _SLOPE_EXACT if policy.dtype == torch.float32 else _SLOPE
    if not off <= most * float(expected[1].norm()):
        return False, f"the gradient differs by {off / float(expected[1].norm()):.2g} of itself"
    return True, _compared(apart, tolerance)


def _lean(policy: Policy, probe: list[Prefixed], padded: Tensor, tolerance: float) -> tuple[Policy, str]:
    """The policy, lean if `decoder` generates; how, in words. If CUDA graphs give something else, it goes without."""
    slow = "generates by transformers' modules, which takes longer"
    if not understood(policy.causal_lm):
        return policy, f"{slow}, for the native decoder does not know them all"
    try:
        apart = _apart(padded, decoder_logprobs(policy, probe))
    except Exception as error:  # what a GPU or its drivers cannot do: the model's own modules go another way
        logger.warning("%s is generated with by transformers' modules, which takes longer: %r", policy.name, error)
        return policy, f"{slow}, for the native decoder failed ({first_line(error, 100)})"
    if apart <= tolerance:
        graphs = f"with{'' if policy.graphs else 'out'} CUDA graphs"
        how = f"generates by the native decoder ({_compared(apart, tolerance)}), {graphs}"
        return replace(policy, lean=True), how
    if policy.graphs:
        logger.warning("%s is generated with without CUDA graphs: %s.", policy.name, _compared(apart, tolerance))
        return _lean(replace(policy, graphs=False), probe, padded, tolerance)
    return policy, f"{slow}, for the native decoder gives something else ({_compared(apart, tolerance)})"


def _compared(apart: float, tolerance: float) -> str:
    return f"log-probs differ by {apart:.2g}, {tolerance:.2g} is allowed"


def _tolerance(policy: Policy, probe: list[Prefixed], plain: Tensor) -> float:
    """How far log-probs may lie apart, by `_EXACT` and what follows it.

    To measure rounding, the model's own code makes the same passes with another attention kernel, which sums in another
    order. This project's layouts play no part in it.
    """
    if policy.dtype == torch.float32:
        return _EXACT
    model = policy.causal_lm
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        noise = _apart(plain, _plain_logprobs(policy, probe))
    except Exception:  # as many kinds as there are architectures, and some have no other kernel
        noise = 0.0
    finally:
        model.set_attn_implementation(before)
    return min(max(_NOISE * noise, _LEAST), _MOST) if noise > 0 else _UNKNOWN


def _probe(policy: Policy) -> list[Prefixed]:
    ids = np.random.default_rng(0).integers(policy.vocabulary, size=40)
    return [Prefixed(ids[:7].tolist(), [ids[7:16], ids[16:20]]), Prefixed(ids[20:23].tolist(), [ids[23:24], ids[24:]])]


@torch.no_grad()
def _logprobs(policy: Policy, probe: list[Prefixed]) -> Tensor:
    return completion_logprobs(policy, probe, 1.0)[0]


@torch.no_grad()
def _plain_logprobs(policy: Policy, probe: list[Prefixed]) -> Tensor:
    """The same by the whole model's own forward pass, every completion by itself."""
    out = []
    for group in probe:
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt, *completion.tolist()]], device=policy.device)
            logits: Any = policy.causal_lm(input_ids=ids).logits[0, len(group.prompt) - 1 : -1, : policy.vocabulary]
            out.append(logits.float().log_softmax(-1).gather(1, ids[0, len(group.prompt) :, None])[:, 0])
    return torch.cat(out)


def _apart(one: Tensor, other: Tensor) -> float:
    """The mean distance of log-probs; nan where some are none, which is no distance within any tolerance."""
    return float((one - other).abs().mean())
