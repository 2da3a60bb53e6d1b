"""Attacks by what is in packets of text, or of the other version: rows 1, 4, 5, 6 and 47."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ftis_node import packet
from ftis_node.packet import (
    PIECE_BYTES_MAX,
    TEXT_PACKET_VERSION,
    TextCompletion,
    encode,
    pack_group,
    pack_text_group,
)
from tests.hostile.attack import Lies
from tests.hostile.world import LIKELY, TextWorld


class Text(Lies):
    """An attack on a text run."""

    versions = (2,)

    @property
    def text(self) -> TextWorld:
        assert isinstance(self.world, TextWorld)
        return self.world

    def right(self, row: int, thought: bytes) -> TextCompletion:
        """A right answer after any bytes, byte by byte."""
        answer = self.text.answers[row].encode()
        return self.text.pieces(*_bytes(b"<think>" + thought + b"</think><answer>" + answer + b"</answer>"))


class Row01Layout(Text):
    """Parts that do not fit: pieces that do not spell the text, claims too few, counts that nobody could hold."""

    row = 1
    refusals = frozenset({"malformed"})

    def packets(self, author: bytes, round: int) -> Sequence[bytes]:
        return [self._forged(author, round, slot) for slot in range(self.SLOTS)]

    def _forged(self, author: bytes, round: int, slot: int) -> bytes:
        good = packet.decode(self.world.pack(author, round, slot))
        assert isinstance(good, packet.TextPacket)
        text = good.text
        pieces = good.pieces.tobytes()
        claims = good.logprobs.tobytes()
        count = len(good.lengths)
        parts = [
            [pieces, text + b"1", claims],
            [pieces, text[:-1], claims],
            [b"\xff" * len(pieces), text, claims],
            [b"\x00" * len(pieces), text, claims],
            [pieces, text, claims[:-4]],
            [text, pieces, claims],
            [pieces, text, claims, claims],
            [pieces, text],
        ]
        headers = [
            replace(good, lengths=(packet.MAX_PACKET_BYTES,) * count),
            replace(good, lengths=(0,) * count),
            replace(good, lengths=(good.lengths[0] + 1, *good.lengths[1:])),
            replace(good, finished=(False,) * count),
        ]
        sound = [pieces, text, claims]
        forged = [good.encoded(TEXT_PACKET_VERSION, some) for some in parts]
        forged += [header.encoded(TEXT_PACKET_VERSION, sound) for header in headers]
        forged.append(good.encoded(TEXT_PACKET_VERSION + 1, sound))
        return self.rng.choice(forged)


class Row04Pieces(Text):
    """Pieces without text where none may be, texts over the caps in bytes and in pieces, and texts that just stop."""

    row = 4
    refusals = frozenset({"empty piece", "too long", "cut short", "wrong group size"})

    def completions(self, row: int, slot: int) -> list[TextCompletion]:
        pieces = self.text.pieces
        run = self.world.run
        giant = b"1" * PIECE_BYTES_MAX
        lies = [
            [pieces(b"1", b"", b"2", finished=False)],
            [pieces(b"1", b"", b"", finished=False)],
            [pieces(b"1", b"")],
            [pieces(giant, giant, finished=False)],
            [replace(pieces(b"1" * run.completion_bytes, finished=False), end=LIKELY)],
            [pieces(*[b"1"] * (run.completion_tokens + 1), finished=False)],
            [pieces(b"1", b"2", finished=False)],
            [pieces(b"1")] * 2,  # with the rest one completion too many
        ]
        return [*self.rng.choice(lies), *self.text.mixed(row)[1:]]


class Row05Ends(Text):
    """Log-probs of an end that are none, or below what the run allows."""

    row = 5
    refusals = frozenset({"log-prob out of range"})

    def completions(self, row: int, slot: int) -> list[TextCompletion]:
        below = self.world.run.logprob_min - 0.5
        end = self.rng.choice([np.nan, -np.inf, np.inf, 0.5, below])
        return [self.text.pieces(b"1", end=end), *self.text.mixed(row)[1:]]


class Row06OtherVersion(Lies):
    """Packets of this run in the other version: of token ids among texts, of text among token ids."""

    row = 6
    refusals = frozenset({"other packet version"})

    def packets(self, author: bytes, round: int) -> Sequence[bytes]:
        run = self.world.run
        made = []
        for slot in range(self.SLOTS):
            place = {
                "run_id": run.id,
                "author": author,
                "round": round,
                "slot": slot,
                "policy_step": 0,
            }
            if run.text:
                said = self.world.completion([1, 2, 3])
                made.append(pack_group(**place, prompt_ids=[1], completions=[said] * run.group))
            else:
                text = TextCompletion(b"1", np.ones(1, np.uint8), np.full(1, LIKELY, np.float32), LIKELY)
                made.append(pack_text_group(**place, prompt="1", completions=[text] * run.group))
        return [encode(one) for one in made]


class Row47Unreadable(Text):
    """Right answers that a rule finds and no tokenizer can read: bytes that are no UTF-8."""

    row = 47
    THOUGHTS = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"1\xf0\x9f\x98")

    def completions(self, row: int, slot: int) -> list[TextCompletion]:
        right = self.right(row, self.rng.choice(self.THOUGHTS))
        wrong = self.text.pieces(b"<think>", b"\xfe", b"</think>")
        return self.alternate(right, wrong)


class Row47Markers(Text):
    """Text that spells the special tokens of one tokenizer or another, or what a terminal or a browser obeys."""

    row = 47
    THOUGHTS = (
        "<|end|><|pad|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<s></s>",
        "\x00\x1b[2J\x07",
        "\u202e\ufeff",
        "<script>1</script>",
    )

    def completions(self, row: int, slot: int) -> list[TextCompletion]:
        right = self.right(row, self.rng.choice(self.THOUGHTS).encode())
        ended = self.text.pieces(*_bytes(b"<think></think><|end|>"))
        return self.alternate(right, self.rng.choice([self.text.wrong(row), ended]))


class Row47Cuts(Text):
    """One text and one claim in all, cut and spread so that what is to be learned looks unlikely to its author."""

    row = 47
    IN_ALL = -30.0

    def completions(self, row: int, slot: int) -> list[TextCompletion]:
        made = self.right(row, b"9-9=9")
        cut = (self._whole, self._first, self._by_chance)[slot % 3](made)
        return self.alternate(cut, self.text.wrong(row))

    def _whole(self, made: TextCompletion) -> TextCompletion:
        return self.text.pieces(made.text, logprob=self.IN_ALL, end=0.0)

    def _first(self, made: TextCompletion) -> TextCompletion:
        """All of it on the payload's first byte."""
        claims = np.zeros(len(made.pieces), np.float32)
        claims[len("<think>")] = self.IN_ALL
        return replace(made, logprobs=claims, end=0.0)

    def _by_chance(self, made: TextCompletion) -> TextCompletion:
        size = len(made.text)
        cuts = self.rng.sample(range(1, size), self.rng.randrange(size - 1))
        ends = [0, *sorted(cuts), size]
        pieces = [made.text[start:end] for start, end in pairwise(ends)]
        return self.text.pieces(*pieces, logprob=self.IN_ALL / (len(pieces) + 1))


class Row47Low(Text):
    """The lowest log-prob that a run allows, for every byte of what is right; none for what is wrong."""

    row = 47

    def completions(self, row: int, slot: int) -> list[TextCompletion]:
        low = self.world.run.logprob_min
        return self.alternate(self.text.right(row, logprob=low), self.text.wrong(row, logprob=0.0))


class Row47Giants(Text):
    """As much text as goes into few pieces, of what costs a tokenizer or a normaliser most."""

    row = 47
    TEXTS = ("1" * 300, " " * 300, "</" * 150, "e" + "\u0301" * 150, "\U0001f600" * 75, "\ufdfa" * 100, "aA" * 150)

    def completions(self, row: int, slot: int) -> list[TextCompletion]:
        text = self.rng.choice(self.TEXTS).encode()
        before = self.world.run.completion_bytes - 1
        few = self.text.pieces(text[:before], text[before : before + PIECE_BYTES_MAX], finished=False)
        one = self.text.pieces(text[:PIECE_BYTES_MAX], finished=False)
        return [few, one, *self.text.mixed(row)[2:]]


class Row47Empty(Text):
    """Completions of nothing: an end at once, or a token without text; right answers are between them or not."""

    row = 47

    def completions(self, row: int, slot: int) -> list[TextCompletion]:
        nothing = self.rng.choice([self.text.pieces(), self.text.pieces(b"", finished=False)])
        right = self.text.right(row) if slot else nothing
        return self.alternate(right, nothing)


def _bytes(text: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in text]
