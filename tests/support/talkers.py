"""Nodes' gossip without a network, and what they say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.msgpack import encode

from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.announcement import Announcement
from ftis_node.swarm.gossip import Gossip
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.known import Known, announcement_id
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.self_report import SelfReport
from ftis_node.swarm.swarm import QUESTIONS
from ftis_node.swarm.table import Table
from tests.support.swarm import RUN, announcement, identity, packet

ALICE, BOB, CAROL, MALLORY = (identity(number) for number in range(1, 5))


@dataclass
class Spoken:
    """What went over the wire in an exchange."""

    calls: int = 0
    entries: int = 0
    mentions: int = 0

    def add(self, request: ftis_pb2.ExchangeRequest, answer: ftis_pb2.ExchangeResponse):
        self.calls += 1
        self.entries += len(request.entries) + len(answer.entries)
        self.mentions += len(request.mentions) + len(answer.mentions)


class Talker:
    """One node's gossip, with a clock in hand."""

    def __init__(self, who: Identity, dealt_with: set[tuple[bytes, int, int]] | None = None):
        self.who = who
        self.now = 0.0
        dealt_with = dealt_with or set()
        self.news = 0
        known = Table(600.0, lambda: self.now, random.Random(0))
        self.reputation = Reputation(lambda: self.now, unix=lambda: 0.0)
        self.gossip = Gossip(known, RUN, who.author, self.reputation, lambda *key: key in dealt_with, self._heard_news)

    def _heard_news(self):
        self.news += 1

    def exchange(self, other: Talker, *, lost: int | None = None) -> Spoken:
        """Asks `other` as the daemon does; of call number `lost` the answer does not come."""
        spoken = Spoken()
        request = self.gossip.ask(other.who.author)
        while request is not None and spoken.calls < QUESTIONS:
            answer = other.gossip.answer(request, self.who.author)
            if spoken.calls == lost:
                self.gossip.failed(request, other.who.author)
                return spoken
            spoken.add(request, answer)
            request = self.gossip.take(request, answer, other.who.author)
        if request is not None:
            self.gossip.unsent(request, other.who.author)
        return spoken

    def hear(self, entries: list[ftis_pb2.Entry], first_sender: bytes) -> int:
        """Takes in entries that nobody asked for; returns how many were new."""
        before = self.gossip.counts["new"]
        self.gossip.answer(ftis_pb2.ExchangeRequest(entries=entries), first_sender)
        return self.gossip.counts["new"] - before

    def answers(self, who: bytes, mentions: Sequence[ftis_pb2.Mention] = (), **asked: Any) -> ftis_pb2.ExchangeResponse:
        """Its answer to whoever mentions something, or asks for it."""
        return self.gossip.answer(ftis_pb2.ExchangeRequest(mentions=mentions, **asked), who)

    def fill(self, count: int):
        """Hears of so many announcements, of an author each."""
        for number in range(count):
            other = identity(1000 + number)
            self.hear([entry(made_by(other, packets=1))], other.author)

    @property
    def only(self) -> Known:
        """The one announcement that it knows."""
        [known] = self.gossip.table
        return known

    def knows(self, made: Announcement) -> bool:
        return self.gossip.table.get(made.author, made.round) is not None


def made_by(who: Identity, round: int = 0, packets: int = 2, **options: int) -> Announcement:
    return announcement(who, round, [packet(who.author, round, slot) for slot in range(packets)], **options)


def mention(made: Announcement | int, **fields: Any) -> ftis_pb2.Mention:
    """Of an announcement, or of an id."""
    return ftis_pb2.Mention(id=made if isinstance(made, int) else announcement_id(made.encode()), **fields)


@pytest.fixture
def alice() -> Talker:
    return Talker(ALICE)


@pytest.fixture
def bob() -> Talker:
    return Talker(BOB)


def entry(made: Announcement | bytes, age: float = 0.0, held: bytes = b"") -> ftis_pb2.Entry:
    data = made if isinstance(made, bytes) else made.encode()
    return ftis_pb2.Entry(announcement=data, age_ms=int(age * 1000), held=held)


NOW = 1_760_000_000  # seconds since 1970, when self-reports are made


def report(who: Identity, at: int = NOW, **fields: Any) -> SelfReport:
    return SelfReport(**{"run_id": RUN.id, "author": who.author, "at": at, **fields})


def sent(who: Identity, at: int = NOW, **fields: Any) -> bytes:
    """A self-report as its author sends it."""
    return encode(report(who, at, **fields).signed_by(who))
