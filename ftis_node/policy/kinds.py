"""Folders of other kinds: what cannot be trained here is refused by what it is, before anything of it is loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftis_node.errors import UsageError
from ftis_node.text import counted

_INDEX = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
# Formats that are not loaded, by a file in the folder.
_OTHERS = {
    "pytorch_model*.bin": "pickled weights (.bin), which may run code",
    "*.pth": "pickled weights (.pth), which may run code",
    "*.onnx": "weights in ONNX",
    "*.npz": "weights in MLX's format",
    "*.h5": "weights for TensorFlow",
    "*.msgpack": "weights for Flax",
    "*.mlmodel": "a model for Core ML",
    "model_index.json": "a pipeline of diffusers",
}


def refuse_folder(folder: Path, name: str) -> None:
    """Refuse a local folder of another kind than a causal language model with whole safetensors.

    Each call looks at the folder anew. It reads small JSON files, and the first bytes of each file of weights.

    Args:
        name: what the owner called the folder, for messages.

    Raises:
        UsageError: with what it is, and what would do; of several reasons the first is named.
    """
    if (folder / "modules.json").is_file() or (folder / "config_sentence_transformers.json").is_file():
        raise UsageError(
            f"{name} is a sentence-transformer, which makes embeddings and no text.",
            "Use the language model that it was made from, or another one.",
        )
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = str(json_object(adapter).get("base_model_name_or_path") or "its base model")
        raise UsageError(
            f"{name} is an adapter for {base[:200]!a}, and no model.",
            "Name its base model; or merge the adapter into it (peft) and name what comes out.",
        )
    config = folder / "config.json"
    refuse_config(json_object(config), name)
    _refuse_missing_files(folder, name)
    if not any(folder.glob("*.safetensors")):
        _refuse_other_weights(folder, name)
    if not config.is_file():
        _refuse_without_config(folder, name)


def refuse_config(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model by what its config.json says, here parsed; nothing is refused for what it does not say.

    Raises:
        UsageError: as `refuse_folder`.
    """
    quantised = config.get("quantization_config") or config.get("compression_config")
    if isinstance(quantised, Mapping):
        method = str(quantised.get("quant_method") or quantised.get("quant_type") or "some method")
        raise UsageError(
            f"The weights of {name} are quantised already ({method[:40]!a}), and cannot be trained or merged.",
            "Use the model that they were made from; --set quantisation=nf4 makes four bits of it here.",
        )
    if isinstance(config.get("quantization"), Mapping):
        raise UsageError(f"{name} holds quantised weights in MLX's format.", "Use the model that they were made from.")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = {one.casefold() for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for one in _names(names)}
    if not any(str(one).casefold() in known for one in architectures):
        raise UsageError(
            f"{name} is a {str(architectures[0])[:60]}, and no model that writes on from a text (…ForCausalLM).",
            "Use a language model of a family such as Qwen2.5, Llama 3 or Gemma 3.",
        )


def _names(value: object) -> list[str]:
    """The names of classes that transformers has for a kind of model: one, or several."""
    if isinstance(value, str):
        return [value]
    return [str(one) for one in value]  # type: ignore[attr-defined]


def _refuse_missing_files(folder: Path, name: str) -> None:
    """Raise UsageError for an index of files that are not all there, and for pointers in place of weights."""
    index = json_object(folder / _INDEX).get("weight_map")
    if isinstance(index, Mapping):
        missing = sorted({str(file) for file in index.values() if not (folder / str(file)).is_file()})
        if missing:
            raise UsageError(
                f"{name} lacks {counted(len(missing), 'file')} that its index names, {missing[0][:80]!a} the first.",
                "Download or copy it again, whole.",
            )
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            if opened.read(len(_POINTER)) == _POINTER:
                raise UsageError(f"{file} is a pointer of Git LFS, and no weights.", "Run `git lfs pull` there.")


def _refuse_other_weights(folder: Path, name: str) -> None:
    """Raise UsageError for weights in other formats, where there are no safetensors; return if there are none."""
    gguf = next(folder.glob("*.gguf"), None)
    if gguf is not None:
        raise UsageError(f"{name} has its weights in a GGUF file.", f"Name that: --model {gguf}.")
    for pattern, what in _OTHERS.items():
        if any(folder.glob(pattern)):
            raise UsageError(
                f"{name} has {what}, and no safetensors.",
                "Use a version with safetensors; or, where you trust it, load it and call save_pretrained.",
            )


def _refuse_without_config(folder: Path, name: str) -> None:
    """Raise UsageError, always, for a folder that has no config.json, by what it seems to be."""
    inside = next(folder.glob("snapshots/*/config.json"), None)
    if inside is not None:
        raise UsageError(f"{name} is a model's place in the hub's cache.", f"Name the folder in it: {inside.parent}.")
    if (folder / "manifests").is_dir():
        raise UsageError(
            f"{name} is the store of Ollama.",
            "Name a file in it: the one after FROM in `ollama show --modelfile NAME`.",
        )
    why = "config.json is missing"
    if not any(folder.iterdir()):
        why = "it is empty"
    raise UsageError(
        f"The folder {name} holds no model ({why}).",
        "Name a folder in the format of transformers' save_pretrained, with config.json and safetensors.",
    )


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or holds something else, which others complain about."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(found, dict):
        return found
    return {}
