"""What fuzzing once found interesting is read or refused as it should be, without the fuzzer; and so are the seeds."""

import random
from pathlib import Path

import pytest

from ftis_node.packet import Group
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.addresses import parse_address
from ftis_node.swarm.admission import admit
from tests.fuzz import messages
from tests.fuzz.changes import raw
from tests.fuzz.frames import Frame, join, split
from tests.fuzz.targets import TARGETS
from tests.fuzz.world import AUTHOR, CONTEXTS, PEERS, stopped_clock

CORPUS = Path(__file__).parent / "fuzz" / "corpus"
FILES = sorted(CORPUS.glob("*/*"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_every_kept_input_is_read_or_refused(file):
    TARGETS[file.parent.name].run(file.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_what_mutators_make_of_them_and_rubbish_are_read_or_refused(name):
    target = TARGETS[name]
    rng = random.Random(0)
    pool = [*target.seeds(), b"", b"\0", rng.randbytes(100)]
    for data in pool:
        target.run(data)
    for number in range(100):
        change = target.mutate if number % 3 else raw
        data = change(rng.choice(pool), random.Random(number))[: target.max_bytes]
        target.run(data)
        pool.append(data)


def test_the_kept_corpus_is_small_and_of_known_targets():
    assert {file.parent.name for file in FILES} <= set(TARGETS)
    assert len(FILES) <= 100
    assert sum(file.stat().st_size for file in FILES) <= 200_000


# --- seeds reach what they are to reach -------------------------------------------------------------------------------


def test_packets_to_start_from_are_admitted():
    vertical, horizontal, *_, text, turns = TARGETS["admit"].seeds()
    for context, data in zip(CONTEXTS, (vertical, horizontal, text, turns), strict=True):
        assert isinstance(admit(context, AUTHOR.author, data), Group)


def test_announcements_to_start_from_are_believed():
    with stopped_clock():
        node = messages.listener()
        for data in TARGETS["announcement"].seeds()[:1]:
            node.answer(ftis_pb2.ExchangeRequest(entries=[ftis_pb2.Entry(announcement=data)]), PEERS[2].author)
    assert node.counts == {"new": 1}


def test_addresses_to_start_from_are_addresses():
    for data in TARGETS["address"].seeds():
        assert parse_address(data.decode()) in {peer.author for peer in PEERS}


# --- the tools --------------------------------------------------------------------------------------------------------


def test_a_conversation_reads_back_and_cut_short_still_reads():
    frames = [Frame(0, 3, b"hello"), Frame(2, 255, b"")]
    assert split(join(frames)) == frames
    assert split(join(frames)[:6]) == [Frame(0, 3, b"he")]
    assert split(b"") == []
