"""Bytes of every token, and the tokenizer's backend without what it does to the beginning of a text.

Both come from the tokenizer's own JSON. Three kinds of spelling are known: byte-level BPE writes a byte as a character;
SentencePiece writes a space as ▁ and, where it falls back to bytes, a byte as <0x0A>; others write the text itself.
Another kind gives wrong bytes here, which `codec.refusal` finds.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_UNKNOWN = "\uffff"


# GPT-2's character for a byte → that byte as a Latin-1 character; other Latin-1 characters → one beyond them.
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_ALPHABET = {byte: _UNKNOWN for byte in _OTHERS} | {byte: chr(byte) for byte in _PRINTABLE}
_ALPHABET |= {256 + place: chr(byte) for place, byte in enumerate(_OTHERS)}


def token_bytes(state: dict[str, Any], vocabulary: dict[str, int]) -> tuple[list[bytes], frozenset[int]]:
    """The bytes that each id writes [V], and the ids that are bytes to fall back to.

    `state` is the backend's JSON, `vocabulary` its tokens with those added. Special tokens, and ids of no token, write
    nothing.
    """
    decoders = list(_parts(state["decoder"]))
    kinds = {part["type"] for part in decoders}
    swaps = [(part["replacement"], " ") for part in decoders if part["type"] == "Metaspace"]
    for part in decoders:
        if part["type"] == "Replace" and "String" in part["pattern"]:
            swaps.append((part["pattern"]["String"], part["content"]))
    falls_back = "ByteFallback" in kinds or bool(state["model"].get("byte_fallback"))
    added = {int(entry["id"]): entry for entry in state["added_tokens"]}
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    fallback = set()
    for token, index in vocabulary.items():
        if index in added:
            if not added[index]["special"]:
                table[index] = str(added[index]["content"]).encode()
        elif "ByteLevel" in kinds:
            table[index] = _byte_level(token)
        elif falls_back and _BYTE.fullmatch(token):
            table[index] = bytes.fromhex(token[3:5])
            fallback.add(index)
        else:
            for mark, meant in swaps:
                token = token.replace(mark, meant)
            table[index] = token.encode()
    return table, frozenset(fallback)


def plain_backend(state: dict[str, Any], *, prefix: bool) -> Tokenizer:
    """A backend that reads special tokens' spelling as plain text, never cuts, pads or drops merges at random.

    prefix: whether it may put a space before a text, as SentencePiece does for a prompt.
    """
    changes = {"truncation": None, "padding": None}
    if "dropout" in state["model"]:
        changes["model"] = state["model"] | {"dropout": None}
    if not prefix:
        changes |= {name: _without_prefix(state[name]) for name in ("normalizer", "pre_tokenizer")}
    backend = Tokenizer.from_str(json.dumps(state | changes))
    backend.encode_special_tokens = True
    return backend


def _byte_level(token: str) -> bytes:
    """As the library's own decoder: a token with any other character is its own text."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """A component of the JSON, or those of a sequence of them."""
    if component is not None and component["type"] == "Sequence":
        for part in component["decoders"]:
            yield from _parts(part)
    elif component is not None:
        yield component


def _without_prefix(component: Any) -> Any:
    """A normalizer or pre-tokenizer without what puts a space before a text; None if nothing is left."""
    match component:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return component | {"prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": _}:
            return component | {"add_prefix_space": False}
        case {"type": "Sequence"}:
            name = "pretokenizers"
            if "normalizers" in component:
                name = "normalizers"
            parts = [_without_prefix(part) for part in component[name]]
            return component | {name: [part for part in parts if part is not None]}
    return component
