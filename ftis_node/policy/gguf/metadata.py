"""What a GGUF file says of a model of transformers: `families` and `words` the other way round, and held to them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from ftis_node.errors import UsageError
from ftis_node.policy.gguf.families import FAMILIES, HEAD, configuration, llama3_factors, names_in
from ftis_node.policy.gguf.header import GgufHeader, Stored, UnusableFile
from ftis_node.policy.gguf.words import spelled, write_tokenizer
from ftis_node.policy.load import load_tokenizer
from ftis_node.tokenizer.asking import end_ids
from ftis_node.tokenizer.declared import front_ids
from ftis_node.tokenizer.fingerprint import backend_of, fingerprint

_OTHERWISE = {"model_type", "architectures", "dtype", "pad_token_id"}  # said in another way
# What no fact says: it must be as the family has it.
_UNSAID = ("hidden_act", "hidden_activation", "layer_types", "use_bidirectional_attention")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_ENDS = ("eos", "eot", "eom")


def refused(model: str, why: str) -> UsageError:
    """Return the error for a model that cannot be written so that llama.cpp computes what is computed here."""
    what = f"{model} cannot be written as GGUF here: {why}."
    fix = (
        "A node that trains from a GGUF file (--model FILE.gguf) exports one; else use --to, and llama.cpp's converter."
    )
    return UsageError(what, f"{fix} Written here: {', '.join(FAMILIES)}.")


def architecture(config: Any, model: str) -> str:
    """The name that llama.cpp has for the family of a model. Raises UsageError for a family that is not written here.

    config: of transformers. model: its public name, for messages.
    """
    names = {family.kind: name for name, family in FAMILIES.items()} | {"mistral": "llama"}
    found = names.get(config.model_type)
    if found is None:
        raise refused(model, f"its architecture is {config.model_type!a}")
    return found


def names_for(parts: Iterable[str], config: Any, model: str) -> dict[str, str]:
    """The names in a file of a model's parameters, by transformers' names, in their order.

    Raises:
        UsageError: the family has no such parameter, or a head is tied to the embedding and named all the same.
    """
    family = FAMILIES[architecture(config, model)]
    found = {}
    for part in parts:
        name = names_in(part, family)
        if name is None or (part == HEAD and config.tie_word_embeddings):
            raise refused(model, f"it has a part {part!a}, which models of its family there do not have")
        found[part] = name
    return found


def factors_of(config: Any) -> list[float]:
    """By what Llama 3.1's rule divides the frequencies of positions, fast ones first; empty for any other rule."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return []
    return llama3_factors(rope, _across(config) // 2)


def _across(config: Any) -> int:
    """How many numbers a head has."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def facts_of(
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    shapes: Mapping[str, tuple[int, ...]],
    model: str,
) -> dict[str, Any]:
    """All facts but those of the file itself, as llama.cpp's converter writes them, by their whole keys.

    Args:
        config, tokenizer: of transformers. shapes: of the tensors, by their names in the file. model: its public name.

    Raises:
        UsageError: read again they would be another model, or its tokenizer would be another.
    """
    name = architecture(config, model)
    far = config.rope_parameters.get("full_attention", config.rope_parameters)
    near = config.rope_parameters.get("sliding_attention", {})
    across = _across(config)
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": across,
        "attention.value_length": across,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "rope.dimension_count": int(across * far.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": far["rope_theta"],
        "rope.freq_base_swa": near.get("rope_theta"),
    }
    sizes |= {cap: getattr(config, cap, None) for cap in _CAPS}
    if far["rope_type"] in ("linear", "yarn"):
        sizes |= {
            "rope.scaling.type": far["rope_type"],
            "rope.scaling.factor": float(far["factor"]),
            "rope.scaling.original_context_length": far.get("original_max_position_embeddings"),
        }
    facts: dict[str, Any] = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": model,
    }
    facts |= {f"{name}.{key}": value for key, value in sizes.items() if value is not None}
    backend = backend_of(tokenizer)
    spaced = backend.encode("a", add_special_tokens=False).tokens[:1] == ["▁a"]
    facts |= spelled(json.loads(backend.to_str()), shapes["token_embd.weight"][0], spaced=spaced)
    first = tokenizer.bos_token_id
    if first is None:
        first = config.bos_token_id
    ids = {
        "bos": first,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    ends = sorted(end_ids(tokenizer), key=lambda end: end != tokenizer.eos_token_id)  # its EOS first; three are written
    ids |= dict(zip(_ENDS, ends, strict=False))
    facts |= {f"tokenizer.ggml.{key}_token_id": place for key, place in ids.items() if place is not None}
    facts["tokenizer.ggml.add_bos_token"] = bool(front_ids(tokenizer))
    if isinstance(tokenizer.chat_template, str):
        facts["tokenizer.chat_template"] = tokenizer.chat_template
    _refuse_unlike(facts, shapes, config, tokenizer, model)
    return facts


def _refuse_unlike(
    facts: dict[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    model: str,
) -> None:
    """Raise UsageError unless the facts, read as those of a stranger's file, give this model and tokenizer again."""
    header = GgufHeader(facts, {name: Stored(tuple(shape), 0, 0, 0) for name, shape in shapes.items()})
    try:
        made = configuration(header, FAMILIES[facts["general.architecture"]], factors_of(config))
        with TemporaryDirectory() as folder:
            path = Path(folder)
            write_tokenizer(header, path)
            (path / "config.json").write_text(json.dumps(made), encoding="utf-8")
            words = load_tokenizer(folder)
            again = AutoConfig.from_pretrained(folder)
    except UnusableFile as error:
        raise refused(model, str(error)) from None
    for name in (*(made.keys() - _OTHERWISE), *_UNSAID, *_CAPS):
        wanted = getattr(config, name, None)
        if getattr(again, name, None) != wanted:
            raise refused(model, f"{name} of its config.json is {wanted!a}")
    if fingerprint(words) != fingerprint(tokenizer) or front_ids(words) != front_ids(tokenizer):
        raise refused(model, "its tokenizer is of a kind that is not known here")
