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
from ftis_node.objective import PRESETS
from ftis_node.observe.metrics import read_events
from ftis_node.packet import Completion, encode, prompt_digests
from ftis_node.store.packets import PacketStore
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.admission import AdmissionContext, Reason, admit
from ftis_node.swarm.common_rows import OwnSlots
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
from tests.support.swarm import PROMPTS, announced_slots, content, identity, make_run
from tests.support.talkers import entry

EPOCH = 100
THREE = {"group": 6, "collaboration": "horizontal", "parts": 3}
RUN = make_run(**THREE, slots=8, common=8, epoch=EPOCH, eos=(998, 999))
CONTEXT = AdmissionContext(RUN, prompt_digests(PROMPTS))
ANSWER = Completion(np.array([1, 999], np.uint32), np.full(2, -0.5, np.float32), True)
AUTHORS = [identity(number).author for number in range(1, 6)]


def verdict_on(author, slot, issued_at, round=1, completions=2):
    """What is found of a packet with so many completions."""
    row = CONTEXT.row_of(author, round, slot, issued_at)
    made = content(RUN, author, round, slot, [ANSWER] * completions, prompt_ids=PROMPTS[row])
    return admit(CONTEXT, author, encode(made), issued_at=issued_at)


def part(author, slot, issued_at, round=1, rewards=(0.0, 1.0)):
    """An admitted part, born when it was issued."""
    return Scored(verdict_on(author, slot, issued_at, round), rewards, float(issued_at))


def parts(now=0.0):
    return Parts(RUN, lambda: now, None, lambda author: True)


# --- the run ----------------------------------------------------------------------------------------------------------


def test_all_slots_of_a_horizontal_run_are_common_or_none_are():
    with pytest.raises(ValueError, match="all slots are common, or in lock step none"):
        make_run(**THREE, slots=8, common=4)
    refuse_horizontal(RUN)
    refuse_horizontal(make_run())
    with pytest.raises(UsageError, match="lock step"):
        refuse_horizontal(make_run(**THREE))


def test_a_part_has_its_share_of_the_completions_and_no_more():
    refused = verdict_on(AUTHORS[0], 2, 0, completions=3)
    assert refused.reason in {Reason.WRONG_GROUP_SIZE, Reason.TOO_LARGE}


def test_row_50_a_part_for_a_row_of_another_epoch_is_refused():
    made = part(AUTHORS[0], 2, 0).group
    for epoch in range(1, 20):
        then = epoch * EPOCH
        if CONTEXT.row_of(AUTHORS[0], 1, 2, then) != made.row:
            found = admit(CONTEXT, AUTHORS[0], made.data, issued_at=then)
            assert found.reason is Reason.WRONG_PROMPT


# --- own parts --------------------------------------------------------------------------------------------------------


def test_parts_that_wait_for_one_come_first_then_rows_of_ones_own_order_then_whole_groups():
    fresh = OwnSlots(RUN, AUTHORS[0])
    others = {5: 2, 1: 1, 7: 3}
    taken = []
    for seconds in range(8):
        taken += fresh.take(1, float(seconds), others)
    assert taken[0] == 5, "one part is missing"
    assert taken[1] == 1
    assert taken[-1] == 7, "a group that has all its parts comes last"
    assert sorted(taken) == list(range(8))
    assert fresh.take(4, 99.0, {}) == []
    assert len(fresh.take(99, 100.0, {})) == 8, "another epoch has other rows"


def test_nodes_begin_at_different_rows():
    wide = make_run(**THREE, slots=64, common=64, epoch=EPOCH)
    first = set()
    for number in range(1, 20):
        own = OwnSlots(wide, identity(number).author)
        first.update(own.take(1, 0.0, {}))
    assert len(first) > 10


# --- foreign parts ----------------------------------------------------------------------------------------------------


def test_a_group_can_be_closed_when_its_parts_are_there_or_its_epoch_is_over():
    pool = parts()
    for number, author in enumerate(AUTHORS[:2]):
        assert pool.add(part(author, 2, number))
    key = key_of(part(AUTHORS[0], 2, 0).group)

    assert pool.ready([], 0) == []
    assert pool.ready([key], 0) == [key], "two foreign parts and an own one"
    assert pool.ready([], 1) == [key], "its epoch is over: with what is there"

    assert pool.add(part(AUTHORS[2], 2, 50))
    assert pool.ready([], 0) == [key]


def test_row_50_a_late_part_and_an_authors_second_one_are_dropped():
    pool = parts()
    first = part(AUTHORS[0], 2, 0)
    key = key_of(first.group)
    assert pool.add(first)
    assert not pool.add(part(AUTHORS[0], 2, 1, round=2))

    assert pool.close(key, Newcomers()) == [first]
    assert key in pool.closed
    assert not pool.add(part(AUTHORS[1], 2, 3))
    assert len(pool.pool) == 0
    assert pool.add(part(AUTHORS[1], 2, EPOCH)), "another epoch, another group"


def test_parts_without_a_signal_are_kept_and_old_ones_expire():
    assert parts().add(part(AUTHORS[0], 1, 0, rewards=(0.0, 0.0)))

    late = parts(now=250.0)
    assert late.add(part(AUTHORS[0], 1, 0))
    assert late.by_group() == {}
    assert late.pool.expired == 1


def test_newcomers_have_their_room_in_parts_of_a_group_too():
    pool = parts()
    for number, author in enumerate(AUTHORS):
        pool.add(part(author, 2, number))
    newcomers = Newcomers(lambda author: author in AUTHORS[1:], 2)
    key = key_of(part(AUTHORS[0], 2, 0).group)

    taken = pool.close(key, newcomers)

    assert [one.group.author for one in taken] == AUTHORS[:3]
    assert newcomers.full
    assert len(pool.pool) == 0


def test_what_was_closed_is_forgotten_in_time():
    pool = parts()
    for number in range(CLOSED_MAX + 10):
        pool.close((number, 0), Newcomers())
    assert (0, 0) not in pool.closed
    assert (CLOSED_MAX + 9, 0) in pool.closed
    assert len(pool.closed) == CLOSED_MAX


def advantages(rewards):
    return PRESETS["ftis"].advantages(torch.tensor(rewards, dtype=torch.float64))


def test_row_50_a_peer_that_sends_only_failures_turns_no_comparison_round():
    """It moves the mean: right answers gain and wrong ones lose less, and neither turns."""
    honest = [1.0, 0.0, 0.0, 1.0]
    alone = advantages(honest)
    beside = advantages([*honest, 0.0, 0.0])[:4]
    for found in (alone, beside):
        assert (found > 0).tolist() == [True, False, False, True]
    assert beside.abs().max() <= 2**0.5 * alone.abs().max() + 1e-9


# --- a node's steps ---------------------------------------------------------------------------------------------------


def horizontal(path, **options):
    """A stepper of the run; nothing that it does takes time."""
    usual = {
        "context": CONTEXT,
        "identity": identity(9),
        "clock": time.monotonic,
        "unix": lambda: 0.0,
        "reputation": Reputation(lambda: 0.0),
        "batch_groups": 2,
        "wait": 0.0,
    }
    made = stepper(path, **usual | options)
    made.source.parts = parts()
    return made, made.source


def test_row_60_announcements_without_packets_choose_no_rows_and_newcomers_parts_a_few(tmp_path):
    node, source = horizontal(tmp_path)
    me = node.means.author
    reputation = node.means.reputation
    now = int(time.time()) // EPOCH * EPOCH

    table = Table(600.0, lambda: 0.0)
    heard = Gossip(table, RUN, me, reputation, lambda *_: False, lambda: None)
    every_second = range(0, RUN.slots, 2)
    for who in (identity(1), identity(2)):
        made = announced_slots(who, RUN, every_second, round=now * 1000, issued_at=now)
        request = ftis_pb2.ExchangeRequest(entries=[entry(made)])
        heard.answer(request, who.author)
    assert heard.counts["new"] == 2

    alone = OwnSlots(RUN, me)
    for _ in range(7):
        assert source.slots(1, now) == alone.take(1, now, {})

    established(reputation, AUTHORS[0])
    for slot, author in enumerate(AUTHORS):
        assert source.parts.add(part(author, slot, 0))
        assert source.parts.add(part(author, slot + 1, 1, round=2))
    counts = source.parts.counts(source._newcomers())
    assert counts.total() == 2 + RUN.parts, "a group's worth of newcomers' parts, a quarter of a batch but no less"


def test_row_77_after_a_restart_the_slots_of_an_epoch_that_were_announced_are_not_answered_again(
    tmp_path,
):
    now = int(time.time())
    node, source = horizontal(tmp_path)
    slots = source.slots(RUN.slots // 2, now)
    made = announced_slots(identity(9), RUN, slots, issued_at=now)
    node.means.store.announced(made.encode())

    _, again = horizontal(tmp_path)
    assert set(slots).isdisjoint(again.slots(RUN.slots, now))


async def test_a_listener_makes_no_part_and_trains_on_others(tmp_path, monkeypatch):
    node, source = horizontal(tmp_path, own_share=0.0)
    trained = []

    async def train(batch, began):
        trained.append((len(batch.own), len(batch.foreign)))

    monkeypatch.setattr(node, "train", train)
    monkeypatch.setattr(source.maker, "generate", None)  # it would fail
    for author in AUTHORS[:3]:
        source.parts.add(part(author, 1, 0))
    assert await node.step(asyncio.Event()) is None, "half a batch"
    assert not trained

    for author in AUTHORS[:3]:
        source.parts.add(part(author, 2, 0))
    await node.step(asyncio.Event())
    assert trained == [(0, 6)]
    assert len(node.pool) == 0


def test_a_share_of_ones_own_bounds_the_parts_of_a_step(tmp_path):
    for share, most in (
        (None, 6),
        (0.5, 3),
        (0.0, 0),
    ):
        _, source = horizontal(tmp_path, own_share=share)
        assert source._most() == most, "of two groups of three parts"


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
    node = SimpleNamespace(
        source=SimpleNamespace(inbox=inbox, pool=parts().pool),
        means=SimpleNamespace(store=store, context=CONTEXT),
    )

    assembly.refill_pool(node)

    assert [key_of(group) for group in came] == [key_of(made.group)]


async def test_a_step_waits_for_parts_and_counts_only_its_own(tmp_path, monkeypatch):
    node, source = horizontal(tmp_path)
    asked = []
    monkeypatch.setattr(source.maker, "patience", lambda missing: asked.append(missing) or 0.0)
    await source._wait(asyncio.Event())

    for author in AUTHORS[:3]:
        source.parts.add(part(author, 1, 0))
    await source._wait(asyncio.Event())

    for author in AUTHORS[:2]:
        source.parts.add(part(author, 2, 0))
    node.means.unix = lambda: float(EPOCH)  # both groups can be closed now
    await source._wait(asyncio.Event())
    assert asked == [2, 2, 1], "six, three and one of six parts lack; a node's share are two"


async def test_a_rounds_cost_is_shared_by_the_parts_that_the_epoch_had_left(tmp_path):
    class Slow:
        async def call(self, request):
            clock.now += 8.0 * len(request.rows)
            groups = []
            for slot in request.slots:
                made = part(identity(9).author, slot, 0, request.round)
                groups.append(ScoredPacket(made.group.data, [0.0, 1.0]))
            return Generated(groups, 0.0, 9)

    clock = Clock()
    node, source = horizontal(tmp_path, clock=clock, worker=Slow())
    assert len(await source.maker.generate(RUN.slots - 1)) == RUN.slots - 1
    assert len(await source.maker.generate(RUN.slots)) == 1, "the epoch has one row left"
    assert list(node.means.pace.groups) == [8.0, 8.0]


def test_what_is_pulled_answers_open_groups_of_this_epoch_and_the_last(tmp_path):
    node, source = horizontal(tmp_path)
    want = node.want()
    rows = {CONTEXT.row_of(b"", 0, slot, 0) for slot in range(RUN.slots)}
    assert want.groups == 12
    assert set(want.rows) == rows

    closed = part(AUTHORS[0], 1, 0).group
    source.parts.close(key_of(closed), Newcomers())
    assert set(node.want().rows) == rows - {closed.row}

    node.means.own_only = True
    assert node.want().groups == 0


# --- whole nodes ------------------------------------------------------------------------------------------------------

FREE = {"collaboration": "horizontal", "pace": "free"}


def foreign_groups(steps):
    return sum(step["foreign_groups"] for step in steps)


def test_at_a_free_pace_groups_are_made_of_everybodys_parts_and_the_course_is_the_same_again(tmp_path):
    nodes = [A, B, {"name": "C", "model": "tiny-c"}]
    trial = spec(FREE, nodes=nodes, steps=4, run={"group": 6, "epoch": 60})

    found = run(trial, tmp_path / "one")
    again = run(trial, tmp_path / "two")

    assert timeless(found) == timeless(again)
    for name in "ABC":
        steps = kind(found, "step", name)
        assert len(steps) == 4
        assert foreign_groups(steps) >= 6
        for step in steps:
            assert 2 * (step["own_groups"] + step["foreign_groups"]) >= 4 * 6 - 6, "a batch is full"


def test_a_slow_node_does_not_hold_up_a_fast_one(tmp_path):
    def trial(speed):
        cell = FREE | {"speed": {"B": speed}}
        made = spec(cell, steps=10, seconds=30, run={"group": 4, "epoch": 60})
        return run(made, tmp_path / str(speed))

    found = trial(0.2)
    fast = kind(found, "step", "A")
    slow = kind(found, "step", "B")
    alone = kind(trial(1e-6), "step", "A")

    assert len(fast) >= len(alone) > 0
    assert len(fast) > len(slow) > 0
    assert foreign_groups(alone) == 0, "a node alone trains on its own parts"
    assert foreign_groups(fast) > 0
    assert foreign_groups(slow) > 0


@pytest.mark.slow
def test_three_daemons_go_on_when_one_is_killed_and_one_frozen(tmp_path, join):
    file = tmp_path / "run.toml"
    options = ("--collaboration", "horizontal", "--parts", "3", "--epoch", "60", "--group", "6")
    assert run_cli("run", "new", *options, "-o", file).returncode == 0
    assert load_run_file(file).run.parts == 3
    flags = ("--run", file, "--set", "batch_groups=6", "--set", "eval_every=1000")
    a = join("a", "--model", "tiny-a", *flags)
    b, c = (join(name, "--model", f"tiny-{name}", "--peers", a.address(), *flags) for name in "bc")
    for daemon in (a, b, c):
        daemon.wait(lambda s: len(s.get("foreign_groups_used", {})) == 2, "it trained on both others' parts")

    def shared():
        return [step for step in read_events(a.home.metrics, "step") if len(step["authors"]) == 2]

    a.wait(lambda s: bool(shared()), "a step has parts of all three")
    assert all(step["own_groups"] for step in shared())

    b.kill()
    c.freeze()
    began = a.status()["step"]
    a.reaches(began + 4, "it goes on without them")

    c.thaw()
    step = c.wait(lambda s: s, "it answers again")["step"]
    c.reaches(step + 1, "and the frozen one goes on, too")
    assert a.stop() == 0
    assert c.stop() == 0
