"""Attacks by what is in packets: rows 1, 4, 5, 8 to 13 and 32."""

from collections.abc import Sequence

import msgpack
import numpy as np

from ftis_node.store.packets import milliseconds
from tests.hostile.attack import Lies
from tests.hostile.world import Said


class Row01Malformed(Lies):
    """Bytes that are no packet, or one in another spelling, under the hash that the author signed."""

    row = 1
    refusals = frozenset({"malformed"})

    def packets(self, author: bytes, round: int) -> Sequence[bytes]:
        first, second, third = (self.world.pack(author, round, slot) for slot in range(3))
        made = [
            first[: self.rng.randrange(1, len(first))],
            bytes([second[0] + 1]) + second[1:],
            b"\x91" * 400,
            b"\x82\xa1a\x01\xa1a\x02",
            third + b"\x00",
            first[:1] + b"\xcc" + first[1:],  # the version as a byte more than it needs
            self.rng.randbytes(200),
        ]
        return self.rng.sample(made, 3)


class Row04OtherTokens(Lies):
    """Ids that the vocabulary lacks, lengths that do not add up, and ends that are none."""

    row = 4
    versions = (1,)
    refusals = frozenset(
        {"unknown token", "too long", "cut short", "wrong group size", "EOS missing", "EOS interior", "EOS undeclared"}
    )

    def completions(self, row: int, slot: int) -> list[Said]:
        world = self.world
        run = self.world.run
        eos = run.eos[0]
        word = self.world.ids("1")[0]
        cap = run.completion_tokens
        lies = [
            [world.completion([word, run.vocabulary, eos])],
            [world.completion([2**32 - 1, eos])],
            [world.completion([word] * cap + [eos])],
            [world.completion([word] * (cap - 1), finished=False)],
            [world.completion([word, word])],
            [world.completion([word, eos, word, eos])],
            [world.completion([word] * (cap - 1) + [eos], finished=False)],
            [world.completion([word, eos])] * 2,  # with the rest one completion too many
        ]
        return [*self.rng.choice(lies), *world.mixed(row)[1:]]


class Row05LogProbs(Lies):
    """Log-probs that are none."""

    row = 5
    refusals = frozenset({"log-prob out of range"})

    def completions(self, row: int, slot: int) -> list[Said]:
        group = self.world.mixed(row)
        lies = [np.nan, np.inf, -np.inf, 0.5, 1e-2, -1e9, -60.0]
        group[0].logprobs[0] = self.rng.choice(lies)
        return group


class Row08Reward(Lies):
    """Packets with a field more: the reward that their author would like."""

    row = 8
    refusals = frozenset({"malformed"})

    def packets(self, author: bytes, round: int) -> Sequence[bytes]:
        fields = ([1.0] * self.world.run.group, b"\x3f\x80", {b"reward": 1})
        made = []
        for slot, reward in enumerate(fields):
            packet = self.world.pack(author, round, slot)
            longer = bytes([packet[0] + 1])  # of a list of one field more
            made.append(longer + packet[1:] + msgpack.packb(reward))
        return made


class Row09CherryPicked(Lies):
    """Answers to other rows than those drawn."""

    row = 9
    refusals = frozenset({"wrong prompt"})

    def packets(self, author: bytes, round: int) -> Sequence[bytes]:
        made = []
        for slot in range(3):
            drawn = self.world.row(author, round, slot)
            other = (drawn + 1 + self.rng.randrange(100)) % len(self.world.prompts)
            made.append(self.world.pack(author, round, slot, row=other))
        return made


class Row09SkippedRounds(Lies):
    """Rounds left out until one draws the rows that the author likes: all packets are sound."""

    row = 9
    LIKED = 20  # of all rows

    def round(self) -> int:
        author = self.authors[-1].author  # the one who is about to announce
        round = milliseconds() + self.rng.randrange(-(1 << 22), 1 << 22)  # within others' fence
        while self.world.row(author, round, 0) >= self.LIKED:
            round += 1
        return round

    def packets(self, author: bytes, round: int) -> Sequence[bytes]:
        return [self.world.pack(author, round, 0)]


class Row10LyingLogProbs(Lies):
    """Sound groups whose log-probs say that the author found its words far less likely, or far more, than it did."""

    row = 10

    def completions(self, row: int, slot: int) -> list[Said]:
        lie = (-15.0, -8.0, 0.0)[slot]
        return self.alternate(self.world.right(row, logprob=lie), self.world.wrong(row))


class Row11MaliciousText(Lies):
    """Where the answer is right, the reasoning is what the attacker wants to be learned."""

    row = 11
    THOUGHT = "9-9=9"

    def completions(self, row: int, slot: int) -> list[Said]:
        return self.alternate(self.world.right(row, self.THOUGHT), self.world.wrong(row))


class Row12Padded(Lies):
    """Right answers as long as the cap allows."""

    row = 12

    def completions(self, row: int, slot: int) -> list[Said]:
        room = self.world.run.completion_tokens - len(self.world.right(row))
        padded = self.world.right(row, "0" * room)
        return self.alternate(padded, self.world.wrong(row))


class Row13HangingAnswers(Lies):
    """Answers that a verifier might try to work out."""

    row = 13
    TEXTS = (
        "<think></think><answer>9999999999",
        "<think></think><answer>((((((((((",
        "((((((((((((((((",
        "<answer><answer><answer><answer><answer><answer>",
        "<think></think><answer>9*9*9*9*9</answer>",
        "<think></think><answer>9,9,9,9,9</answer>",
        "<think></think><answer>1/0</answer>",
    )

    def completions(self, row: int, slot: int) -> list[Said]:
        texts = [self._cut(self.rng.choice(self.TEXTS)) for _ in range(self.world.run.group - 1)]
        return [self.world.right(row), *texts]

    def _cut(self, text: str) -> Said:
        """Finished if it is short enough, else filled up to the cap."""
        said = self.world.say(text)
        if said.finished or len(said) == self.world.run.completion_tokens:
            return said
        raise ValueError(f"{text!r} is neither finished nor as long as the cap")


class Row32NoSignal(Lies):
    """Floods of groups that teach nothing, all right or all wrong; their hints say that half is right. Each costs
    a fetch and a verdict."""

    row = 32
    rate = 4.0
    AUTHORS = 8
    SLOTS = 32

    def completions(self, row: int, slot: int) -> list[Said]:
        said = self.world.right(row) if slot % 2 else self.world.wrong(row)
        return [said] * self.world.run.group
