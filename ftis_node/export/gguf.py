"""A trained model, or its LoRA layers alone, as one GGUF file for llama.cpp, Ollama and LM Studio."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.export.appearing import appearing
from ftis_node.export.model import Exported, config_of, exported, kind_of, merged, stored, targets_of
from ftis_node.export.record import record_of
from ftis_node.host.doing import advance, doing
from ftis_node.host.files import free_bytes
from ftis_node.packet.arrays import AnyArray
from ftis_node.policy.gguf.families import FAMILIES, FREQUENCIES, HEAD
from ftis_node.policy.gguf.folder import blocks, read
from ftis_node.policy.gguf.header import MAGIC
from ftis_node.policy.gguf.metadata import architecture, factors_of, facts_of, names_for
from ftis_node.policy.load import load_tokenizer
from ftis_node.policy.names import file_of, public_name
from ftis_node.text import rounded
from ftis_node.worker.restore import Checkpoint

# By the names of --dtype: llama.cpp's numbers of a tensor's kind, and of a file's.
KINDS = {"float32": (0, 0), "f16": (1, 1), "q8_0": (8, 7), "bfloat16": (30, 32)}
_FLOAT32, _F16 = KINDS["float32"][0], KINDS["f16"][0]
_HEADER = 32 << 20  # bytes, more than one takes
_LARGEST = float(np.finfo(np.float16).max)
_LIST = 9
_KINDS_OF = {int: 4, float: 6, bool: 7, str: 8, list: _LIST}
# Keys that describe the file itself begin so; a file that is made from another has its own.
_OWN = ("general.file_type", "general.quantization_version", "general.alignment", "split.")


@dataclass(frozen=True)
class _Part:
    """A tensor to be written: its name in the file, that of its values, shape, the number of its kind, and bytes."""

    name: str
    source: str
    shape: tuple[int, ...]
    kind: int
    size: int


def export_gguf(
    checkpoint: Checkpoint, settings: Settings, to: Path, *, dtype: str | None, adapter: bool, overwrite: bool
) -> Exported:
    """Write the file `to`, whole or not at all.

    Args:
        dtype: one of `KINDS`; by default f16, for an adapter float32. Vectors are always float32, as llama.cpp wants.
        adapter: the LoRA layers alone, which llama.cpp adds to the base model.
        overwrite: replaces a GGUF file that lies at `to`.

    Raises:
        UsageError: the model's family or tokenizer cannot be written so that llama.cpp computes the same, the
            checkpoint has no LoRA layers, or `to` must not be written.
        UserError: weights cannot be read, or the file cannot be written.
    """
    sizes = blocks()
    kind = kind_of(checkpoint, adapter=adapter)
    model = settings.model
    public = public_name(model)
    named = file_of(model)
    base = None if named is None else named[0]
    _check_target(to, base, overwrite=overwrite)
    config = config_of(model)
    if dtype is None:
        dtype = "float32" if adapter else "f16"
    wanted, file_type = KINDS[dtype]
    facts: dict[str, Any] = {"general.architecture": architecture(config, public)}
    kinds: dict[str, int] = {}
    if adapter:
        targets_of(checkpoint, model, config)
        names = {name: _lora_name(name, config, public) for name in checkpoint.shapes}
        parts = [_part(name, source, checkpoint.shapes[source], wanted, sizes) for source, name in names.items()]
        facts |= {"general.type": "adapter", "adapter.type": "lora", "general.name": public}
        facts["adapter.lora.alpha"] = float(settings.lora_alpha)
    else:
        with torch.device("meta"):
            skeleton: Any = AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        if config.tie_word_embeddings:
            shapes.pop(HEAD)
        names = names_for(shapes, config, public)
        parts = [_part(name, source, shapes[source], wanted, sizes) for source, name in names.items()]
        factors = factors_of(config)
        if factors:
            parts.append(_part(FREQUENCIES, "", (len(factors),), wanted, sizes))
        if base is not None:
            header = read(base)
            kinds = header.kinds
            facts |= {key: value for key, value in header.facts.items() if not key.startswith(_OWN)}
        else:
            with doing("checking the tokenizer"):
                written = {part.name: part.shape for part in parts}
                facts |= facts_of(config, load_tokenizer(model), written, public)
    facts |= {"general.file_type": file_type, "general.quantization_version": 2}
    _check_room(to, sum(part.size for part in parts))
    values = _values(checkpoint, settings, adapter=adapter)
    with appearing(to, "Make room, or name another file.") as file:
        _write(file, facts, kinds, parts, lambda part: _arranged(part, values, config))
    return exported(checkpoint, settings, to, public, kind, dtype, {to.name: to.stat().st_size})


def _part(name: str, source: str, shape: tuple[int, ...], wanted: int, sizes: Mapping[int, tuple[int, int]]) -> _Part:
    """A tensor of the kind that was asked for; a vector in float32, rows that no block divides in f16."""
    kind = wanted
    if len(shape) == 1:
        kind = _FLOAT32
    elif shape[-1] % sizes[wanted][0] != 0:
        kind = _F16
    elements, size = sizes[kind]
    return _Part(name, source, shape, kind, math.prod(shape) // elements * size)


def _lora_name(name: str, config: Any, model: str) -> str:
    """base_model.model.MODULE.lora_A.default.weight as MODULE's name in a file, with .lora_a."""
    module, _, rest = name.removeprefix("base_model.model.").partition(".lora_")
    weight = f"{module}.weight"
    return f"{names_for([weight], config, model)[weight]}.lora_{rest[0].lower()}"


def _values(checkpoint: Checkpoint, settings: Settings, *, adapter: bool) -> Callable[[str], Tensor]:
    """A function that gives the tensor of a name in the checkpoint, or in the merged model."""
    if adapter:
        return partial(stored, checkpoint)
    model, _ = merged(checkpoint, settings, record_of(checkpoint))
    return cast(Callable[[str], Tensor], model.state_dict().__getitem__)


def _arranged(part: _Part, values: Callable[[str], Tensor], config: Any) -> AnyArray:
    """The values of a tensor in float32, as llama.cpp has them.

    Raises:
        UserError: one of them is too large for two bytes.
    """
    if not part.source:
        return np.array(factors_of(config), dtype=np.float32)
    found: AnyArray = values(part.source).float().numpy()
    family = FAMILIES[architecture(config, part.name)]
    if family.gemma and part.name.endswith("norm.weight"):
        found = found + np.float32(1)
    if family.paired and part.name.startswith("blk.") and not part.name.endswith(".lora_a"):
        all_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        heads = all_heads.get(part.name.split(".")[2])
        if heads is not None:  # the two halves of a head's rows, in pairs
            found = found.reshape(heads, 2, len(found) // heads // 2, -1).swapaxes(1, 2).reshape(part.shape)
    if part.kind == _F16 and not float(np.abs(found).max()) <= _LARGEST:
        raise UserError(
            f"{part.source} has a number that is too large for f16, or none at all.",
            "Take --dtype bfloat16; or an earlier checkpoint, where training went astray.",
        )
    return found


def _write(
    to: Path,
    facts: dict[str, Any],
    kinds: Mapping[str, int],
    parts: list[_Part],
    values: Callable[[_Part], AnyArray],
) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quantize

    writer = GGUFWriter(to, facts.pop("general.architecture"))
    for key, value in facts.items():
        kind = kinds.get(key, _KINDS_OF[type(value)])
        if value != [] and isinstance(value, list) == (kind == _LIST):  # others are but the lengths of lists
            writer.add_key_value(key, value, GGUFValueType(kind))
    for part in parts:
        kind = GGMLQuantizationType(part.kind)
        writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), part.size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with doing("writing the weights", of=len(parts), unit="tensors"):
        for part in parts:
            writer.write_tensor_data(quantize(values(part), GGMLQuantizationType(part.kind)))
            advance(1)
    writer.close()


def _check_target(to: Path, base: Path | None, *, overwrite: bool) -> None:
    if not to.exists():
        return
    if not overwrite:
        raise UsageError(f"{to} is there.", "Name another file, or replace it with --overwrite.")
    if not to.is_file() or np.fromfile(to, np.uint8, 4).tobytes() != MAGIC or to.resolve() == base:
        raise UsageError(
            f"{to} is no GGUF file, or the base model itself, so it is not replaced.", "Name another file."
        )


def _check_room(to: Path, size: int) -> None:
    need = size + _HEADER
    free = free_bytes(to)
    if need > free:
        raise UserError(
            f"{to} takes {rounded(need)}, and {rounded(free)} are free there.",
            "Make room, name a file on another disk, or take --dtype q8_0.",
        )
