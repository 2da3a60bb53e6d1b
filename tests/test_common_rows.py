"""Common rows: the same for all authors in an epoch, each of them counted once an author."""

from dataclasses import replace

import msgspec
import pytest

from ftis_node.draw import draw
from ftis_node.host.clocks import unix_seconds
from ftis_node.packet import prompt_digests
from ftis_node.swarm import common_rows
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.common_rows import Answered
from ftis_node.swarm.pool import Want
from ftis_node.swarm.pulling import Trade
from tests.support.swarm import CONTEXT, PROMPTS, ROWS, RUN, identity, make_run

EPOCH = 100
HORIZONTAL = {"collaboration": "horizontal", "group": 6, "parts": 3, "slots": 16}
SHARED = make_run(**HORIZONTAL, common=16, epoch=EPOCH)
OPENED = AdmissionContext(SHARED, prompt_digests(PROMPTS))


def announced(author, round, slots, issued_at):
    refs = [PacketRef(slot, bytes([author, round % 256, slot]) + bytes(29), 100, 1) for slot in slots]
    return announce(identity(author), run_id=SHARED.id, round=round, policy_step=0, issued_at=issued_at, packets=refs)


def test_a_run_without_common_rows_keeps_its_id_and_one_with_them_has_another():
    assert make_run(common=0, epoch=60).id == RUN.id != SHARED.id
    assert b"common" not in RUN.canonical_json() and b"epoch" not in RUN.canonical_json()
    others = (HORIZONTAL | {"common": 16, "epoch": EPOCH + 1}, HORIZONTAL, HORIZONTAL | {"slots": 8, "common": 8})
    assert len({SHARED.id, *(make_run(**fields).id for fields in others)}) == 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"common": 4}, "a vertical run has no common rows any more"),
        (HORIZONTAL | {"common": 16, "epoch": 59}, "epoch"),
        (HORIZONTAL | {"common": 4}, "all slots are common"),
    ],
)
def test_common_rows_have_their_bounds(fields, said):
    with pytest.raises(ValueError, match=said):
        make_run(**fields)


def test_slots_have_one_row_for_all_in_an_epoch_and_a_table_can_find_it():
    one = identity(1).author
    two = identity(2).author
    slots = range(SHARED.slots)
    for slot in slots:
        row = OPENED.row_of(one, 7, slot, 3 * EPOCH)
        assert row == OPENED.row_of(two, 999, slot, 4 * EPOCH - 1) == draw(SHARED.id, b"", 3, slot, ROWS)
    rows = {epoch: [OPENED.row_of(one, 7, slot, epoch * EPOCH) for slot in slots] for epoch in range(9)}
    assert len({tuple(found) for found in rows.values()}) == 9
    trade = Trade(OPENED, None, Want, None)
    assert trade.rows_of(announced(1, 7, [2, 5], 3 * EPOCH)) == {0: rows[3][2], 1: rows[3][5]}
    alone = replace(trade, context=CONTEXT)
    assert alone.rows_of(announced(1, 7, [2, 5], 3 * EPOCH)) == {}, "where rows are not common nobody asks for one"


# --- what peers make of it --------------------------------------------------------------------------------------------


@pytest.fixture
def now() -> int:
    return int(unix_seconds())


def test_what_was_prepared_counts_once_an_author_and_epoch(now):
    """An author that knows the rows ahead, and announces them again and again, round by round."""
    answered = Answered(SHARED)
    assert answered.refused(announced(1, 1, [0, 1], now)) == 0
    assert answered.refused(announced(1, 2, [0, 2], now)) == 0b01, "slot 0 was there before"
    assert answered.refused(announced(1, 3, [0, 1, 2, 3], now)) == 0b0111
    assert answered.refused(announced(2, 3, [0, 1, 2, 3], now)) == 0, "others have slots of their own"
    assert answered.refused(announced(1, 4, [0, 1], now - EPOCH)) == 0, "the epoch before"


@pytest.mark.parametrize(("epochs", "age", "counts"), [(1, 0, True), (-1, 0, True), (2, 0, False), (-2, 0, False)])
def test_the_epoch_must_agree_with_the_age(now, epochs, age, counts):
    made = announced(1, 1, [0, 5], now + epochs * EPOCH)
    earlier = msgspec.structs.replace(made, issued_at=made.issued_at - 7 * EPOCH)
    for announced_then, old in ((made, age), (earlier, age + 7 * EPOCH)):
        assert Answered(SHARED).in_time(announced_then, old) is counts


def test_a_stranger_cannot_make_it_remember_without_end(now, monkeypatch):
    monkeypatch.setattr(common_rows, "AUTHORS_MAX", 5)
    answered = Answered(SHARED)
    for author in range(1, 30):
        for age in range(0, 20 * EPOCH, EPOCH):
            answered.refused(announced(author, age, [0], now - age))
    remembered = answered._rounds
    assert len(remembered) == 5 and all(len(epochs) == common_rows.EPOCHS_MAX for epochs in remembered.values())


def test_without_common_rows_nothing_is_remembered(now):
    answered = Answered(RUN)
    assert answered.refused(announced(1, 1, [0, 1], now)) == 0 and not answered._rounds
    assert CONTEXT.row_of(identity(1).author, 1, 0, now) == CONTEXT.row_of(identity(1).author, 1, 0)
