"""Common rows: the same for all authors in an epoch, each of them counted once an author."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ftis_node.draw import draw
from ftis_node.host.clocks import unix_seconds
from ftis_node.packet import encode, packet_digest, prompt_digests
from ftis_node.swarm import common_rows
from ftis_node.swarm.admission import AdmissionContext, Group, Reason, Rejection, admit
from ftis_node.swarm.announcement import Announcement, PacketRef, announce
from ftis_node.swarm.common_rows import Answered, OwnSlots
from ftis_node.swarm.needs import teaching_rows
from tests.support.swarm import CONTEXT, PROMPTS, ROWS, RUN, content, decode, identity, make_run, packet

COMMON, EPOCH = 4, 100
SHARED = make_run(common=COMMON, epoch=EPOCH)
OPENED = AdmissionContext(SHARED, prompt_digests(PROMPTS))


def announced(author: int, round: int, slots: list[int], issued_at: int) -> Announcement:
    refs = [PacketRef(slot, bytes([author, round % 256, slot]) + bytes(29), 100, 1) for slot in slots]
    return announce(identity(author), run_id=SHARED.id, round=round, policy_step=0, issued_at=issued_at, packets=refs)


def test_a_run_without_common_rows_keeps_its_id_and_one_with_them_has_another() -> None:
    assert make_run(common=0, epoch=60).id == RUN.id != SHARED.id
    assert b"common" not in RUN.canonical_json() and b"epoch" not in RUN.canonical_json()
    assert SHARED.id != make_run(common=COMMON, epoch=EPOCH + 1).id


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"common": 9}, "half of slots"),
        ({"common": 4, "epoch": 59}, "epoch"),
        ({"common": 4, "collaboration": "horizontal", "parts": 3}, "all slots are common"),
    ],
)
def test_common_rows_have_their_bounds(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_run(**fields)


def test_common_slots_have_one_row_for_all_in_an_epoch_and_the_others_their_authors() -> None:
    one, two = identity(1).author, identity(2).author
    for slot in range(COMMON):
        row = OPENED.row_of(one, 7, slot, 3 * EPOCH)
        assert row == OPENED.row_of(two, 999, slot, 4 * EPOCH - 1) == draw(SHARED.id, b"", 3, slot, ROWS)
    slots = range(COMMON)
    rows = {epoch: [OPENED.row_of(one, 7, slot, epoch * EPOCH) for slot in slots] for epoch in range(9)}
    assert len({tuple(found) for found in rows.values()}) == 9
    assert OPENED.row_of(one, 7, COMMON, 0) == draw(SHARED.id, one, 7, COMMON, ROWS)
    made = announced(1, 7, [0, COMMON], 3 * EPOCH)
    assert teaching_rows(OPENED, made) == {0: rows[3][0], 1: draw(SHARED.id, one, 7, COMMON, ROWS)}


def test_a_round_answers_the_epochs_rows_in_order_and_as_many_of_its_own() -> None:
    slots = OwnSlots(SHARED)
    assert slots.take(5, 0.0) == [0, 1, COMMON, COMMON + 1, COMMON + 2]
    assert slots.take(1, 10.0) == [COMMON], "the larger half is its own"
    assert slots.take(8, 99.9) == [2, 3, *range(COMMON, COMMON + 6)]
    assert slots.take(2, 99.9) == [COMMON, COMMON + 1], "all of the epoch are answered"
    assert slots.take(2, 100.0) == [0, COMMON]
    assert OwnSlots(RUN).take(3, 0.0) == [0, 1, 2] and OwnSlots(SHARED).take(99, 0.0)[-1] < SHARED.slots


@given(st.lists(st.tuples(st.integers(1, SHARED.slots - COMMON), st.floats(0, 500))))
def test_no_slot_of_a_round_or_of_an_epoch_is_taken_twice(rounds: list[tuple[int, float]]) -> None:
    slots, seen = OwnSlots(SHARED), set()
    for count, unix in sorted(rounds, key=lambda one: one[1]):
        taken = slots.take(count, unix)
        assert len(taken) == count and taken == sorted(set(taken)) and taken[-1] < SHARED.slots
        for slot in taken:
            if slot < COMMON:
                assert (int(unix) // EPOCH, slot) not in seen
                seen.add((int(unix) // EPOCH, slot))


def test_a_row_of_another_epoch_is_refused() -> None:
    author = identity(1).author
    completions = decode(packet(author, 7, 0)).completions()
    prompt = PROMPTS[OPENED.row_of(author, 7, 0, 3 * EPOCH)]
    data = encode(content(SHARED, author, 7, 0, list(completions), prompt_ids=prompt))
    made = admit(OPENED, author, data, announced=(7, 0), issued_at=3 * EPOCH, digest=packet_digest(data))
    assert isinstance(made, Group) and made.row == draw(SHARED.id, b"", 3, 0, ROWS)
    late = admit(OPENED, author, data, announced=(7, 0), issued_at=4 * EPOCH)
    assert isinstance(late, Rejection) and late.reason is Reason.WRONG_PROMPT


# --- what peers make of it --------------------------------------------------------------------------------------------


@pytest.fixture
def now() -> int:
    return int(unix_seconds())


def test_what_was_prepared_counts_once_an_author_and_epoch(now: int) -> None:
    """An author that knows the rows ahead, and announces them again and again, round by round."""
    answered = Answered(SHARED)
    assert answered.refused(announced(1, 1, [0, 1, 5], now), 0.0) == 0
    assert answered.refused(announced(1, 2, [0, 2, 5], now), 0.0) == 0b001, "slot 0 was there before; 5 is its own"
    assert answered.refused(announced(1, 3, [0, 1, 2, 3], now), 0.0) == 0b0111
    assert answered.refused(announced(2, 3, [0, 1, 2, 3], now), 0.0) == 0, "others have slots of their own"
    assert answered.refused(announced(1, 4, [0, 1], now - EPOCH), 0.0) == 0, "the epoch before"


@pytest.mark.parametrize(("epochs", "age", "counts"), [(1, 0, True), (-1, 0, True), (2, 0, False), (-2, 0, False)])
def test_the_epoch_must_agree_with_the_age(now: int, epochs: int, age: float, counts: bool) -> None:
    made = announced(1, 1, [0, 5], now + epochs * EPOCH)
    earlier = replace(made, issued_at=made.issued_at - 7 * EPOCH)
    for announced_then, old in ((made, age), (earlier, age + 7 * EPOCH)):
        assert Answered(SHARED).refused(announced_then, old) == (0 if counts else 0b01)


def test_a_stranger_cannot_make_it_remember_without_end(now: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_rows, "AUTHORS_MAX", 5)
    answered = Answered(SHARED)
    for author in range(1, 30):
        for age in range(0, 20 * EPOCH, EPOCH):
            answered.refused(announced(author, age, [0], now - age), age)
    remembered = answered._slots
    assert len(remembered) == 5 and all(len(epochs) == common_rows.EPOCHS_MAX for epochs in remembered.values())


def test_without_common_rows_nothing_is_remembered(now: int) -> None:
    answered = Answered(RUN)
    assert answered.refused(announced(1, 1, [0, 1], now), 0.0) == 0 and not answered._slots
    assert CONTEXT.row_of(identity(1).author, 1, 0, now) == CONTEXT.row_of(identity(1).author, 1, 0)
