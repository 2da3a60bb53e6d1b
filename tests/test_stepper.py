"""The rhythm of a node: what it makes itself and what it asks of others."""

from __future__ import annotations

import asyncio
import itertools
import math
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftis_node.host.clocks import boot_seconds
from ftis_node.node.progress import Progress
from ftis_node.node.stepper import OWN_SHARE_FLOOR, Stepper
from ftis_node.step_report import DeviceSeconds
from tests.support.scored_groups import scored
from tests.support.steppers import BATCH, stepper

_NUMBERS = itertools.count()


@pytest.mark.parametrize(("others", "own"), [(0, 24), (1, 12), (2, 8), (3, 6), (4, 6), (50, 6)])
def test_a_node_makes_its_part_of_the_batch_but_never_less_than_a_quarter(
    tmp_path: Path, others: int, own: int
) -> None:
    node = stepper(tmp_path, others)
    assert node.own_quota() == own == math.ceil(max(1 / (1 + others), OWN_SHARE_FLOOR) * BATCH)
    assert node.want().groups == 2 * (BATCH - own), "one step and one ahead"


def test_a_node_counts_on_what_comes_and_not_on_who_announces(tmp_path: Path) -> None:
    node = stepper(tmp_path, others=3)
    assert node.own_quota() == 6, "before the first step there is only who announced"
    bring(node, 0)
    assert (node.own_quota(), node.want().groups) == (BATCH, 2 * 18), (
        "nothing came: it still pulls, and waits for nobody"
    )
    for _ in range(40):
        bring(node, 10)
    assert node.own_quota() == pytest.approx(BATCH - 10, abs=1)
    for _ in range(40):
        bring(node, 30)
    assert node.own_quota() == 6, "never less than its part"


def test_what_waits_need_not_come(tmp_path: Path) -> None:
    node = stepper(tmp_path, others=3)
    for _ in range(40):
        bring(node, 0)
    bring(node, 10, take=0)
    assert node.own_quota() == BATCH - 12, "10 that are there, and 2 that a step brings"
    for _ in range(40):
        bring(node, 0)
    assert node.own_quota() == BATCH - 10


def test_what_has_no_room_in_a_batch_is_not_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = stepper(tmp_path, others=3)
    monkeypatch.setattr(node.standing, "newcomers_room", lambda batch: 4)
    bring(node, 16, take=0)
    for _ in range(40):
        bring(node, 0)
    assert node.own_quota() == BATCH - 4


def bring(node: Stepper, count: int, take: int | None = None) -> None:
    """A step for which so many groups came, and were taken."""
    for _ in range(count):
        node.pool.add(scored(1, next(_NUMBERS), 0, boot_seconds()))
    node.take(count if take is None else take)
    node.note_supply()


def test_idleness_is_of_the_latest_steps_together(tmp_path: Path) -> None:
    node = stepper(tmp_path, others=0)
    assert node.idle_share() is None, "no step yet"
    for _ in range(8):
        node._device.append(DeviceSeconds(total=3.0, idle=3.0))  # long ago
    for total, idle in ((1.0, 0.5), *7 * ((1.0, 0.0),)):
        node._device.append(DeviceSeconds(total=total, idle=idle))
    assert node.idle_share() == pytest.approx(0.5 / 8)


def test_a_listener_makes_nothing_and_wants_everything(tmp_path: Path) -> None:
    node = stepper(tmp_path, 2, own_share=0.0)
    assert (node.own_quota(), node.want().groups) == (0, 2 * BATCH)


def test_an_objective_for_own_samples_only_pulls_nothing(tmp_path: Path) -> None:
    node = stepper(tmp_path, 3, own_only=True)
    assert (node.own_quota(), node.want().groups) == (BATCH, 0)


def test_progress_survives_the_way_through_a_checkpoints_facts() -> None:
    progress = Progress(step=7, own_weight=1.0, foreign_weight=3.0)
    progress.foreign_groups_used.update({"somebody": 5})
    again = Progress.from_facts(progress.facts())
    assert again == progress and again.foreign_weight_share == 0.75
    again.foreign_groups_used["somebody"] += 1
    assert progress.foreign_groups_used["somebody"] == 5


async def test_what_is_written_to_disk_does_not_keep_the_worker_waiting(tmp_path: Path) -> None:
    node, order = stepper(tmp_path, others=0), []

    async def work() -> dict[str, Any]:
        order.append("asked")
        await asyncio.sleep(0.01)
        order.append("answered")
        return {"done": True}

    assert await node._beside(work(), lambda: order.append("written")) == {"done": True}
    assert order == ["asked", "written", "answered"]


async def test_where_the_disk_is_full_the_worker_is_not_waited_for(tmp_path: Path) -> None:
    node, cancelled = stepper(tmp_path, others=0), asyncio.Event()

    async def work() -> dict[str, Any]:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return {}

    def full() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        await node._beside(work(), full)
    await asyncio.wait_for(cancelled.wait(), 1)


@pytest.mark.parametrize("listens", [True, False])
async def test_a_disk_that_fills_while_a_group_is_scored_ends_the_step_and_loses_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listens: bool
) -> None:
    class Dull:
        async def call(self, request: Any) -> Any:
            return [0.0, 0.0]

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    node = stepper(tmp_path, others=1, worker=Dull(), own_share=0.0 if listens else None)
    told = {"poke": lambda: None, "has_peers": lambda: True, "recent_authors": lambda seconds: set()}
    node.swarm = SimpleNamespace(**told)  # type: ignore[assignment]
    waits = scored(1, 0, 0, boot_seconds())
    node.pool.add(waits)
    monkeypatch.setattr(node._store, "settle", full)
    node.score_later(scored(2, 0, 0, 0.0).group, boot_seconds())
    step = node.step(asyncio.Event())
    if not listens:
        await asyncio.wait(node._scoring)
        monkeypatch.setattr(node, "generate", _nothing)
    with pytest.raises(sqlite3.OperationalError):
        await asyncio.wait_for(step, 60)
    assert node.pool.waiting() == {waits.group.author: 1}
    assert not caplog.records, "nobody is left to say that its exception was never retrieved"


async def _nothing(count: int) -> list[Any]:
    return []
