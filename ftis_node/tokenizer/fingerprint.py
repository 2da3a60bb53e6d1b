"""Fingerprint that two tokenizers must share before one node can read the other's token ids."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from ftis_node.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAG = re.compile(r"</?\w+>")
WRITABLE = (
    "Take another model; or ask in its letters, without a template: the built-in tiny models read digits and signs, as "
    """{"prompt": "9+5=", "answer": 14}."""
)


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
    model = state["model"]
    words = {}
    for token, index in model["vocab"].items():
        words[int(index)] = (token, False)
    for entry in state["added_tokens"]:
        words[int(entry["id"])] = (entry["content"], bool(entry["special"]))
    essence = {
        "words": [[index, *words[index]] for index in sorted(words)],
        "merges": merges_of(model),
        "kind": model.get("type"),
        "normalizer": state.get("normalizer"),
        "pre_tokenizer": state.get("pre_tokenizer"),
        "decoder": state.get("decoder"),
    }
    canonical = json.dumps(essence, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def merges_of(model: dict[str, Any]) -> list[str]:
    """The merges in the JSON of a tokenizer's model; each is a text there or a pair, by the library's version."""
    merges = []
    for merge in model.get("merges") or ():
        if not isinstance(merge, str):
            merge = " ".join(merge)
        merges.append(merge)
    return merges


def unwritable(backend: Tokenizer, text: str) -> str:
    """The characters of `text`, each once, that its token ids do not give back; not spaces, case, or Unicode forms."""
    ids = backend.encode(text, add_special_tokens=False).ids
    back = backend.decode(ids, skip_special_tokens=False).casefold()
    back = unicodedata.normalize("NFKC", back)
    written = "".join(unicodedata.normalize("NFKC", text).split())
    letters = dict.fromkeys(written)
    return "".join(letter for letter in letters if letter.casefold() not in back)


def refuse_unwritable(backend: Tokenizer, model: str, prompts: Sequence[str]) -> None:
    """Raise UsageError if most characters of every prompt get lost on a model, so that it would train for nothing."""
    texts = [_TAG.sub("", prompt) for prompt in prompts]  # a tag may be a token where letters are none
    for text in texts:
        letters = set("".join(text.split()))
        if 2 * len(unwritable(backend, text)) <= len(letters):
            return
    if texts:
        lost = "".join(sorted(unwritable(backend, " ".join(texts[:100]))))
        raise UsageError(f"{model} can write no question of the task: it has no token for {lost[-20:]!a}.", WRITABLE)
