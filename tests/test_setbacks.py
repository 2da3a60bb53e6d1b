"""Which weights a node goes on from: after any sequence of saves, doubts, damage, kills and restarts it is the newest
training that is left, and the log leads to exactly those weights."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ftis_node.errors import UserError
from ftis_node.lab.replaying.lineage import EVENTS, lineage
from ftis_node.node.checkpointing import Saving, checkpoint_seconds, wear
from ftis_node.node.progress import Progress
from ftis_node.observe.answers import CheckpointStatus
from ftis_node.observe.metrics import MetricsLog, each_event
from ftis_node.store.checkpoints import verify
from ftis_node.text import GB, MB
from ftis_node.worker.messages import Snapshot, Write
from tests.support.clock import Clock
from tests.support.steps import FIGURES, MACHINE, step_report

GOOD = step_report()
BAD = step_report(bad_steps=1)
DIVERGED = step_report(bad_steps=5, diverged=True)


class Killed(BaseException):
    """kill -9, at the operation that raises it."""


class Marks:
    """A compute process whose weights are the marks of all steps that made them."""

    def __init__(self):
        self.weights = []
        self._snapshot = []

    async def call(self, request):
        file = Path(request.directory) / "weights"
        if isinstance(request, Snapshot):
            self._snapshot = list(self.weights)
        elif isinstance(request, Write):
            file.write_text(json.dumps(self._snapshot))
        else:
            self.weights = json.loads(file.read_text())


class Node:
    """What a daemon does with its checkpoints and its log, on a real directory."""

    def __init__(self, path, minutes, clock):
        self.path = path
        self.minutes = minutes
        self.clock = clock
        self.marks = 0  # a number of its own for every step there ever was
        self.loop = asyncio.new_event_loop()
        self.start()

    def start(self):
        """Another process on the same home."""
        self.log = MetricsLog(self.path / "metrics.jsonl")
        self.saving = Saving(self.path / "checkpoints", {"model": "m (full)"}, self.log, self.minutes, self.clock)
        self.revive()
        if self.progress is None:
            self.progress = Progress()
            self.do(self.saving.checkpoint(self.compute, self.progress))

    def revive(self, *, older=False):
        """Another compute process, as `Node._renew` starts one."""
        self.compute = Marks()
        self.progress = self.do(self.saving.restore(self.compute, older=older))
        fresh = self.progress is None
        step = self.progress.step if self.progress else 0
        self.log.write("started", step=step, fresh=fresh, branch=self.saving.branch, **MACHINE)
        if fresh and self.saving.written:
            self.progress = Progress()

    def step(self, report=GOOD):
        self.progress.step += 1
        self.marks += 1
        if report is GOOD:
            self.compute.weights.append(self.marks)
        batch = {"own": [f"{self.marks:08x}"], "foreign": []}
        figures = FIGURES | {"skipped": None if report is GOOD else "not finite"}
        self.log.write("step", step=self.progress.step, batch=batch, micro_batch_tokens=1, **figures)
        self.do(self.saving.after_step(self.compute, self.progress, report))

    def settle(self):
        self.do(self.saving.flush())

    def save(self):
        self.do(self.saving.save(self.compute, self.progress))
        self.settle()

    def kill(self):
        """Nothing is finished; what is on disk is all that is left."""
        self.saving.abandon()
        self.do(asyncio.sleep(0))
        self.log.close()

    def do(self, work):
        """To its end, with whatever it began."""

        async def whole():
            result = await work
            if self.saving._writing is not None:
                await asyncio.wait({self.saving._writing})
            return result

        return self.loop.run_until_complete(whole())

    def told(self):
        """The steps that made the present weights, by the log."""
        line = lineage(each_event(self.path / "metrics.jsonl", *EVENTS))
        return [int(one.logged.batch.own[0], 16) for one in line.links if one.logged and not one.logged.skipped]

    def close(self):
        self.kill()
        self.loop.close()


@pytest.fixture
def node(tmp_path) -> Iterator[Node]:
    node = Node(tmp_path, 5, Clock())
    yield node
    node.close()


def minutes_of_steps(node, steps=5):
    """Trains, a step a minute; returns the weights."""
    for _ in range(steps):
        node.clock.now += 60
        node.step()
    return list(node.compute.weights)


def restart(node):
    node.kill()
    node.start()


def test_five_steps_without_finite_numbers_and_a_restart_go_on_from_the_older_checkpoint(node):
    minutes_of_steps(node, 6)
    older = node.compute.weights[:1]
    node.step(DIVERGED)
    assert node.compute.weights == older == node.told(), "the first good step of a start is saved at once"
    restart(node)
    assert node.compute.weights == older == node.told()


def test_no_checkpoint_is_written_before_it_is_due(node):
    node.step()
    first = node.saving.written
    for _ in range(100):
        node.clock.now += 2.9
        node.step()
    assert node.saving.written == first
    node.clock.now += 10
    node.step()
    assert node.saving.written == first + 1


def test_a_kill_costs_no_more_than_the_minutes_that_were_set_and_two_steps(node):
    """At the worst time: late in a step, while the checkpoint of the step before is still being written."""
    node.step()
    for _ in range(40):
        on_disk = [verify(path)["progress"]["step"] for path in (node.path / "checkpoints").glob("step-????????")]
        node.clock.now += 70
        node.step()
        lost_steps = node.progress.step + 1 - max(on_disk)
        assert 70 * lost_steps <= 5 * 60 + 2 * 70


def test_a_pause_makes_no_checkpoint_more_frequent(node):
    minutes_of_steps(node, 3)
    node.save()
    node.revive()
    node.step()
    node.step()
    assert node.saving.status().due_seconds == 300


def test_what_was_trained_since_the_last_checkpoint_is_saved_at_the_end_also_after_a_bad_step(node):
    trained = minutes_of_steps(node, 3)
    node.step(BAD)
    node.save()
    restart(node)
    assert node.compute.weights == trained == node.told()


def test_steps_that_changed_nothing_are_not_saved_at_the_end(node):
    minutes_of_steps(node, 3)
    node.save()
    written = node.saving.written
    node.step(BAD)
    node.save()
    assert node.saving.written == written


def test_the_status_says_how_old_the_checkpoint_is_and_when_the_next_is_due(node):
    assert node.saving.status() == CheckpointStatus(0, node.saving.next_bytes, age_seconds=0, due_seconds=None)
    node.step()
    node.clock.now += 100
    node.step()
    assert node.saving.status() == CheckpointStatus(1, node.saving.next_bytes, age_seconds=100, due_seconds=200)
    node.clock.now += 400
    assert node.saving.status().due_seconds == 0


@pytest.mark.parametrize(
    ("size", "minutes", "a_day"),
    [
        pytest.param(3 * MB, 5, "864 MB", id="a toy"),
        pytest.param(354 * MB, 5, "99.6 GB", id="LoRA layers of 3B"),
        pytest.param(6 * GB, 36, "240.0 GB", id="0.5B in full"),
        pytest.param(18 * GB, 60, "432.0 GB", id="1.5B in full"),
    ],
)
def test_the_larger_a_checkpoint_the_longer_to_the_next_at_most_an_hour(size, minutes, a_day):
    assert checkpoint_seconds(None, size) == pytest.approx(60 * minutes)
    assert wear(None, size).endswith(f" every {minutes} min, {a_day} a day")
    assert checkpoint_seconds(0.5, size) == 30, "what a person sets comes first"
    assert wear(0, size).endswith("after every step")


OPERATIONS = (
    *((Path, name) for name in ("rename", "mkdir", "write_text")),
    (shutil, "rmtree"),
    (os, "fsync"),
    (MetricsLog, "write"),
)


@contextmanager
def killed_at(number):
    """The process ends before the operation on the disk of this number."""
    left = [number]

    def dying(real):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for place, name in OPERATIONS:
            patch.setattr(place, name, dying(getattr(place, name)))
        yield


class Life(RuleBasedStateMachine):
    """A node's life. `order`: the weights of all checkpoints in the order in which they were committed."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="setbacks-")
        self.node = Node(Path(self.folder.name), 1, Clock())
        self.checkpoints = self.node.path / "checkpoints"

    def newest(self):
        """The weights that a start has to take, found without the code under test: by when a file was written."""
        found = [path for path in self.checkpoints.iterdir() if path.suffix in ("", ".doubted") and sound(path)]
        newest = max(found, key=lambda path: (path / "checkpoint.json").stat().st_mtime_ns, default=None)
        return None if newest is None else list(json.loads((newest / "weights").read_text()))

    @rule(steps=st.integers(1, 3), seconds=st.sampled_from((1, 30, 100)))
    def train(self, steps, seconds):
        for _ in range(steps):
            self.node.clock.now += seconds
            self.node.step()

    @rule()
    def save(self):
        unsaved = self.node.saving.status().due_seconds is not None
        self.node.save()
        assert not unsaved or self.newest() == self.node.compute.weights

    @rule()
    def the_compute_process_fails(self):
        self.node.revive()

    @rule()
    def it_fails_with_the_newest_again_and_again(self):
        self.node.revive(older=True)

    @rule()
    def diverge(self):
        try:
            self.node.step(DIVERGED)
        except UserError:  # there is nothing to go back to; the daemon ends
            self.start_again()

    @rule(number=st.integers(0, 40), what=st.sampled_from(("train", "save", "older", "diverge", "start")))
    def kill(self, number, what):
        """At any operation on the disk; a start after that, too, may be killed."""
        does = {
            "train": lambda: self.train(2, 100),
            "save": self.node.save,
            "older": lambda: self.node.revive(older=True),
            "diverge": self.diverge,
            "start": self.node.start,
        }
        if what == "start":
            self.node.kill()
        with suppress(Killed), killed_at(number):
            does[what]()
        self.start_again()

    @rule(which=st.integers(0, 2))
    def damage(self, which):
        """A file rots; at the next start the checkpoint is set aside."""
        here = sorted(self.checkpoints.glob("step-????????*"))
        if len(here) > 1:
            (here[which % len(here)] / "weights").write_text("[")
            self.start_again()

    @rule()
    def start_again(self):
        self.node.kill()
        expected = self.newest()
        self.node.start()
        assert self.node.compute.weights == (expected or [])

    @invariant()
    def the_log_leads_to_the_weights(self):
        assert self.node.told() == self.node.compute.weights

    @invariant()
    def few_checkpoints_lie_there(self):
        names = sorted(path.name for path in self.checkpoints.glob("step-*") if path.suffix != ".damaged")
        assert len([name for name in names if "." not in name]) <= 3, names
        assert not [name for name in names if name.endswith((".partial", ".replaced"))], names

    def teardown(self):
        self.node.close()
        self.folder.cleanup()


def sound(path):
    with suppress(Exception):
        return bool(verify(path))
    return False


TestLife = Life.TestCase
TestLife.settings = settings(stateful_step_count=25)
