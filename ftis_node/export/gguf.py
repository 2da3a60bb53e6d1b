"""A trained model, or its LoRA layers alone, as one GGUF file for llama.cpp, Ollama and LM Studio."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.export.model import Exported, config_of, exported, kind_of, merged, targets_of
from ftis_node.export.record import record_of
from ftis_node.host.doing import advance, doing
from ftis_node.host.files import existing_folder, sync
from ftis_node.policy.gguf.families import FAMILIES, FREQUENCIES, HEAD
from ftis_node.policy.gguf.folder import blocks, read
from ftis_node.policy.gguf.header import MAGIC
from ftis_node.policy.gguf.metadata import architecture, factors_of, facts_of, names_for
from ftis_node.policy.load import load_tokenizer
from ftis_node.policy.names import file_of, public_name
from ftis_node.text import rounded
from ftis_node.worker.restore import Checkpoint, gone

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
    sizes, model, kind = blocks(), settings.model, kind_of(checkpoint, adapter=adapter)
    named = file_of(model)
    base = None if named is None else named[0]
    _check_target(to, base, overwrite=overwrite)
    config, public = config_of(model), public_name(model)
    dtype = dtype or ("float32" if adapter else "f16")
    wanted, file_type = KINDS[dtype]
    if adapter:
        targets_of(checkpoint, model)
        shapes = dict(checkpoint.shapes)
        names = {name: _lora_name(name, config, public) for name in shapes}
    else:
        with torch.device("meta"):
            skeleton: Any = AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        if config.tie_word_embeddings:
            shapes.pop(HEAD)
        names = names_for(shapes, config, public)
    parts = []
    for source, name in names.items():
        chosen = _kind_for(shapes[source], wanted, sizes)
        elements, size = sizes[chosen]
        parts.append(_Part(name, source, shapes[source], chosen, int(np.prod(shapes[source])) // elements * size))
    facts: dict[str, Any] = {"general.architecture": architecture(config, public)}
    kinds: dict[str, int] = {}
    if adapter:
        facts |= {"general.type": "adapter", "adapter.type": "lora", "general.name": public}
        facts |= {"adapter.lora.alpha": float(settings.lora_alpha)}
    else:
        factors = factors_of(config)
        if factors:
            parts.append(_Part(FREQUENCIES, "", (len(factors),), _FLOAT32, 4 * len(factors)))
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
    with _values(checkpoint, settings, adapter=adapter) as values, _appearing(to) as partial:
        _write(partial, facts, kinds, parts, lambda part: _arranged(part, values, config))
    return exported(checkpoint, settings, to, public, kind, dtype, {to.name: to.stat().st_size})


def _kind_for(shape: tuple[int, ...], wanted: int, sizes: Mapping[int, tuple[int, int]]) -> int:
    if len(shape) == 1:
        return _FLOAT32
    return wanted if shape[-1] % sizes[wanted][0] == 0 else _F16


def _lora_name(name: str, config: Any, model: str) -> str:
    """base_model.model.MODULE.lora_A.default.weight as MODULE's name in a file, with .lora_a."""
    module, _, rest = name.removeprefix("base_model.model.").partition(".lora_")
    weight = f"{module}.weight"
    return f"{names_for([weight], config, model)[weight]}.lora_{rest[0].lower()}"


@contextmanager
def _values(checkpoint: Checkpoint, settings: Settings, *, adapter: bool) -> Iterator[Callable[[str], Tensor]]:
    """Yield a function that gives the tensor of a name in the checkpoint, or in the merged model."""
    if not adapter:
        state = merged(checkpoint, settings, record_of(checkpoint))[0].state_dict()
        yield state.__getitem__
        return
    try:
        with safe_open(checkpoint.weights, "pt") as file:
            yield file.get_tensor
    except (OSError, SafetensorError) as error:
        raise gone(checkpoint, error) from error


def _arranged(part: _Part, values: Callable[[str], Tensor], config: Any) -> np.ndarray[Any, Any]:
    """The values of a tensor in float32, as llama.cpp has them.

    Raises:
        UserError: one of them is too large for two bytes.
    """
    if not part.source:
        return np.array(factors_of(config), dtype=np.float32)
    found: np.ndarray[Any, Any] = values(part.source).float().numpy()
    family = FAMILIES[architecture(config, part.name)]
    if family.one_more and part.name.endswith("norm.weight"):
        found = found + np.float32(1)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    of = heads.get(part.name.split(".")[2] if part.name.startswith("blk.") else "")
    if family.paired and of is not None and not part.name.endswith(".lora_a"):
        # The two halves of a head's rows, in pairs.
        found = found.reshape(of, 2, len(found) // of // 2, -1).swapaxes(1, 2).reshape(part.shape)
    if part.kind == _F16 and not float(np.abs(found).max()) <= _LARGEST:
        what = f"{part.source} has a number that is too large for f16, or none at all."
        raise UserError(what, "Take --dtype bfloat16; or an earlier checkpoint, where training went astray.")
    return found


def _write(
    to: Path,
    facts: dict[str, Any],
    kinds: Mapping[str, int],
    parts: list[_Part],
    values: Callable[[_Part], np.ndarray[Any, Any]],
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
        what = f"{to} is no GGUF file, or the base model itself, so it is not replaced."
        raise UsageError(what, "Name another file.")


def _check_room(to: Path, size: int) -> None:
    need, free = size + _HEADER, shutil.disk_usage(existing_folder(to)).free
    if need > free:
        what = f"{to} takes {rounded(need)}, and {rounded(free)} are free there."
        raise UserError(what, "Make room, name a file on another disk, or take --dtype q8_0.")


@contextmanager
def _appearing(to: Path) -> Iterator[Path]:
    """A path beside `to`, whose file gets that name at the end, or is removed.

    Raises:
        UserError: it cannot be written.
    """
    partial = to.with_name(f".{to.name}.{os.getpid()}.partial")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        sync(partial)
        partial.replace(to)
    except OSError as error:
        raise UserError(f"{to} cannot be written: {error.strerror}.", "Make room, or name another file.") from error
    finally:
        with suppress(OSError):
            partial.unlink()
