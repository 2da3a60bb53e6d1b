"""A node in a swarm of thousands of honest authors: its table and its books, without a network or a model."""

import random
import time

from ftis_node.swarm.announcement import Announcement, PacketRef, PacketRefs
from ftis_node.swarm.pool import Newcomers
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.table import Table

BATCH = 24
FOREIGN = 18
STEP_SECONDS = 60.0


class Crowd:
    """Each step the node receives announcements of random authors, pulls by its own rules, and trains on the groups."""

    def __init__(self, authors: int, heard: int = 120, seed: int = 0):
        """
        Args:
            heard: announcements a step, of three packets each.
        """
        self.now = 0.0
        self.rng = random.Random(seed)
        self.authors = [number.to_bytes(38, "big") for number in range(authors)]
        self.reputation = Reputation(lambda: self.now)
        self.table = Table(600.0, lambda: self.now, self.rng, recorded=self.reputation.established)
        self._heard = heard
        self._rounds = time.time_ns() // 1_000_000

    def run(self, steps: int):
        for _ in range(steps):
            self.now += STEP_SECONDS
            for author in self.rng.sample(self.authors, min(self._heard, len(self.authors))):
                self.hear(author)
            self._step()

    def hear(self, author: bytes):
        self._rounds += 1
        packets = PacketRefs.of([PacketRef(slot, self.rng.randbytes(32), 1000, 1) for slot in range(3)])
        made = Announcement(bytes(16), author, self._rounds, 0, 0, packets, bytes(64))
        data = author + self._rounds.to_bytes(8, "big")
        self.table.add(made, data, age=self.rng.random() * 300, first_sender=self.rng.randbytes(38))

    def _step(self):
        reputation = self.reputation
        room = reputation.newcomers_room(BATCH)
        newcomers = Newcomers(lambda author: not reputation.established(author), room, reputation.record)
        taken = {}
        for target in self.table.choose(FOREIGN, lambda known: -1, newcomers):
            author = target.known.announcement.author
            target.known.done |= 1 << target.index
            reputation.note_pull(author, STEP_SECONDS)
            reputation.admitted(author, completions=12, tokens=2400)
            signal = self.rng.random() < 0.6
            reputation.scored(author, [1.0] * 11 + [0.0 if signal else 1.0], signal=signal)
            if signal:
                taken[author] = taken.get(author, 0) + 1
        for author, groups in taken.items():
            figures = {
                "samples": 12.0 * groups,
                "tokens": 2400.0 * groups,
                "excess": -5.0,
                "excess_squares": 4.0,
            }
            reputation.trained(
                author,
                groups,
                {
                    **figures,
                    "surprising": 0.0,
                    "likelihood": -1.0,
                    "loss_share": 0.05,
                },
            )

    def established(self) -> set[bytes]:
        return {author for author in self.authors if self.reputation.established(author)}
