"""Fingerprint that two tokenizers must share before one node can read the other's token ids."""

from __future__ import annotations

import hashlib
import json

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ftis_node.errors import UsageError


def backend_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The tokenizer's fast (Rust) backend.

    Raises:
        UsageError: the tokenizer has none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UsageError("This model has only a slow tokenizer.", "Use a model with a fast one (tokenizer.json).")
    return backend


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 (hex) over sorted (id, token, special flag), merges, normaliser, pre-tokenizer and decoder.

    Chat template, padding and the default EOS are left out: a family's base, Instruct and Coder models share one
    fingerprint. Embedding rows beyond the tokenizer (Qwen2.5 pads them) do not enter either.

    Raises:
        UsageError: the tokenizer has no fast (Rust) backend to read these from.
    """
    state = json.loads(backend_of(tokenizer).to_str())
    added = {int(entry["id"]): (entry["content"], bool(entry["special"])) for entry in state["added_tokens"]}
    words = {int(index): (token, False) for token, index in state["model"]["vocab"].items()} | added
    essence = {
        "words": [[index, *words[index]] for index in sorted(words)],
        "merges": [m if isinstance(m, str) else " ".join(m) for m in state["model"].get("merges") or []],
        "kind": state["model"].get("type"),
        "normalizer": state.get("normalizer"),
        "pre_tokenizer": state.get("pre_tokenizer"),
        "decoder": state.get("decoder"),
    }
    canonical = json.dumps(essence, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def unwritable(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The characters of `text`, each once, that its token ids do not give back; spaces do not count."""
    back = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"], clean_up_tokenization_spaces=False)
    return "".join(dict.fromkeys(letter for letter in text if not letter.isspace() and letter not in back))
