"""The weights of a GGUF file unpacked, some rows at a time, and all else that a folder of transformers has."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from gguf import dequantize
from transformers import AutoConfig, AutoModelForCausalLM

from ftis_node.errors import first_line
from ftis_node.host.files import sync
from ftis_node.packet.arrays import AnyArray
from ftis_node.policy.gguf.families import EMBEDDING, FAMILIES, FREQUENCIES, HEAD, Family, configuration, named
from ftis_node.policy.gguf.folder import FACTS, kind_of, quantisation, read
from ftis_node.policy.gguf.header import GgufHeader, Stored, UnusableFile
from ftis_node.policy.gguf.words import FILES, ends_of, write_tokenizer
from ftis_node.text import say

_CHUNK = 1 << 22  # elements that are unpacked at a time
_SAMPLE = 1 << 20  # elements of head and embedding that are compared
_ALIKE = 0.9  # cosine of two roundings of one matrix: 0.99 at four bits; of an untied head and its embedding below 0.5
_TOLD_EVERY = 10.0  # seconds


class _GgufTensors:
    """The weights of a file as float32, some rows at a time. The file is mapped, not read into memory."""

    def __init__(self, file: Path, header: GgufHeader, family: Family) -> None:
        self.header = header
        self.family = family
        self.bytes = np.memmap(file, mode="r", dtype=np.uint8)

    def rows(self, name: str, every: int = 1) -> Iterator[AnyArray]:
        """A tensor, or one of so many of its rows, in chunks `[rows, columns]` of about `_CHUNK` elements.

        Rows are in transformers' order, and values as transformers means them. A vector is one row.

        Args:
            name: in the file. every: take each row of that number, 0 first.

        Raises:
            UnusableFile: it holds values that are no numbers, or has a quantisation or an order that is not read.
        """
        stored = self.header.tensors[name]
        packed = self.bytes[stored.start : stored.start + stored.size].reshape(_height(stored), -1)
        order = self._order(name, stored)[::every]
        kind = kind_of(stored.kind)
        each = max(1, _CHUNK // stored.shape[-1])
        for start in range(0, len(order), each):
            chunk = packed[order[start : start + each]]
            try:
                values = dequantize(chunk, kind).astype(np.float32, copy=False)
            except NotImplementedError:
                raise UnusableFile(f"the tensor {name!a} is of the type {kind.name}, which is not read") from None
            if self.family.gemma and name.endswith("norm.weight"):  # stored with one added
                values = values - np.float32(1)
            if not np.isfinite(values).all():
                raise UnusableFile(f"the tensor {name!a} holds values that are no numbers")
            yield values

    def _order(self, name: str, stored: Stored) -> AnyArray:
        """The numbers of rows in transformers' order; llama.cpp lays the two halves of a head's rows in pairs.

        Raises:
            UnusableFile: the order is not known, or makes no sense.
        """
        height = _height(stored)
        order = np.arange(height)
        part = name.split(".")[-2]
        if not self.family.paired or part not in ("attn_q", "attn_k"):
            return order
        if name.endswith(".bias"):
            raise UnusableFile("its queries have a bias in an order that is not known here")
        heads = self.header.fact("attention.head_count")
        if part == "attn_k":
            heads = self.header.fact("attention.head_count_kv", heads)
        if height % (2 * heads):
            raise UnusableFile("its sizes contradict one another")
        return order.reshape(heads, height // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _height(stored: Stored) -> int:
    """How many rows a tensor has as a matrix; a vector has one."""
    return stored.elements // stored.shape[-1]


def _tied(weights: _GgufTensors, names: dict[str, str]) -> bool:
    """Whether head and embedding are one matrix: rounded in two ways, they are alike and not the same.

    About `_SAMPLE` elements of each are compared. names: by `named`, of weights in the file by transformers' names.
    """
    if HEAD not in names:
        return True
    one = weights.header.tensors[names[HEAD]]
    other = weights.header.tensors[names[EMBEDDING]]
    if one.shape != other.shape:
        return False
    every = max(1, one.elements // _SAMPLE)
    head = np.concatenate(list(weights.rows(names[HEAD], every)))
    embedding = np.concatenate(list(weights.rows(names[EMBEDDING], every)))
    product = float((head * embedding).sum())
    sizes = float(np.linalg.norm(head)) * float(np.linalg.norm(embedding))
    return product > _ALIKE * sizes  # their cosine, without a division


def convert(file: Path, tokenizer: Path | None, folder: Path) -> None:
    """Fill an empty folder with the model of a file, and with the tokenizer of another folder where one is named.

    For the process of `gguf.__main__`: it takes minutes, and says on stderr how far it is. `FACTS` comes last; a folder
    without it is not whole.

    Raises:
        UnusableFile: it is no model that can be read here.
    """
    header = read(file)
    told = header.facts
    architecture = told["general.architecture"]
    family = FAMILIES[architecture]
    weights = _GgufTensors(file, header, family)
    names = named(header, family)
    factors: list[float] = []
    if FREQUENCIES in header.tensors:
        factors = np.concatenate(list(weights.rows(FREQUENCIES)), axis=None).tolist()
    config = configuration(header, family, factors)
    tied = _tied(weights, names)
    if tied:  # the one with more bits is both
        head = names.pop(HEAD, names[EMBEDDING])
        if header.tensors[head].size >= header.tensors[names[EMBEDDING]].size:
            names[EMBEDDING] = head
    ends = ends_of(header)
    ids = {
        "bos_token_id": told.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends or None,
        "pad_token_id": told.get("tokenizer.ggml.padding_token_id"),
    }
    if len(ends) == 1:  # as transformers writes a single one
        ids["eos_token_id"] = ends[0]
    config |= ids | {"tie_word_embeddings": tied}
    _write(folder / "config.json", config)
    shapes = {name: list(header.tensors[stored].shape) for name, stored in names.items()}
    _refuse_other_shapes(folder, shapes)
    if tokenizer is None:
        write_tokenizer(header, folder)
    else:
        for name in FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
    if not (folder / "generation_config.json").exists():
        _write(folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})
    facts = {
        "architecture": architecture,
        "quantisation": quantisation(header),
        "file": file.name,
        "size": file.stat().st_size,
        "name": str(told.get("general.name", "")),
    }
    target = folder / "model.safetensors"
    with target.open("wb") as out:
        _write_weights(
            out,
            weights,
            names,
            shapes,
            {"format": "pt", "gguf": json.dumps(facts)},
        )
    sync(target)
    _write(folder / FACTS, facts)
    sync(folder)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _refuse_other_shapes(folder: Path, shapes: dict[str, list[int]]) -> None:
    """Raise UnusableFile unless these are the weights of the model that the folder's config.json describes.

    shapes: of weights by transformers' names. No memory is taken for the model.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # as many kinds as there are parts of a configuration
        raise UnusableFile(f"its sizes make no model ({first_line(error)})") from None
    wanted = {name: list(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop(HEAD, None)
    for name in sorted(wanted.keys() | shapes.keys()):
        if name not in shapes:
            raise UnusableFile(f"it lacks {name}, unlike the model that it describes")
        if name not in wanted:
            raise UnusableFile(f"it has {name}, unlike the model that it describes")
        if shapes[name] != wanted[name]:
            raise UnusableFile(f"{name} has the shape {shapes[name]}, and the model that it describes {wanted[name]}")


def _write_weights(
    out: IO[bytes],
    weights: _GgufTensors,
    names: dict[str, str],
    shapes: dict[str, list[int]],
    metadata: dict[str, str],
) -> None:
    """Write a file of safetensors in bfloat16, some rows at a time.

    Args:
        names: of a weight in the GGUF file, by its name here; weights are written in this order. shapes: by its name
            here. metadata: for the file's own `__metadata__`.

    Raises:
        UnusableFile: as `_GgufTensors.rows`.
    """
    table: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        begin = end
        end += 2 * weights.header.tensors[names[name]].elements
        table[name] = {
            "dtype": "BF16",
            "shape": shapes[name],
            "data_offsets": [begin, end],
        }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    done = 0
    told = time.monotonic()
    for stored in names.values():
        for values in weights.rows(stored):
            half = torch.from_numpy(values).to(torch.bfloat16)
            out.write(half.view(torch.int16).numpy().tobytes())
            done += 2 * values.size
            if time.monotonic() - told > _TOLD_EVERY:
                told = time.monotonic()
                say(f"  {100 * done // end} % of the weights are unpacked.", error=True, flush=True)
