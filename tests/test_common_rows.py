"""Common rows: the same for all authors in an epoch, each of them counted once an author."""

from dataclasses import replace

import pytest

from ftis_node.draw import draw
from ftis_node.host.clocks import unix_seconds
from ftis_node.packet import prompt_digests
from ftis_node.swarm import common_rows
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.swarm.common_rows import Answered
from ftis_node.swarm.pool import Want
from ftis_node.swarm.pulling import Trade
from tests.support.swarm import CONTEXT, PROMPTS, ROWS, RUN, announced_slots, identity, make_run

EPOCH = 100
HORIZONTAL = {"collaboration": "horizontal", "group": 6, "parts": 3, "slots": 16}
SHARED = make_run(**HORIZONTAL, common=16, epoch=EPOCH)
OPENED = AdmissionContext(SHARED, prompt_digests(PROMPTS))


def announced(author, round, slots, issued_at):
    return announced_slots(identity(author), SHARED, slots, round=round, issued_at=issued_at)


def test_a_run_without_common_rows_keeps_its_id_and_one_with_them_has_another():
    assert make_run(common=0, epoch=60).id == RUN.id
    assert b"common" not in RUN.canonical_json()
    assert b"epoch" not in RUN.canonical_json()
    others = [
        make_run(**HORIZONTAL),
        make_run(**HORIZONTAL, common=16, epoch=EPOCH + 1),
        make_run(**HORIZONTAL | {"slots": 8}, common=8),
    ]
    assert len({run.id for run in (RUN, SHARED, *others)}) == 5


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
    epochs = []
    for epoch in range(9):
        rows = [draw(SHARED.id, b"", epoch, slot, ROWS) for slot in range(SHARED.slots)]
        for slot, row in enumerate(rows):
            assert OPENED.row_of(one, 7, slot, epoch * EPOCH) == row
            assert OPENED.row_of(two, 999, slot, (epoch + 1) * EPOCH - 1) == row
        assert rows not in epochs
        epochs.append(rows)
    trade = Trade(OPENED, None, Want, None)
    made = announced(1, 7, [2, 5], 3 * EPOCH)
    assert trade.rows_of(made) == {0: epochs[3][2], 1: epochs[3][5]}
    assert replace(trade, context=CONTEXT).rows_of(made) == {}, "where rows are not common nobody asks for one"


# --- what peers make of it --------------------------------------------------------------------------------------------


@pytest.fixture
def now() -> int:
    return int(unix_seconds())


def test_row_50_71_what_was_prepared_counts_once_an_author_and_epoch(now):
    """An author that knows the rows ahead, and announces them again and again, round by round."""
    answered = Answered(SHARED)

    def refused(author, round, slots, issued_at=now):
        return answered.refused(announced(author, round, slots, issued_at))

    assert refused(1, 1, [0, 1]) == 0
    assert refused(1, 2, [0, 2]) == 0b01, "slot 0 was there before"
    assert refused(1, 3, [0, 1, 2, 3]) == 0b0111
    assert refused(2, 3, [0, 1, 2, 3]) == 0, "others have slots of their own"
    assert refused(1, 4, [0, 1], now - EPOCH) == 0, "the epoch before"
    assert refused(1, 1, [0, 1]) == 0, "the first again does count"


@pytest.mark.parametrize(
    ("epochs", "counts"),
    [
        (1, True),
        (-1, True),
        (2, False),
        (-2, False),
    ],
)
def test_the_epoch_must_agree_with_the_age(now, epochs, counts):
    for age in (0, 7 * EPOCH):
        made = announced(1, 1, [0, 5], now + epochs * EPOCH - age)
        assert Answered(SHARED).in_time(made, age) is counts


def test_a_stranger_cannot_make_it_remember_without_end(now, monkeypatch):
    monkeypatch.setattr(common_rows, "AUTHORS_MAX", 5)
    answered = Answered(SHARED)
    for author in range(1, 7):
        answered.refused(announced(author, 1, [0], now))
    assert answered.refused(announced(6, 2, [0], now)) == 1
    assert answered.refused(announced(1, 2, [0], now)) == 0, "the first author is forgotten"
    for age in range(common_rows.EPOCHS_MAX):
        answered.refused(announced(6, 1, [0], now - (age + 1) * EPOCH))
    assert answered.refused(announced(6, 2, [0], now)) == 0, "its first epoch is forgotten"


def test_without_common_rows_nothing_is_remembered(now):
    answered = Answered(RUN)
    for round in (1, 2):
        assert answered.refused(announced(1, round, [0, 1], now)) == 0
    author = identity(1).author
    assert CONTEXT.row_of(author, 1, 0, now) == CONTEXT.row_of(author, 1, 0)
