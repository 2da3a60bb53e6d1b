"""What a node tells of itself: whatever is read is a sound report or none, and owners say whether it tells."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import encode

from ftis_node.config.settings import Settings
from ftis_node.node.status import self_report as node_report
from ftis_node.swarm.identity import author_of
from ftis_node.swarm.self_report import REPORT_BYTES_MAX, read_report
from ftis_node.swarm.signed import Malformed
from tests.support.damage import damaged
from tests.support.statuses import PEER, TRAINING, answered
from tests.support.swarm import RUN, identity
from tests.support.talkers import report, sent

ANN = identity(1)


@given(st.binary(max_size=300) | damaged(sent(ANN)))
def test_any_bytes_are_a_report_or_none_and_never_another_error(data):
    with contextlib.suppress(Malformed):
        assert read_report(data).run_id is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"pass_at_1": float("nan")},
        {"pass_at_1": 1.5},
        {"step": -1},
        {"bytes_in": 1 << 60},
        {"name": "n" * 65},
        {"teachers": {identity(number).author: 1 for number in range(10, 27)}},
        {"teachers": {b"short": 1}},
        {"author": b"short"},
    ],
)
def test_claims_that_cannot_be_are_refused(fields):
    with pytest.raises(Malformed):
        read_report(encode(msgspec.structs.replace(report(ANN), **fields)))


def test_the_largest_report_fits():
    most = {name: "ü" * 64 for name in ("name", "model", "tokenizer", "version", "reach", "state")}
    teachers = {identity(number).author: (1 << 53) - 1 for number in range(16)}
    assert len(sent(ANN, **most, teachers=teachers)) <= REPORT_BYTES_MAX
    with pytest.raises(Malformed, match="more than"):
        read_report(bytes(REPORT_BYTES_MAX + 1))


def test_a_report_names_no_teacher_of_those_that_are_counted_together():
    told = node_report(answered(**TRAINING, tokenizer="t"), ANN.author, RUN.id)
    assert told.teachers == {author_of(PEER): 4}
    assert told.foreign_used == 6


@pytest.mark.parametrize("private", [False, True], ids=["open", "private"])
def test_nodes_tell_of_themselves_unless_their_owner_says_never(private):
    assert Settings().tells_of_itself(private=private)
    assert not Settings(self_report="never").tells_of_itself(private=private)
    assert Settings(self_report="private").tells_of_itself(private=private) == private
