"""Families of models whose GGUF files are understood: their configurations and weights as transformers names them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ftis_node.policy.gguf.header import GgufHeader, UnusableFile

# Parts of a layer, by llama.cpp's names.
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
}
_DENSE = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMED = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
FREQUENCIES = "rope_freqs.weight"
_FIRST_CONTEXT = 8192  # of Llama 3, before its positions were scaled


@dataclass(frozen=True)
class Family:
    """How an architecture of llama.cpp is written for transformers.

    Attributes:
        kind, model: its `model_type` and class. parts: of a layer, by llama.cpp's names.
        paired: rows of queries and keys are stored in pairs, as llama.cpp rotates them.
        gemma: norms are stored with one added, and some layers look back no further than a window.
    """

    kind: str
    model: str
    parts: Mapping[str, str] = field(default_factory=lambda: _DENSE | _ATTENTION)
    paired: bool = False
    gemma: bool = False


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", paired=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _DENSE | _ATTENTION | _NORMED),
    "phi3": Family("phi3", "Phi3ForCausalLM", {k: v for k, v in _DENSE.items() if k != "ffn_gate"} | _FUSED),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _DENSE | _ATTENTION | _SANDWICH,
        gemma=True,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _DENSE | _ATTENTION | _NORMED | _SANDWICH,
        gemma=True,
    ),
}


_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}  # Gemma's largest model scales its attention in another way


def named(header: GgufHeader, family: Family) -> dict[str, str]:
    """The name of each weight in transformers, and its name in the file, in the file's order. There is an embedding.

    Raises:
        UnusableFile: the file has a part that the family has not.
    """
    found = {}
    for name in header.tensors:
        layer = re.fullmatch(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)", name)
        whole = re.fullmatch(r"(\w+)\.(weight|bias)", name)
        if layer and layer[2] in family.parts:
            found[f"model.layers.{layer[1]}.{family.parts[layer[2]]}.{layer[3]}"] = name
        elif whole and whole[1] in _WHOLE:
            found[f"{_WHOLE[whole[1]]}.{whole[2]}"] = name
        elif name != FREQUENCIES:
            raise UnusableFile(f"it has a part {name!a}, which models of its family here do not have")
    if EMBEDDING not in found:
        raise UnusableFile("it has no embedding (token_embd.weight)")
    return found


def names_in(part: str, family: Family) -> str | None:
    """The name in a GGUF file of a parameter of transformers; None: the family has no such one. See `named`."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)", part)
    path, _, kind = part.rpartition(".")
    known: Mapping[str, str] = _WHOLE
    if layer:
        known = family.parts
        path = layer[2]
    parts = {there: here for here, there in known.items()}
    name = parts.get(path)
    if name is None:
        return None
    if layer:
        return f"blk.{layer[1]}.{name}.{kind}"
    return f"{name}.{kind}"


def configuration(header: GgufHeader, family: Family, factors: list[float]) -> dict[str, Any]:
    """What config.json says, but for the ids of tokens and whether head and embedding are one: `convert` adds these.

    Call it after `named`, for the embedding must be there.

    Args:
        factors: by which `rope_freqs` divides the frequencies of positions; empty where there is none.

    Raises:
        UnusableFile: a size is missing, a fact is no number, or positions are scaled in a way that is not known here.
    """
    rows, width = header.tensors["token_embd.weight"].shape[-2:]
    layers = _size(header, "block_count")
    heads = _size(header, "attention.head_count")
    if layers > len(header.tensors) or _size(header, "embedding_length") != width or heads > width:
        raise UnusableFile("its sizes contradict one another")
    turned = _size(header, "rope.dimension_count", width // heads)  # of a head's numbers, by its positions
    across = _size(header, "attention.key_length", turned)
    made: dict[str, Any] = {
        "model_type": family.kind,
        "architectures": [family.model],
        "dtype": "bfloat16",
        "vocab_size": rows,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _size(header, "attention.head_count_kv", heads),
        "intermediate_size": _size(header, "feed_forward_length"),
        "max_position_embeddings": _size(header, "context_length"),
        "rms_norm_eps": _number(header, "attention.layer_norm_rms_epsilon", 1e-5),
        "rope_parameters": _positions(header, factors),
    }
    if header.fact("expert_count"):
        raise UnusableFile("it is a mixture of experts, which is not read here")
    window = int(_number(header, "attention.sliding_window", 0))
    if family.kind == "llama":
        made["head_dim"] = across
        made["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    elif family.kind == "qwen3":
        made["head_dim"] = across
    elif family.kind == "phi3":
        made["rope_parameters"]["partial_rotary_factor"] = turned / (width // heads)
        made["sliding_window"] = window or None
        made["pad_token_id"] = None
    elif family.gemma:
        made["head_dim"] = across
        made["sliding_window"] = window or 4096
        made["query_pre_attn_scalar"] = across
        if layers == _LAYERS_OF_27B[family.kind]:
            made["query_pre_attn_scalar"] = width // heads
    if family.kind == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": _number(header, "rope.freq_base_swa", 1e4)}
        made["rope_parameters"] = {"full_attention": made["rope_parameters"], "sliding_attention": local}
    return made


def _number(header: GgufHeader, key: str, otherwise: float) -> float:
    """A fact of the architecture that is a number; `otherwise` where it is missing. Raises UnusableFile for others."""
    found = header.fact(key, otherwise)
    if not isinstance(found, int | float):
        raise UnusableFile(f"its {key} is no number")
    return float(found)


def _size(header: GgufHeader, key: str, otherwise: int | None = None) -> int:
    """A fact of the architecture that is a size, in [1, 2³¹); `otherwise` where it is missing.

    Raises:
        UnusableFile: it is anything else, or is missing while `otherwise` is None.
    """
    found = header.fact(key, otherwise)
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found < 1 << 31:
        raise UnusableFile(f"its {key} is missing, or no size")
    return found


def llama3_factors(rope: Mapping[str, Any], count: int) -> list[float]:
    """By what Llama 3.1's rule divides so many frequencies of positions, fast ones first: these stay as they are (1).

    Args:
        rope: the parameters of rotary positions, as transformers has them.
    """
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    factors = []
    for place in range(count):
        frequency = rope["rope_theta"] ** (-place / count)
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # within the first context
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - kept) / rope["factor"] + kept))
    return factors


def _positions(header: GgufHeader, factors: list[float]) -> dict[str, Any]:
    """The parameters of rotary positions, as transformers has them.

    factors: as for `configuration`.

    Raises:
        UnusableFile: positions are scaled in a way that is not known here.
    """
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": _number(header, "rope.freq_base", 1e4)}
    scaling = header.fact("rope.scaling.type", "none")
    if factors:  # Llama 3.1 and later: only slow frequencies are divided
        made |= {
            "rope_type": "llama3",
            "factor": max(factors),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": _FIRST_CONTEXT,
        }
        for found, wanted in zip(factors, llama3_factors(made, len(factors)), strict=True):
            if not math.isclose(found, wanted, rel_tol=1e-3):
                raise UnusableFile("its positions are scaled by factors that are not known here")
    elif scaling in ("linear", "yarn"):
        made |= {"rope_type": scaling, "factor": _number(header, "rope.scaling.factor", 1.0)}
        before = header.fact("rope.scaling.original_context_length")
        if before:
            made["original_max_position_embeddings"] = before
    elif scaling != "none":
        raise UnusableFile(f"its positions are scaled by {scaling!a}, which is not known here")
    return made
