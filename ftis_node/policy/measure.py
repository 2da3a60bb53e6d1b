"""The shape of a model, exactly, from its configuration alone: no weights are read, and none are downloaded."""

import copy
import re
from collections import Counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from ftis_node.errors import UsageError, UserError, first_line
from ftis_node.fit.context import context_of
from ftis_node.fit.geometry import Geometry, Linear
from ftis_node.policy.adapters import head_of, inputs_and_outputs, linear_modules
from ftis_node.policy.generate.decoder import understood
from ftis_node.policy.kinds import refuse_config
from ftis_node.policy.load import unloadable, where_to_look
from ftis_node.policy.names import ALIASES, resolve
from ftis_node.policy.packing import unpackable
from ftis_node.policy.ready import refuse_past

# hidden, intermediate, layers, heads, kv heads, embedding rows, whether head and embedding are one
_QWEN25: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "0.5B": (896, 4_864, 24, 14, 2, 151_936, True),
    "1.5B": (1_536, 8_960, 28, 12, 2, 151_936, True),
    "3B": (2_048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3_584, 18_944, 28, 28, 4, 152_064, False),
}


def geometry(name: str) -> Geometry:
    """The geometry of `name` (see `resolve`), read from its configuration.

    A Qwen2.5 model needs no network: its configuration is kept here for when the hub does not answer. Of another hub id
    config.json is downloaded, if it is not in the cache; a GGUF file is unpacked the first time.

    Raises:
        UsageError: the name is unknown, or the architecture is not supported.
        UserError: the configuration cannot be found or read.
    """
    source = resolve(name)
    try:
        config = AutoConfig.from_pretrained(source, **where_to_look(source))
    except Exception as error:  # transformers raises a dozen kinds for a missing or damaged file
        config = known_config(name)
        if config is None:
            raise unloadable(name, source, error) from error
    refuse_config(config.to_dict(), name)
    return geometry_of(config, name)


def geometry_of(config: PretrainedConfig, name: str) -> Geometry:
    """The geometry of the model that `config` describes, which stays as it is; `name` is for messages.

    Raises:
        UsageError: the architecture is not supported.
    """
    try:
        with torch.device("meta"):  # shapes without memory
            # from_config writes the kind of attention into what it is given, so it gets a copy.
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
        refuse_past(model, name)
        return _measure(model, config.get_text_config(), name)
    except UserError:
        raise
    except Exception as error:  # as many kinds as there are architectures
        raise UsageError(
            f"{name} is no model that can be planned for: {first_line(error)}",
            "Use a decoder of a family such as Qwen2.5 or Llama.",
        ) from error


def known_config(name: str) -> PretrainedConfig | None:
    """The configuration of a Qwen2.5 model by alias or hub id, from memory; None for any other name.

    Coder and Instruct models have the geometry of their base model.
    """
    hub_id = ALIASES.get(name.lower(), name)
    if hub_id not in ALIASES.values():
        return None
    size = next(part for part in hub_id.split("-") if part in _QWEN25)
    hidden, intermediate, layers, heads, kv_heads, rows, tied = _QWEN25[size]
    return Qwen2Config(
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=tied,
    )


def _measure(model: Any, config: Any, name: str) -> Geometry:
    """The geometry of a model on the device "meta", before LoRA layers are added; config: of its part for text."""
    heads = config.num_attention_heads
    sizes = [parameter.numel() for parameter in model.parameters()]
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if isinstance(intermediate, list):  # of each layer
        intermediate = max(intermediate)
    return Geometry(
        name=name,
        parameters=sum(sizes),
        largest=max(sizes),
        hidden=config.hidden_size,
        intermediate=intermediate,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        normed=_normed(model, config),
        vocabulary=model.get_input_embeddings().weight.shape[0],
        decoded=understood(model),
        padded=unpackable(model),
        context=context_of(config),
        linears=_linears(model),
        head=head_of(model),
    )


def _normed(model: Any, config: Any) -> int:
    """How many elements the norms of a layer read for a token, by those of layer 0. Norms are its only vectors of
    weights. A norm of a head's width reads all heads: the key heads if it is called `k_norm`."""
    elements = 0
    for name, weight in model.named_parameters():
        if ".0." in name and weight.dim() == 1 and name.endswith("weight"):
            width = weight.numel()
            if width == getattr(config, "head_dim", None):
                heads = config.num_attention_heads
                if "k_norm" in name:
                    heads = config.num_key_value_heads
                width *= heads
            elements += width
    return elements


def _linears(model: Any) -> tuple[Linear, ...]:
    """The linear modules by kind and shape, with how many there are of each in the whole model."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for path, module in linear_modules(model).items():
        inputs, outputs = inputs_and_outputs(module)
        kind = re.sub(r"^.*\.\d+\.", "", path)  # without the number of its layer and what is before that
        counts[kind, inputs, outputs] += 1
    return tuple(Linear(*shape, count) for shape, count in counts.items())
