"""GGUF files as llama.cpp writes them: of random models, and of pieces."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch

KINDS = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
BYTES = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
OWN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|fim_prefix|>"]
WORDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [*BYTES, "ab", *OWN],
    "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 3, 4, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 259,
    "tokenizer.ggml.padding_token_id": 257,
    "tokenizer.ggml.bos_token_id": 257,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
}


def padded(rows: int) -> dict[str, Any]:
    """The tokenizer above with the names that the converter makes up for so many rows."""
    words = WORDS["tokenizer.ggml.tokens"]
    more = [f"[PAD{n}]" for n in range(len(words), rows)]
    kinds = [*WORDS["tokenizer.ggml.token_type"], *[5] * len(more)]
    return WORDS | {"tokenizer.ggml.tokens": [*words, *more], "tokenizer.ggml.token_type": kinds}


def written(path: Path, family: str, facts: Mapping[str, Any], tensors: Mapping[str, Any], kind: str = "F32") -> Path:
    """A file with these facts, keys without a dot in front are the family's, and tensors in that quantisation."""
    out = gguf.GGUFWriter(path, family)
    for key, value in facts.items():
        name = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{family}.{key}"
        if isinstance(value, bool):
            out.add_bool(name, value)
        elif isinstance(value, list):
            out.add_array(name, value)
        else:
            out.add_key_value(name, value, KINDS[type(value)])
    for name, value in tensors.items():
        numbers = value.float().numpy()
        chosen = gguf.GGMLQuantizationType[kind if numbers.ndim > 1 else "F32"]
        out.add_tensor(name, gguf.quantize(numbers, chosen), raw_dtype=chosen)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def of_model(path: Path, family: str, model: Any, more: Mapping[str, Any], kind: str = "F32") -> Path:
    """The file of a model as llama.cpp's converter makes it."""
    config, arch = model.config, next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    facts = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **padded(config.vocab_size),
        **more,
    }
    names, tensors = gguf.get_tensor_name_map(arch, config.num_hidden_layers), {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if family.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if family == "llama" and f"{part}.weight" in name:
                value = value.view(heads, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        stem, _, last = name.rpartition(".")
        tensors[f"{names.get_name(stem)}.{last}"] = value
    return written(path, family, facts, tensors, kind)


def hostile(
    fields: Sequence[bytes] = (), tensors: Sequence[bytes] = (), counts: tuple[int, int] | None = None
) -> bytes:
    """The bytes of a file of these pieces; its counts may lie."""
    told = counts or (len(tensors), len(fields))
    return b"GGUF" + struct.pack("<IQQ", 3, *told) + b"".join((*fields, *tensors))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("qwen2")


def listed(key: str, kind: int, count: int, body: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count) + body


def placed(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def random_model(kind: type, config: Any) -> Any:
    """A random model in float32, of weights that bfloat16 has too."""
    torch.manual_seed(0)
    model: Any = kind(config).eval()
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    return model
