"""Codec: sampled token ids as text with claims, and another author's text as one's own token ids.

Nothing here trusts an author's word: whether a completion is in this tokenizer's own tokens follows from its text.
Chunks are the shortest spans of a text at whose ends two tokenizations both have a boundary (ALM, arXiv 2503.20083).
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerBase

from ftis_node.errors import UsageError
from ftis_node.packet import PIECE_BYTES_MAX, Completion, TextCompletion
from ftis_node.packet.arrays import BoolArray, Float32Array, Int64Array
from ftis_node.tokenizer.fingerprint import backend_of
from ftis_node.tokenizer.spelling import plain_backend, token_bytes

_SHOWN = 10  # characters
_SHOWN_TEXT = 40
_NO_CHUNKS = np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int64)
_PROBED = 64  # prompts

# What any task may ask for. Only those of its characters count that a tokenizer can write one by one.
_PROBES = (
    "0123456789 3.14 -7 1,000,000 12+34=46 \\frac{1}{2} x^2",
    "<think>so 8-3 = 5</think>\n<answer>5</answer>",
    "def f(x, y=None):\n\tif x >= 0 and y != 'a':\n        return {\"k\": [x, *y]}  # done\n\n\n",
    "  two   spaces \n \n\n lines  \t tabs\r\n ",
    "The QUICK brown fox; can't stop, won't. Naïve café, Grüße, señor, São — “so” … €5",
    "数学 42 は楽しい。 Привет, мир! שלום مرحبا 안녕",
    "\U0001f600 ok \U0001f468‍\U0001f469‍\U0001f467 ✓",
)


class Codec:
    """A tokenizer as a text run needs it. end: the one id with which a completion finishes."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end: int | None = None, vocabulary: int | None = None
    ) -> None:
        """Read the tokenizer's backend; later changes to the tokenizer do not reach this codec.

        Args:
            end: by default the tokenizer's EOS. vocabulary: ids from this one on cannot be read; None: all can.

        Raises:
            UsageError: the tokenizer has no fast backend, or no end-of-sequence token.
        """
        backend = backend_of(tokenizer)
        if end is None:
            end = tokenizer.eos_token_id
        if end is None:
            raise UsageError("This tokenizer names no EOS of its own.", "Set eos_token in its tokenizer_config.json.")
        self.end = int(end)
        state: dict[str, Any] = json.loads(backend.to_str())
        self._bytes, self._fallback = token_bytes(state, backend.get_vocab())
        self._bytes[self.end] = b""
        self._sizes = np.array([len(written) for written in self._bytes], np.int64)
        if vocabulary is not None:
            self._sizes[vocabulary:] = 0
        self._plain = plain_backend(state, prefix=False)

    def to_text(self, completion: Completion) -> TextCompletion:
        """Return the text of sampled own ids with a log-prob a piece, as a packet carries it.

        The end finishes a completion. Any other token that writes nothing, or over 255 bytes, aborts it there: such
        a token is the last piece, of length 0. `finished` of the argument does not count.
        """
        ids = np.asarray(completion.token_ids, np.int64)
        claims = np.asarray(completion.logprobs, np.float32)
        sizes = self._sizes[ids]
        silent = np.flatnonzero((sizes == 0) | (sizes > PIECE_BYTES_MAX))
        length = len(ids)
        pieces = sizes
        end = None
        if len(silent):
            length = int(silent[0])
            pieces = sizes[:length]
            if ids[length] == self.end:
                end = float(claims[length])
            else:
                pieces = np.append(pieces, 0)
        return TextCompletion(
            self.decode(ids[:length]),
            pieces.astype(np.uint8),
            claims[: len(pieces)],
            end,
        )

    def from_text(self, completion: TextCompletion, *, own: bool = False) -> Completion | None:
        """Return the completion in own ids, with the author's claims token by token or, else, chunk by chunk; None if
        it gives no sample here.

        It gives none if it is no UTF-8, has characters that this tokenizer cannot write, or is unfinished and nothing
        of it is left.
        Token by token (`chunks` is None) only if the author's pieces are this tokenizer's encoding of the text, and no
        piece could have been another id. Special tokens' spelling is plain text. An unfinished completion loses a
        partial character at its end, a last piece without text and, in chunks, its last chunk. own: this tokenizer
        wrote the text, so its pieces are ids; of two ids with the same bytes, the ordinary one. Linear in the text,
        whatever it holds.
        """
        pieces = np.asarray(completion.pieces, np.int64)
        claims = np.asarray(completion.logprobs, np.float32)
        if len(pieces) and not pieces[-1]:
            pieces = pieces[:-1]
            claims = claims[:-1]
        if own:
            known = self._known(completion.text, pieces)
            if known is not None:
                return self._sample(known, claims, completion.end)
        text = _characters(completion.text, finished=completion.finished)
        if text is None:
            return None
        written = text.encode()
        whole = int(np.searchsorted(np.cumsum(pieces), len(written), "right"))
        pieces = pieces[:whole]
        claims = claims[:whole]
        ids = self.encode(text)
        sizes = self._sizes[ids]
        if self.decode(ids) != written or not sizes.all():
            return None
        if np.array_equal(sizes, pieces) and not self._ambiguous[ids].any():
            return self._sample(ids, claims, completion.end)
        chunks, claims, counts = align(pieces, claims, sizes)
        if not completion.finished:  # what the author would have written next might have left no boundary here
            claims = claims[:-1]
            counts = counts[:-1]
            chunks = chunks[chunks < len(claims)]
        return self._sample(ids[: len(chunks)], claims, completion.end, chunks, counts)

    def rewritten(self, text: str) -> str:
        """What this tokenizer's ids for a text give back: the very text, if it can write it."""
        return self.decode(self.encode(text)).decode(errors="replace")

    def encode(self, text: str) -> Int64Array:
        """Token ids int64 [T] of a text after another: no BOS, no space before it, special tokens not read."""
        return np.array(self._plain.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: Int64Array) -> bytes:
        """The bytes that ids [T] write; special tokens write none. They may begin or end inside a character."""
        return b"".join([self._bytes[index] for index in ids.tolist()])

    def _known(self, text: bytes, pieces: Int64Array) -> Int64Array | None:
        """The id of each piece; None if one is no token."""
        ends = np.cumsum(pieces).tolist()
        begins = [0, *ends[:-1]]
        ids = [self._ids.get(text[begin:end], -1) for begin, end in zip(begins, ends, strict=False)]
        if -1 in ids:
            return None
        return np.array(ids, np.int64)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The ordinary id of each token's bytes: the lowest that is not only fallen back to."""
        order = sorted(range(len(self._bytes)), key=lambda index: (index not in self._fallback, -index))
        ids = {}
        for index in order:  # a later one takes the place of an earlier one
            written = self._bytes[index]
            if written:
                ids[written] = index
        return ids

    @cached_property
    def _ambiguous(self) -> BoolArray:
        """Whether another id writes the same bytes [V]."""
        counts = Counter(self._bytes)
        return np.array([counts[written] > 1 for written in self._bytes], np.bool_)

    def _sample(
        self,
        ids: Int64Array,
        claims: Float32Array,
        end: float | None,
        chunks: Int64Array | None = None,
        counts: Int64Array | None = None,
    ) -> Completion | None:
        """The completion of these ids, its end as a token and a chunk of its own; None without any. counts: pieces of
        each chunk."""
        if end is not None:
            ids = np.append(ids, self.end)
            claims = np.append(claims, np.float32(end))
            if chunks is not None:
                chunks = np.append(chunks, len(claims) - 1)
            if counts is not None:
                counts = np.append(counts, 1)
        if not len(ids):
            return None
        return Completion(ids.astype(np.uint32), claims, end is not None, chunks, counts)


def refusal(codec: Codec, texts: Iterable[str]) -> str:
    """Return why this tokenizer can take no part in a text run, in a sentence that says what to do; "" if it can.

    texts: what the task needs written: its prompts, and the tags of an answer. Characters that they lack need not be
    writable (emoji, say); but those that are must come back in any order, with their spaces and lines.
    """
    asked = (normalize("NFC", text) for text in texts)  # a prompt may lose what NFC changes
    wrong = [text for text in asked if codec.rewritten(text) != text]
    lacking = sorted({letter for text in wrong for letter in set(text) - set(codec.rewritten(text))})
    if lacking:
        shown = ", ".join(map(repr, lacking[:_SHOWN]))
        if len(lacking) > _SHOWN:
            shown += ", …"
        return f"This tokenizer cannot write {shown}, which this task needs: choose a model that can."
    letters = {letter for letter in set("".join(_PROBES)) if codec.rewritten(letter) == letter}
    probes = ("".join(letter for letter in text if letter in letters) for text in _PROBES)
    wrong += [text for text in probes if codec.rewritten(text) != text]
    if wrong:
        return (
            f"This tokenizer's ids give back another text than {wrong[0][:_SHOWN_TEXT]!r}, so peers would learn from "
            "what its model did not write: choose a model with a byte-level tokenizer, or with byte fallback."
        )
    return ""


def _characters(text: bytes, *, finished: bool) -> str | None:
    """The text without a character cut off at the end of an unfinished one; None if it is no UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        if finished or error.reason != "unexpected end of data":
            return None
        return text[: error.start].decode()


def text_refusal(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], tags: str) -> str:
    """Return why a tokenizer can take no part in a text run with these prompts, see `refusal`; "" if it can.

    Of many prompts only the first are written and read back, and of the others only their characters.
    """
    try:
        codec = Codec(tokenizer)
    except UsageError as error:
        return f"{error.what} {error.fix}"
    letters = "".join(sorted(set("".join(prompts))))
    return refusal(codec, [*prompts[:_PROBED], letters, tags])


def align(pieces: ArrayLike, claims: ArrayLike, tokens: ArrayLike) -> tuple[Int64Array, Float32Array, Int64Array]:
    """Return the chunk of each own token, and the author's log-prob and number of pieces of each chunk.

    pieces [n], tokens [m]: bytes of each piece of the author and of each own token, all positive; both begin at the
    same byte. claims [n]: the author's log-prob of each piece, nats. Returns int64 [k] from 0 to C − 1, float32 [C] and
    int64 [C].
    Only tokens before the last common boundary are in a chunk: k = m, if both cover the same bytes. Linear in bytes.
    """
    theirs = np.cumsum(pieces, dtype=np.int64)
    own = np.cumsum(tokens, dtype=np.int64)
    if not len(theirs) or not len(own):
        return _NO_CHUNKS
    boundary = np.zeros(max(theirs[-1], own[-1]) + 1, np.bool_)
    boundary[theirs] = True
    last_tokens = np.flatnonzero(boundary[own])
    ends = np.searchsorted(theirs, own[last_tokens]) + 1  # pieces up to the end of each chunk
    if not len(ends):
        return _NO_CHUNKS
    counts = np.diff(ends, prepend=0)
    chunks = np.repeat(np.arange(len(ends)), np.diff(last_tokens, prepend=-1))
    sums = np.add.reduceat(np.asarray(claims, np.float64)[: ends[-1]], ends - counts)  # from where each chunk begins
    return chunks, sums.astype(np.float32), counts
