"""The rhythm of a node: what it makes itself and what it asks of others."""

import asyncio
import sqlite3
from dataclasses import replace

import pytest

from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.node.assembly import refill_pool
from ftis_node.node.demand import Demand, Waiting, foreign
from ftis_node.node.maker import beside
from ftis_node.node.progress import Progress
from ftis_node.step_report import DeviceSeconds
from ftis_node.swarm.certificates import encode
from ftis_node.swarm.known import Arrival
from ftis_node.swarm.pool import NO_LIMIT
from ftis_node.swarm.roster import Roster
from ftis_node.worker.messages import Generated, ScoredPacket, Step
from tests.support.clock import Clock
from tests.support.members import ANN, BEN, FOUNDER, PRIVATE, certificate, removal
from tests.support.steppers import BATCH, stepper, vertical
from tests.support.steps import step_report
from tests.support.swarm import CONTEXT, group, identity, packet, scored

NOTHING = Waiting(0)


@pytest.mark.parametrize(
    ("others", "own"),
    [
        (0, 24),
        (1, 12),
        (2, 8),
        (3, 6),
        (4, 6),
        (50, 6),
    ],
)
def test_a_node_makes_its_part_of_the_batch_but_no_less_than_a_quarter(tmp_path, others, own):
    node = stepper(tmp_path, others)
    assert vertical(node).own_quota() == own
    assert node.want().groups == 2 * (BATCH - own), "one step and one ahead"


def test_a_node_counts_on_what_comes_and_not_on_who_announces():
    demand = Demand()
    assert demand.groups_to_make(BATCH, 6, NOTHING) == 6, "before the first step there is only who announced"
    demand.stepped(0, NOTHING)
    assert demand.groups_to_make(BATCH, 6, NOTHING) == BATCH, "it waits for none"
    assert foreign(18, 2, NOTHING) == 36, "it still pulls"
    came = 0
    for each, own in ((10, BATCH - 10), (30, 6)):
        for _ in range(40):
            came += each
            demand.stepped(came, NOTHING)
        assert demand.groups_to_make(BATCH, 6, NOTHING) == pytest.approx(own, abs=each < 18), "never less than its part"


def test_what_waits_need_not_come_and_what_has_no_room_in_a_batch_is_not_counted_on():
    for room, first, later in ((NO_LIMIT, 12, 10), (4, 6, 4)):
        demand = Demand()
        waiting = Waiting(10, 10, room)
        demand.stepped(0, NOTHING)
        demand.stepped(10, waiting)
        to_make = demand.groups_to_make(BATCH, 6, waiting)
        assert to_make == BATCH - first, "those that have room, and 2 that a step brings"
        for _ in range(40):
            demand.stepped(10, waiting)
        assert demand.groups_to_make(BATCH, 6, waiting) == BATCH - later
    waiting = Waiting(10, 8, 4)
    assert waiting.left() == -4
    assert waiting.left(2) == 0
    assert waiting.usable() == 6
    assert waiting.usable(2) == 10
    assert Waiting(9, 9).left() == NO_LIMIT - 9
    assert Waiting(9, 9).usable() == 9
    assert Waiting(9, 1, 4).usable() == 9
    assert foreign(5, 1.5, waiting) == 8 - 8, "six by newcomers and two others"


async def test_a_batch_counts_what_came_for_it(tmp_path):
    node = stepper(tmp_path, 3)
    for number in range(10):
        node.pool.add(scored(1, number, 0, boot_seconds()))
    vertical(node).note_supply()
    node.pool.take(10)
    vertical(node).note_supply()
    assert vertical(node).own_quota() == BATCH - 8, "ten, then none"


def test_what_a_checkpoint_of_an_earlier_version_says_of_needed_rows_is_left_alone():
    taken = Progress(step=3, own_groups_used=7)
    taken.foreign_groups_used["peer"] = 2
    assert Progress.from_facts(taken.facts()) == taken


@pytest.mark.parametrize(
    ("pace", "found"),
    [
        (0.0, 1),
        (791.0, 2),
        (5000.0, 3),
    ],
)
async def test_after_a_restart_the_pool_has_again_what_is_young_enough_at_the_nodes_own_pace(tmp_path, pace, found):
    """Ages are counted from when the author made a group, not from its arrival here or from the start."""
    node = stepper(tmp_path, max_age=600.0, context=CONTEXT)
    author = identity(1).author
    came = {}
    node.means.progress = Progress.from_facts(Progress(step_seconds=pace).facts())
    arrived = []
    ages = (500.0, 2300.0, 3500.0, 3700.0)
    for round, age in enumerate(ages):
        body = packet(author, round, 0)
        arrived.append(Arrival(group(author, body), boot_seconds() - age, 1))

    def score(group, born, right=None):
        came[group.key] = boot_seconds() - born

    inbox = node.source.inbox
    inbox.score_later = score
    await inbox.on_groups(arrived)
    came.clear()
    refill_pool(node)
    assert came == {one.group.key: pytest.approx(age, abs=60) for one, age in zip(arrived[:found], ages, strict=False)}


def test_of_a_banned_author_nothing_waits(tmp_path):
    node = stepper(tmp_path)
    ours, theirs = (scored(number, 0, 0, boot_seconds()) for number in (1, 2))
    for one in (ours, theirs):
        assert node.pool.add(one)
    node.means.reputation.ban(theirs.group.author, "it lied")
    assert node.pool.take(9) == [ours]
    assert not node.pool.add(theirs)
    assert len(node.pool) == 0


async def test_of_a_removed_member_nothing_waits_once_the_removal_is_heard(tmp_path):
    roster = Roster(PRIVATE.id, FOUNDER.peer_id, BEN)
    roster.hear([encode((certificate(FOUNDER, ANN, expires=2**40),))], ANN.author)
    node = stepper(tmp_path, run=PRIVATE, welcomes=roster.admits)
    of_another = scored(2, 0, 0, boot_seconds())
    anns = replace(of_another.group, author=ANN.author)
    assert node.pool.add(replace(of_another, group=anns))
    assert len(node.pool) == 1
    roster.hear([encode(removal(FOUNDER, ANN, at=unix_seconds()))], FOUNDER.author)
    assert len(node.pool) == 0
    assert node.pool.take(9) == []
    node.source.inbox.score_later(anns, boot_seconds())
    await node.source.inbox.scored()
    assert len(node.pool) == 0, "nor what was scored meanwhile"


def test_idleness_is_of_the_latest_steps_together(tmp_path):
    node = stepper(tmp_path, others=0)
    assert node.idle_share() is None, "no step yet"
    for _ in range(8):
        node.device.append(DeviceSeconds(total=3.0, idle=3.0))  # long ago
    for total, idle in ((1.0, 0.5), *7 * ((1.0, 0.0),)):
        node.device.append(DeviceSeconds(total=total, idle=idle))
    assert node.idle_share() == pytest.approx(0.5 / 8)


def test_a_listener_makes_nothing_and_an_objective_for_own_samples_only_pulls_nothing(tmp_path):
    for node, found in (
        (stepper(tmp_path, 2, own_share=0.0), (0, 2 * BATCH)),
        (stepper(tmp_path, 3, own_only=True), (BATCH, 0)),
    ):
        assert (vertical(node).own_quota(), node.want().groups) == found


def test_progress_survives_the_way_through_a_checkpoints_facts():
    progress = Progress(step=7, own_weight=1.0, foreign_weight=3.0)
    progress.foreign_groups_used.update({"somebody": 5})
    again = Progress.from_facts(progress.facts())
    assert again == progress
    assert again.foreign_weight_share == 0.75
    again.foreign_groups_used["somebody"] += 1
    assert progress.foreign_groups_used["somebody"] == 5


async def test_what_is_written_to_disk_does_not_keep_the_worker_waiting():
    order = []

    async def work():
        order.append("asked")
        await asyncio.sleep(0.01)
        order.append("answered")
        return {"done": True}

    assert await beside(work(), lambda: order.append("written")) == {"done": True}
    assert order == ["asked", "written", "answered"]


async def test_a_round_is_announced_with_the_time_of_that_before_the_first_evaluation(tmp_path):
    """Not with that before it was generated, which takes minutes on a CPU: peers would think that this clock is behind.
    So does the evaluation, which is no part of the step."""

    class Slow:
        async def call(self, request):
            clock.now += 100.0
            if isinstance(request, Step):
                return step_report()
            made = [packet(identity(1).author, request.round, slot) for slot in request.slots]
            return Generated([ScoredPacket(one, [0.0, 1.0]) for one in made], 100.0, 9)

    async def evaluate():
        told.append("evaluated")
        clock.now += 240.0

    clock = Clock()
    node = stepper(
        tmp_path, 0, context=CONTEXT, identity=identity(1), worker=Slow(), clock=clock, unix=clock, batch_groups=2
    )
    told = []
    node.means.swarm.announce = lambda round, step, refs, issued_at: told.append(issued_at)
    last = await node.step(asyncio.Event(), evaluate)
    assert told == [1100, "evaluated"]
    assert last.seconds.total == 200.0


async def test_where_the_disk_is_full_the_worker_is_not_waited_for():
    cancelled = asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return {}

    def full():
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        await beside(work(), full)
    await asyncio.wait_for(cancelled.wait(), 60)


@pytest.mark.parametrize("listens", [True, False])
async def test_a_disk_that_fills_while_a_group_is_scored_ends_the_step_and_loses_no_group(
    tmp_path, monkeypatch, caplog, listens
):
    class Dull:
        async def call(self, request):
            return [0.0, 0.0]

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    node = stepper(tmp_path, others=1, worker=Dull(), own_share=0.0 if listens else None)
    waits = scored(1, 0, 0, boot_seconds())
    node.pool.add(waits)
    monkeypatch.setattr(node.means.store, "settle", full)
    node.source.inbox.score_later(scored(2, 0, 0, 0.0).group, boot_seconds())
    step = node.step(asyncio.Event())
    if not listens:
        await asyncio.wait(node.source.inbox.scoring)
        monkeypatch.setattr(node.source.maker, "generate", _nothing)
    with pytest.raises(sqlite3.OperationalError):
        await asyncio.wait_for(step, 60)
    assert node.pool.waiting() == {waits.group.author: 1}
    assert not caplog.records, "nobody is left to say that its exception was never retrieved"


async def _nothing(count):
    return []
