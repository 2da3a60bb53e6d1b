"""Horizontal runs: a group is made of several nodes' parts, and nobody waits for anybody."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ftis_node.config.run import load_run_file, refuse_horizontal
from ftis_node.errors import UsageError
from ftis_node.node import assembly
from ftis_node.node.horizontal import HorizontalSource
from ftis_node.objective import PRESETS
from ftis_node.observe.metrics import read_events
from ftis_node.packet import Completion, Group, encode, prompt_digests
from ftis_node.store.packets import PacketStore
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.admission import AdmissionContext, Reason, Rejection, admit
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.common_rows import Answered, OwnSlots
from ftis_node.swarm.gossip import Gossip
from ftis_node.swarm.parts import CLOSED_MAX, Parts, key_of
from ftis_node.swarm.pool import Newcomers, Scored
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.table import Table
from ftis_node.worker.messages import Generated, ScoredPacket
from tests.support.clock import Clock
from tests.support.daemons import run_cli
from tests.support.evidence import established
from tests.support.lab import A, B, kind, run, spec, timeless
from tests.support.steppers import stepper
from tests.support.swarm import PROMPTS, content, identity, make_run

EPOCH = 100
RUN = make_run(group=6, collaboration="horizontal", parts=3, slots=8, common=8, epoch=EPOCH, eos=(998, 999))
CONTEXT = AdmissionContext(RUN, prompt_digests(PROMPTS))
AUTHORS = [identity(number).author for number in range(1, 6)]


def part(author, slot, issued_at, round=1, rewards=(0.0, 1.0)):
    """An admitted part, born when it was issued."""
    row = CONTEXT.row_of(author, round, slot, issued_at)
    completions = [Completion(np.array([1, 999], np.uint32), np.full(2, -0.5, np.float32), True) for _ in range(2)]
    body = encode(content(RUN, author, round, slot, completions, prompt_ids=PROMPTS[row]))
    group = admit(CONTEXT, author, body, issued_at=issued_at)
    assert isinstance(group, Group), group
    return Scored(group, rewards, float(issued_at))


def parts(now=0.0):
    return Parts(RUN, lambda: now, None, lambda author: True)


# --- the run ----------------------------------------------------------------------------------------------------------


def test_all_slots_of_a_horizontal_run_are_common_or_none_are():
    with pytest.raises(ValueError, match="all slots are common, or in lock step none"):
        make_run(group=6, collaboration="horizontal", parts=3, slots=8, common=4)
    refuse_horizontal(RUN)
    refuse_horizontal(make_run())
    with pytest.raises(UsageError, match="lock step"):
        refuse_horizontal(make_run(group=6, collaboration="horizontal", parts=3))


def test_a_part_has_its_share_of_the_completions_and_no_more():
    completions = [Completion(np.array([999], np.uint32), np.full(1, -0.5, np.float32), True) for _ in range(3)]
    row = CONTEXT.row_of(AUTHORS[0], 1, 2, 0)
    body = encode(content(RUN, AUTHORS[0], 1, 2, completions, prompt_ids=PROMPTS[row]))
    refused = admit(CONTEXT, AUTHORS[0], body, issued_at=0)
    assert isinstance(refused, Rejection) and refused.reason in {Reason.WRONG_GROUP_SIZE, Reason.TOO_LARGE}


def test_row_50_a_part_for_a_row_of_another_epoch_is_refused():
    made = part(AUTHORS[0], 2, 0)
    rows = [CONTEXT.row_of(AUTHORS[0], 1, 2, epoch * EPOCH) for epoch in range(20)]
    for epoch in (epoch for epoch, row in enumerate(rows) if row != rows[0]):
        refused = admit(CONTEXT, AUTHORS[0], made.group.data, issued_at=epoch * EPOCH)
        assert isinstance(refused, Rejection) and refused.reason is Reason.WRONG_PROMPT


# --- own parts --------------------------------------------------------------------------------------------------------


def test_parts_that_wait_for_one_come_first_then_rows_of_ones_own_order_then_whole_groups():
    assert OwnSlots(RUN, AUTHORS[0]).take(3, 0.0, {5: 2, 1: 1, 7: 3})[:2] != [7]
    fresh = OwnSlots(RUN, AUTHORS[0])
    assert fresh.take(1, 0.0, {5: 2, 1: 1, 7: 3}) == [5], "one part is missing"
    assert fresh.take(1, 10.0, {5: 2, 1: 1, 7: 3}) == [1]
    rest = [fresh.take(1, 20.0, {7: 3})[0] for _ in range(6)]
    assert rest[-1] == 7, "a group that has all its parts comes last"
    assert sorted([5, 1, *rest]) == list(range(8)) and fresh.take(4, 99.0, {}) == []
    assert len(fresh.take(99, 100.0, {})) == 8, "another epoch has other rows"


def test_nodes_begin_at_different_rows():
    wide = make_run(group=6, collaboration="horizontal", parts=3, slots=64, common=64, epoch=EPOCH)
    first = {OwnSlots(wide, identity(number).author).take(1, 0.0, {})[0] for number in range(1, 20)}
    assert len(first) > 10


def test_row_50_71_a_second_announced_part_of_an_author_and_slot_does_not_count_the_first_again_does():
    answered = Answered(RUN)
    now = 1_760_000_000
    refs = [PacketRef(slot, bytes(32), 100, 1) for slot in (3, 4)]
    for number, refused in ((1, 0), (2, 0b11), (1, 0)):
        made = announce(identity(1), run_id=RUN.id, round=number, policy_step=0, issued_at=now, packets=refs)
        assert answered.refused(made) == refused


# --- foreign parts ----------------------------------------------------------------------------------------------------


def test_a_group_can_be_closed_when_its_parts_are_there_or_its_epoch_is_over():
    pool = parts()
    for number, author in enumerate(AUTHORS[:2]):
        assert pool.add(part(author, 2, number))
    key = key_of(part(AUTHORS[0], 2, 0).group)
    assert pool.ready([], 0) == [] and pool.ready([key], 0) == [key], "two foreign parts and an own one"
    assert pool.ready([], 1) == [key], "its epoch is over: with what is there"
    assert pool.add(part(AUTHORS[2], 2, 50)) and pool.ready([], 0) == [key]


def test_row_50_a_late_part_and_an_authors_second_one_are_dropped():
    pool = parts()
    first = part(AUTHORS[0], 2, 0)
    assert pool.add(first) and not pool.add(part(AUTHORS[0], 2, 1, round=2))
    assert pool.close(key_of(first.group), Newcomers()) == [first] and key_of(first.group) in pool.closed
    assert not pool.add(part(AUTHORS[1], 2, 3)) and len(pool.pool) == 0
    assert pool.add(part(AUTHORS[1], 2, EPOCH)), "another epoch, another group"


def test_parts_without_a_signal_are_kept_and_old_ones_expire():
    assert parts().add(part(AUTHORS[0], 1, 0, rewards=(0.0, 0.0)))
    late = Parts(RUN, lambda: 250.0, None, lambda author: True)
    assert late.add(part(AUTHORS[0], 1, 0)) and late.by_group() == {} and late.pool.expired == 1


def test_newcomers_have_their_room_in_parts_of_a_group_too():
    pool = parts()
    for number, author in enumerate(AUTHORS):
        pool.add(part(author, 2, number))
    newcomers = Newcomers(lambda author: author in AUTHORS[1:], 2)
    taken = pool.close(key_of(part(AUTHORS[0], 2, 0).group), newcomers)
    assert [one.group.author for one in taken] == AUTHORS[:3] and newcomers.full and len(pool.pool) == 0


def test_what_was_closed_is_forgotten_in_time():
    pool = parts()
    for number in range(CLOSED_MAX + 10):
        pool.close((number, 0), Newcomers())
    assert (0, 0) not in pool.closed and (CLOSED_MAX + 9, 0) in pool.closed and len(pool.closed) == CLOSED_MAX


def test_row_50_a_peer_that_sends_only_failures_turns_no_comparison_round():
    """It moves the mean: right answers gain and wrong ones lose less, and neither turns."""
    honest = [1.0, 0.0, 0.0, 1.0]
    alone = PRESETS["ftis"].advantages(torch.tensor(honest, dtype=torch.float64))
    beside = PRESETS["ftis"].advantages(torch.tensor([*honest, 0.0, 0.0], dtype=torch.float64))[:4]
    assert [value > 0 for value in beside] == [value > 0 for value in alone] == [True, False, False, True]
    assert float(beside.abs().max()) <= 2**0.5 * float(alone.abs().max()) + 1e-9


# --- a node's steps ---------------------------------------------------------------------------------------------------


def horizontal(path, **options):
    """A stepper of the run; nothing that it does takes time."""
    fixed = {"context": CONTEXT, "identity": identity(9), "clock": time.monotonic}
    still = {"unix": lambda: 0.0, "reputation": Reputation(lambda: 0.0), "batch_groups": 2, "wait": 0.0}
    made = stepper(path, **fixed | still | options)
    assert isinstance(made.source, HorizontalSource)
    made.source.parts = parts()
    return made, made.source


def test_row_60_announcements_without_packets_choose_no_rows_and_newcomers_parts_a_few(tmp_path):
    (node, source), now = horizontal(tmp_path), int(time.time()) // EPOCH * EPOCH
    heard = Gossip(
        Table(600.0, lambda: 0.0), RUN, identity(9).author, node.means.reputation, lambda *_: False, lambda: None
    )
    for who in (identity(1), identity(2)):
        refs = [PacketRef(slot, bytes(32), 100, 1) for slot in range(RUN.slots)]
        made = announce(who, run_id=RUN.id, round=now * 1000, policy_step=0, issued_at=now, packets=refs[::2])
        heard.answer(ftis_pb2.ExchangeRequest(entries=[ftis_pb2.Entry(announcement=made.encode())]), who.author)
    assert heard.counts["new"] == 2
    alone = OwnSlots(RUN, identity(9).author)
    assert [source.slots(1, now) for _ in range(7)] == [alone.take(1, now, {}) for _ in range(7)]
    established(node.means.reputation, AUTHORS[0])
    for slot, author in enumerate(AUTHORS):
        assert source.add(part(author, slot, 0)) and source.add(part(author, slot + 1, 1, round=2))
    counts = source.parts.counts(source._newcomers())
    assert counts.total() == 2 + RUN.parts, "a group's worth of newcomers' parts, a quarter of a batch but no less"


def test_row_77_after_a_restart_the_slots_of_an_epoch_that_were_announced_are_not_answered_again(
    tmp_path,
):
    now = int(time.time())
    node, source = horizontal(tmp_path)
    slots = source.slots(RUN.slots // 2, now)
    refs = [PacketRef(slot, bytes(32), 100, 1) for slot in slots]
    made = announce(identity(9), run_id=RUN.id, round=1, policy_step=0, issued_at=now, packets=refs)
    node.means.store.announced(made.encode())
    _, again = horizontal(tmp_path)
    assert not set(again.slots(RUN.slots, now)) & set(slots)


async def test_a_listener_makes_no_part_and_trains_on_others(tmp_path, monkeypatch):
    (node, source), trained = horizontal(tmp_path, own_share=0.0), []

    async def train(batch, began):
        trained.append((len(batch.own), len(batch.foreign)))

    monkeypatch.setattr(node, "train", train)
    monkeypatch.setattr(source, "make", None)  # it would fail
    for author in AUTHORS[:3]:
        source.add(part(author, 1, 0))
    assert await node.step(asyncio.Event()) is None and not trained, "half a batch"
    for author in AUTHORS[:3]:
        source.add(part(author, 2, 0))
    await node.step(asyncio.Event())
    assert trained == [(0, 6)] and len(node.pool) == 0


def test_a_share_of_ones_own_bounds_the_parts_of_a_step(tmp_path):
    found = [horizontal(tmp_path, own_share=share)[1]._most() for share in (None, 0.5, 0.0)]
    assert found == [6, 3, 0], "two groups of three parts"


@pytest.mark.parametrize("ago", [0, EPOCH])
def test_parts_that_waited_come_back_after_a_restart(tmp_path, ago, monkeypatch):
    now = 17_600_000 * EPOCH + EPOCH // 2
    monkeypatch.setattr(assembly, "unix_seconds", lambda: float(now))
    rows = [CONTEXT.row_of(AUTHORS[0], 1, 2, now + epoch * EPOCH) for epoch in (-1, 0, 1)]
    assert len(set(rows)) == 3, "by its row a part is of one of these epochs"
    made = part(AUTHORS[0], 2, now - ago)
    store = PacketStore(tmp_path / "store.sqlite", RUN.id, 1 << 20)
    store.add([made.group], own=False)
    came = []
    inbox = SimpleNamespace(score_later=lambda group, born: came.append(group))
    node = SimpleNamespace(pool=parts().pool, source=SimpleNamespace(inbox=inbox))
    assembly.refill_pool(SimpleNamespace(store=store, context=CONTEXT, stepper=node))
    assert [key_of(group) for group in came] == [key_of(made.group)]


async def test_a_step_waits_for_parts_and_counts_only_its_own(tmp_path, monkeypatch):
    (node, source), asked = horizontal(tmp_path), []
    monkeypatch.setattr(source.maker, "patience", lambda missing: asked.append(missing) or 0.0)
    await source._wait(asyncio.Event())
    for author in AUTHORS[:3]:
        source.add(part(author, 1, 0))
    await source._wait(asyncio.Event())
    for author in AUTHORS[:2]:
        source.add(part(author, 2, 0))
    node.means.unix = lambda: float(EPOCH)  # both groups can be closed now
    await source._wait(asyncio.Event())
    assert asked == [2, 2, 1], "six, three and one of six parts lack; a node's share are two"


async def test_a_rounds_cost_is_shared_by_the_parts_that_the_epoch_had_left(tmp_path):
    class Slow:
        async def call(self, request):
            clock.now += 8.0 * len(request.rows)
            groups = [part(identity(9).author, slot, 0, request.round).group for slot in request.slots]
            return Generated([ScoredPacket(one.data, [0.0, 1.0]) for one in groups], 0.0, 9)

    clock = Clock()
    node, source = horizontal(tmp_path, clock=clock, worker=Slow())
    assert len(await source.make(RUN.slots - 1)) == RUN.slots - 1
    assert len(await source.make(RUN.slots)) == 1, "the epoch has one row left"
    assert list(node.means.pace.groups) == [8.0, 8.0]


def test_what_is_pulled_answers_open_groups_of_this_epoch_and_the_last(tmp_path):
    node, source = horizontal(tmp_path)
    want = node.want()
    rows = {CONTEXT.row_of(b"", 0, slot, 0) for slot in range(RUN.slots)}
    assert (want.groups, set(want.rows or ())) == (12, rows)
    closed = part(AUTHORS[0], 1, 0)
    source.parts.close(key_of(closed.group), Newcomers())
    assert set(node.want().rows or ()) == rows - {closed.group.row}
    node.means.own_only = True
    assert node.want().groups == 0


# --- whole nodes ------------------------------------------------------------------------------------------------------

FREE = {"collaboration": "horizontal", "pace": "free"}


def test_at_a_free_pace_groups_are_made_of_everybodys_parts_and_the_course_is_the_same_again(tmp_path):
    nodes = [A, B, {"name": "C", "model": "tiny-c"}]
    trial = spec(FREE, nodes=nodes, steps=6, run={"group": 6, "epoch": 60})
    found = run(trial, tmp_path / "one")
    assert timeless(found) == timeless(run(trial, tmp_path / "two"))
    for name in "ABC":
        steps = kind(found, "step", name)
        assert len(steps) == 6 and sum(step["foreign_groups"] for step in steps) >= 6
        assert all(2 * (step["own_groups"] + step["foreign_groups"]) >= 4 * 6 - 6 for step in steps), "a batch is full"


def test_a_slow_node_does_not_hold_up_a_fast_one(tmp_path):
    lasting = {"steps": 20, "seconds": 60, "run": {"group": 4, "epoch": 60}}
    slow, dead = (spec(FREE | {"speed": {"B": speed}}, **lasting) for speed in (0.2, 1e-6))
    found = run(slow, tmp_path / "slow")
    alone = kind(run(dead, tmp_path / "dead"), "step", "A")
    fast, slow = (kind(found, "step", node) for node in "AB")
    assert len(fast) >= len(alone) > 0 and len(fast) > len(slow) > 0
    assert all(step["foreign_groups"] == 0 for step in alone), "a node alone trains on its own parts"
    assert sum(step["foreign_groups"] for step in fast) > 0 and sum(step["foreign_groups"] for step in slow) > 0


@pytest.mark.slow
def test_three_daemons_go_on_when_one_is_killed_and_one_frozen(tmp_path, join):
    file = tmp_path / "run.toml"
    options = ("--collaboration", "horizontal", "--parts", "3", "--epoch", "60", "--group", "6")
    assert run_cli("run", "new", *options, "-o", str(file)).returncode == 0
    assert load_run_file(file).run.parts == 3
    flags = ("--run", str(file), "--set", "batch_groups=6", "--set", "eval_every=1000")
    a = join("a", "--model", "tiny-a", *flags)
    b = join("b", "--model", "tiny-b", "--peers", a.address(), *flags)
    c = join("c", "--model", "tiny-c", "--peers", a.address(), *flags)
    for daemon in (a, b, c):
        daemon.wait(lambda s: len(s.get("foreign_groups_used", {})) == 2, "it trained on both others' parts")

    def shared():
        return [step for step in read_events(a.home.metrics, "step") if len(step["authors"]) == 2]

    a.wait(lambda s: bool(shared()), "a step has parts of all three")
    assert all(step["own_groups"] for step in shared())
    b.kill()
    c.freeze()
    began = a.status()["step"]
    a.wait(lambda s: s["step"] >= began + 4, "it goes on without them")
    waits = [step["seconds"] for step in read_events(a.home.metrics, "step")[-3:]]
    c.thaw()
    step = c.wait(lambda s: s, "it answers again")["step"]
    c.wait(lambda s: s["step"] > step, "and the frozen one goes on, too")
    assert a.stop() == 0 and c.stop() == 0
    assert all(one["wait"] <= one["total"] for one in waits)
