"""Texts as a prompt's token ids: what a tokenizer puts in front, and what strangers wrote, which is always plain text.

A text is put together from parts of ours (a template, what stands around a chat's message) and from what a stranger
wrote. Special tokens that the parts spell are read as such, those that the stranger spells are not.
"""

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ftis_node.tokenizer.fingerprint import backend_of
from ftis_node.tokenizer.spelling import plain_backend

_PROBES = "0123456789abcdefghijklmnopqrstuvwxyz"
_KEPT = 8  # results of tokenizers and templates


@lru_cache(_KEPT)
def front_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The special ids that a tokenizer puts in front of a text: a BOS, or none. What it puts behind does not count."""
    for probe in _PROBES:
        plain = _probed(tokenizer, probe, special=False)
        whole = _probed(tokenizer, probe, special=True)
        if plain:
            for place in range(len(whole) - len(plain) + 1):
                if whole[place : place + len(plain)] == plain:
                    return tuple(whole[:place])
            return ()
    return ()


def _probed(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    """Token ids of a letter; none if it cannot be written. special: with what the tokenizer puts around a text."""
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    except Exception:  # the library's, for a letter that words without an unknown one lack
        return []
    return ids


def ids_around(tokenizer: PreTrainedTokenizerBase, before: str, message: str, after: str) -> list[int]:
    """Token ids of three texts in a row, without a BOS. Special tokens that `message` spells are plain text."""
    text = before + message + after
    ids = _read(tokenizer, text)
    special = _special(tokenizer)
    found = tuple(index for index in ids if index in special)
    if not found:
        return ids
    ours = _special_in(tokenizer, before) + _special_in(tokenizer, after)
    if found == ours:
        return ids
    if not ours:
        return _plainly(_backend(tokenizer, prefix=True), text)
    if before:
        inside = _backend(tokenizer, prefix=False)
        first = [*_read(tokenizer, before), *_plainly(inside, message)]
    else:
        first = _plainly(_backend(tokenizer, prefix=True), message)
    return [*first, *_read(tokenizer, after)]


def _read(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text in which special tokens are read as such, without a BOS."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _plainly(backend: Tokenizer, text: str) -> list[int]:
    """Token ids of a text by a backend of `_backend`: it reads special tokens' spelling as plain text."""
    return list(backend.encode(text, add_special_tokens=False).ids)


@lru_cache(_KEPT)
def _special(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    return frozenset(index for index, token in tokenizer.added_tokens_decoder.items() if token.special)


@lru_cache(_KEPT)
def _special_in(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(index for index in _read(tokenizer, text) if index in _special(tokenizer))


@lru_cache(_KEPT)
def _backend(tokenizer: PreTrainedTokenizerBase, *, prefix: bool) -> Any:
    return plain_backend(json.loads(backend_of(tokenizer).to_str()), prefix=prefix)


def declare_ends(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> None:
    """Note the ends of the generation config that lies beside a tokenizer: transformers keeps them with the model."""
    known = {end for end in ends if 0 <= end < len(tokenizer)}
    tokenizer.__dict__["declared_ends"] = tuple(sorted(known))


def declared_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids at which the model of this tokenizer ends what it writes, by its generation config; none: not known."""
    ends: tuple[int, ...] = tokenizer.__dict__.get("declared_ends", ())
    return ends
