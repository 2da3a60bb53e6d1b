"""Making a model ready, and trying on a few tokens whether this code computes what the model itself does."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftis_node.errors import UsageError, first_line
from ftis_node.policy.adapters import BaseTunerLayer
from ftis_node.policy.generate.decoder import understood
from ftis_node.policy.generate.native import decoder_logprobs
from ftis_node.policy.packing import ATTENTION, Prefixed
from ftis_node.policy.policy import Policy
from ftis_node.policy.score import completion_logprobs

_OTHER_MODEL = "Use a model of another family, for example Qwen2.5 or Llama."

# How far log-probs of one model may lie apart, on average, in layouts that mean the same. The first is for fp32; with
# fewer digits it is a multiple of rounding alone, between bounds. Random Qwen2 of 2 to 28 layers, sharp and not, needed
# 1.3 of it at most. Positions shifted by one made more than 7 of it where they changed a log-prob by a tenth or more.
_EXACT = 1e-3
_NOISE, _LEAST, _MOST = 2.5, 0.01, 1.0
_UNKNOWN = 0.1  # where rounding cannot be measured

logger = logging.getLogger(__name__)


def ready(policy: Policy) -> Policy:
    """The policy as all else expects it.

    Dropout is off, because log-probs of training must be those of sampling. Packed, if its attention goes through
    transformers' interface, has no window, and gives what padding gives. Lean, if `decoder` knows it and gives that
    too. `way` says which it is, and why.

    Raises:
        UsageError: its log-probs are not those of its hidden states and head, or it keeps some dropout.
    """
    _remove_dropout(policy.model)
    policy.model.eval()
    if isinstance(policy.causal_lm.get_output_embeddings(), BaseTunerLayer):
        raise UsageError("LoRA on the output head is not supported.", "Leave it out of lora_targets.")
    probe = _probe(policy)
    try:
        padded, plain = _logprobs(policy, probe), _plain_logprobs(policy, probe)
        policy.model.train()
        training = _logprobs(policy, probe)
    except Exception as error:  # as many kinds as there are architectures
        raise UsageError(f"{policy.name} cannot be scored: {first_line(error)}", _OTHER_MODEL) from error
    finally:
        policy.model.eval()
    tolerance = _tolerance(policy, probe, plain)
    if not _apart(padded, plain) <= tolerance:
        raise UsageError(f"{policy.name} changes its logits in a way that scoring does not know.", _OTHER_MODEL)
    if not _apart(padded, training) <= tolerance:
        raise UsageError(f"{policy.name} has a dropout that cannot be switched off.", _OTHER_MODEL)
    policy, layout = _packed(policy, probe, padded, tolerance)
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


def _packed(policy: Policy, probe: list[Prefixed], padded: Tensor, tolerance: float) -> tuple[Policy, str]:
    """The policy, and how its sequences are laid out, in words."""
    model, config = policy.causal_lm, policy.causal_lm.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if not model._supports_attention_backend:
        return policy, "padded, for the model's attention is its own"
    if kinds != {"full_attention"} or window is not None:
        return policy, "padded, for the model's attention has a window, or is of several kinds"
    model.set_attn_implementation(ATTENTION)
    packed = replace(policy, packed=True)
    try:
        apart = _apart(padded, _logprobs(packed, probe))
        why = _compared(apart, tolerance)
    except Exception as error:  # a model's code that takes no such arguments: then it is padded
        apart, why = float("inf"), first_line(error, 100)
    if apart <= tolerance:
        return packed, f"packed ({why})"
    model.set_attn_implementation("sdpa")
    return policy, f"padded, which takes longer, for packing gives something else ({why})"


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
