"""What a node cannot do itself: which rows it needs, what it pulls for them, and what that replaces."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.host.clocks import boot_seconds
from ftis_node.node.assembly import refill_pool
from ftis_node.node.step_batch import OwnGroup, without_dead
from ftis_node.packet import Group
from ftis_node.swarm.announcement import Announcement, PacketRef, announce
from ftis_node.swarm.needs import ROWS_MAX, Needs, RowState, right_of, teaches, teaching_rows
from ftis_node.swarm.pool import Newcomers, Pool, Scored
from ftis_node.swarm.table import Arrival, Table
from tests.support.scored_groups import scored
from tests.support.steppers import stepper, vertical
from tests.support.swarm import CONTEXT, RUN, group, identity, packet

FAILED, MIXED, RIGHT = (0.0, 0.0), (0.0, 1.0), (1.0, 1.0)


@pytest.mark.parametrize(
    ("rewards", "right"),
    [((0, 0), 0), ((0, 1), 1), ((1, 1), 2), ((0.5, 0.5), 2), ((0, 0.3), 1), ((-1, 0), 0), ((0.3, 1, 1), 2)],
)
def test_the_hint_counts_the_completions_with_the_highest_reward(rewards: tuple[float, ...], right: int) -> None:
    assert right_of(rewards) == right
    assert teaches(RUN.model_copy(update={"group": len(rewards)}), right) == (
        min(rewards) != max(rewards) and max(rewards) > 0
    )


def test_a_row_is_needed_from_the_first_failure_until_others_taught_it_or_the_node_can_do_it() -> None:
    needs = Needs()
    needs.tried(1, FAILED)
    needs.tried(2, FAILED)
    needs.tried(3, MIXED)
    assert list(needs) == [2, 1] and 3 not in needs, "the latest failure first"
    needs.tried(2, MIXED)
    assert list(needs) == [1] and needs.count(*RowState) == 1, "the node can do row 2, and never learned it"
    needs.trained([1, 3])
    assert list(needs) == [] and needs.learned(9) == [1]
    needs.could(1)
    assert needs.learned(9) == [] and needs.count(RowState.DONE) == 1
    needs.tried(1, FAILED)
    assert list(needs) == [1], "what was forgotten is needed again"


def test_of_many_rows_the_oldest_is_forgotten() -> None:
    needs = Needs()
    for row in range(ROWS_MAX + 3):
        needs.tried(row, FAILED)
    assert needs.count(RowState.NEEDED) == ROWS_MAX and 2 not in needs and 3 in needs


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([FAILED, MIXED, RIGHT, None]))))
def test_needs_survive_the_way_through_a_checkpoint(events: list[tuple[int, tuple[float, ...] | None]]) -> None:
    needs = Needs()
    for row, rewards in events:
        needs.trained([row]) if rewards is None else needs.tried(row, rewards)
    assert list(Needs.from_facts(needs.facts())) == list(needs) and Needs.from_facts(needs.facts()) == needs


# --- what is pulled -----------------------------------------------------------------------------------------------


def announced(number: int, round: int, rights: list[int]) -> Announcement:
    refs = [PacketRef(slot, bytes([number, round, slot]) + bytes(29), 100, right) for slot, right in enumerate(rights)]
    return announce(identity(number), run_id=RUN.id, round=round, policy_step=0, issued_at=0, packets=refs)


def table_of(*announcements: Announcement) -> Table:
    table = Table(600.0, lambda: 0.0, random.Random(0), rows_of=lambda made: teaching_rows(CONTEXT, made))
    for made in announcements:
        table.add(made, made.encode(), age=0.0, first_sender=b"x")
    return table


def row_of(made: Announcement, slot: int) -> int:
    return CONTEXT.row_of(made.author, made.round, slot)


def test_the_packets_that_answer_needed_rows_are_chosen_first_row_first() -> None:
    one, two = announced(1, 1, [1, 1, 1]), announced(2, 1, [1, 1, 1])
    table = table_of(one, two)
    wanted = [row_of(two, 1), row_of(one, 2)]
    chosen = table.choose(2, lambda known: -1, rows=wanted)
    assert sorted(CONTEXT.row_of(*target.key) for target in chosen) == sorted(wanted)
    assert not table.choose(2, lambda known: 0, rows=wanted), "no free holder"
    for target in chosen:
        target.known.pulling |= 1 << target.index
    again = table.choose(2, lambda known: -1, rows=wanted)
    assert not {target.key for target in chosen} & {target.key for target in again}


def test_only_groups_with_right_and_wrong_completions_answer_a_row() -> None:
    made = announced(1, 1, [0, RUN.group, 1])
    table = table_of(made)
    rows = [row_of(made, slot) for slot in range(3)]
    assert len(set(rows)) == 3
    assert [target.index for target in table.choose(9, lambda known: -1, rows=rows)] == [2]


def test_newcomers_share_their_part_when_rows_are_answered_too() -> None:
    made = [announced(number, 1, [1]) for number in range(1, 9)]
    rows = [row_of(one, 0) for one in made]
    assert len(table_of(*made).choose(9, lambda known: -1, Newcomers(lambda author: True, room=2), rows)) == 2


def test_newcomers_that_answer_the_first_rows_keep_nobody_elses_answer_out() -> None:
    strangers, known = [announced(1, round, [1]) for round in range(20)], announced(2, 1, [1])
    rows = [row_of(one, 0) for one in (*strangers, known)]
    newcomers = Newcomers(lambda author: author != known.author, room=0)
    chosen = table_of(*strangers, known).choose(1, lambda known: -1, newcomers, rows)
    assert [target.key for target in chosen] == [(known.author, 1, 0)]


# --- what is replaced ---------------------------------------------------------------------------------------------


def group_of(row: int, rewards: tuple[float, ...], number: int = 1) -> Scored:
    made = scored(number, row, 0, boot_seconds(), rewards)
    return Scored(Group(made.group.author, row, made.group.packet, bytes(32), b""), rewards, made.born)


def own(row: int, rewards: tuple[float, ...]) -> OwnGroup:
    return OwnGroup(group_of(row, rewards).group, rewards)


def test_the_pool_gives_answers_to_the_steps_own_rows_first_and_one_a_row() -> None:
    pool = Pool(600.0, boot_seconds, random.Random(0))
    for row, author in ((1, 1), (1, 2), (2, 1), (3, 3)):
        assert pool.add(group_of(row, MIXED, author))
    answers = pool.answers({3}, {1, 2, 3}, 3, Newcomers())
    assert answers[0].group.row == 3 and {one.group.row for one in answers} == {1, 2, 3}
    assert len(pool) == 1 and pool.rows() == {1}
    assert not pool.answers({1}, {1}, 1, Newcomers(lambda author: True, room=0))


def test_a_dead_group_of_the_same_row_makes_room_first_then_one_that_all_failed() -> None:
    mine = [own(1, RIGHT), own(2, MIXED), own(3, FAILED), own(4, FAILED)]
    kept, gone = without_dead(mine, [group_of(4, MIXED)], drop=False)
    assert [one.group.row for one in gone] == [4] and [one.group.row for one in kept] == [1, 2, 3]
    _, gone = without_dead(mine, [group_of(9, MIXED), group_of(4, MIXED)], drop=False)
    assert [one.group.row for one in gone] == [4, 3]
    kept, gone = without_dead(mine, [group_of(4, MIXED)], drop=True)
    assert [one.group.row for one in kept] == [2]
    assert without_dead([own(1, RIGHT)], [], drop=True)[0], "a step needs a group"


def test_a_node_asks_for_as_many_answers_as_it_had_dead_groups(tmp_path: Path) -> None:
    node = stepper(tmp_path, others=1)
    mine = [own(row, FAILED) for row in range(5)] + [own(9, MIXED)]
    for one in mine:
        node.progress.needs.tried(one.group.row, one.rewards)
    assert vertical(node)._answers(mine, Newcomers()) == []
    want = node.want()
    assert want.answers == 5 and list(want.rows) == [4, 3, 2, 1, 0]
    node.pool.add(group_of(3, MIXED))
    want = node.want()
    assert want.answers == 4 and 3 not in list(want.rows)
    assert want.groups == 24, "an answer takes nobody else's place"
    assert [one.group.row for one in vertical(node)._answers(mine, Newcomers())] == [3]


def test_answers_are_at_most_half_of_what_is_pulled(tmp_path: Path) -> None:
    node = stepper(tmp_path, others=1)
    vertical(node)._answers([own(row, FAILED) for row in range(20)], Newcomers())
    assert node.want().answers == 12


@pytest.mark.parametrize(
    ("settings", "only"), [({"objective": "graft"}, True), ({"foreign": "answers"}, True), ({}, False)]
)
def test_with_answers_only_a_node_makes_its_whole_batch(tmp_path: Path, settings: dict[str, Any], only: bool) -> None:
    node = stepper(tmp_path, others=1, **settings)
    vertical(node)._answers([own(row, FAILED) for row in range(20)], Newcomers())
    want = node.want()
    assert (vertical(node).own_quota(), want.groups, want.answers) == ((24, 0, 12) if only else (12, 24, 12))


def test_a_node_may_leave_its_needs_alone(tmp_path: Path) -> None:
    node = stepper(tmp_path, others=1, by_need=False)
    assert not vertical(node)._answers([own(1, FAILED)], Newcomers()) and not node.want().answers


# --- hints that are wrong -------------------------------------------------------------------------------------------


class Judge:
    """A compute process that gives every foreign group the same rewards."""

    def __init__(self, rewards: tuple[float, ...]) -> None:
        self.rewards = list(rewards)

    async def call(self, request: Any) -> Any:
        return self.rewards


@pytest.mark.parametrize(
    ("rule", "hint", "banned"),
    [("integer", 2, True), ("integer", 1, False), ("integer", None, False), ("math", 2, False)],
)
async def test_a_wrong_hint_is_a_fault_by_some_rules(tmp_path: Path, rule: str, hint: int | None, banned: bool) -> None:
    node = stepper(tmp_path, others=1, run=RUN.model_copy(update={"reward": rule}), worker=Judge(MIXED))
    author = group_of(0, MIXED).group.author
    for row in range(3):
        node.score_later(group_of(row, MIXED).group, boot_seconds(), hint)
        await node.scored()
    assert (node.reputation.banned(author) is not None) is banned
    assert node.reputation.report(author).refused == ({"wrong hint": 3} if banned else {})


async def test_after_a_restart_the_pool_has_again_what_is_young_enough_for_its_row_and_no_older(tmp_path: Path) -> None:
    """Ages are counted from when the author made a group, not from its arrival here or from the start."""
    node, author, came = stepper(tmp_path, others=1, max_age=600.0), identity(1).author, {}
    arrived = []
    for round, age in enumerate((500.0, 700.0, 700.0, 3700.0)):
        body = packet(author, round, 0)
        arrived.append(Arrival(group(author, body), body, boot_seconds() - age, 1))
    rows = [one.group.row for one in arrived]
    assert len(set(rows)) == len(rows)
    for row in rows[2:]:
        node.progress.needs.tried(row, FAILED)

    def score(group: Group, born: float, right: int | None = None) -> None:
        came[group.row] = boot_seconds() - born

    node.score_later = score  # type: ignore[method-assign]
    await node.on_groups(arrived)
    came.clear()
    refill_pool(SimpleNamespace(store=node.store, context=CONTEXT, stepper=node))  # type: ignore[arg-type]
    assert came == {rows[0]: pytest.approx(500.0, abs=60), rows[2]: pytest.approx(700.0, abs=60)}
