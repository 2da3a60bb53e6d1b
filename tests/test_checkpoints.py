"""A checkpoint is whole or it is not there, whatever kills the node, and a damaged one never costs the one before."""

import random
import shutil
import time
from pathlib import Path

import pytest

from ftis_node.store.checkpoints import CHECKPOINTS_KEPT, CheckpointError, Checkpoints, verify
from tests.support.daemons import program

# Commits one checkpoint after another, at first its newest once more as a restarted node does, and tells its parent.
WRITER = """
import sys
from pathlib import Path
from ftis_node.store.checkpoints import Checkpoints

store = Checkpoints(Path(sys.argv[1]))
found = store.latest()
step = found[1]["step"] if found else 0
while True:
    print("writing", step, flush=True)
    directory = store.begin(step)
    for part in range(3):
        (directory / f"part-{part}").write_bytes(f"{step} {part}".encode() * 4000)
    store.commit(directory, {"step": step})
    print("written", step, flush=True)
    step += 1
"""


def write(store, step, *, branch=1):
    directory = store.begin(step)
    (directory / "weights").write_bytes(bytes([step % 256]) * 1000)
    (directory / "optimiser").write_bytes(bytes([step % 256]) * 2000)
    return store.commit(directory, {"step": step} if branch == 1 else {"step": step, "branch": branch})


def stored(path, *steps):
    """A store with a checkpoint of each step."""
    store = Checkpoints(path)
    for step in steps:
        write(store, step)
    return store


def newest(store):
    """The step from which a node goes on."""
    found = store.latest()
    return found and found[1]["step"]


def aside(store):
    return sorted(store.path.glob("*.damaged"))


def steps(path):
    return sorted(entry.name for entry in path.iterdir())


def test_the_newest_comes_back_with_its_facts_and_only_two_are_kept(tmp_path):
    stored(tmp_path, 1, 2, 30, 100_000_000)
    assert Checkpoints(tmp_path).latest() == (tmp_path / "step-100000000", {"step": 100_000_000})
    assert steps(tmp_path) == ["step-00000030", "step-100000000"]
    assert len(steps(tmp_path)) == CHECKPOINTS_KEPT


def test_a_checkpoint_of_the_same_step_replaces_the_first(tmp_path):
    store = stored(tmp_path, 4)
    store.commit(store.begin(4), {"step": 4, "again": True})
    assert store.latest() == (tmp_path / "step-00000004", {"step": 4, "again": True})
    assert steps(tmp_path) == ["step-00000004"]


def test_one_killed_while_replacing_its_step_leaves_the_first(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    store = stored(tmp_path, 4)
    rename = Path.rename

    def die_at_the_second(path, target):
        if path.suffix == ".partial":
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", die_at_the_second)
        write(store, 4)
    assert Checkpoints(tmp_path).latest() == (tmp_path / "step-00000004", {"step": 4})
    assert steps(tmp_path) == ["step-00000004"]


def test_what_a_killed_writer_left_is_cleared(tmp_path):
    store = Checkpoints(tmp_path)
    assert store.latest() is None, "there is none at first"
    for _ in range(2):
        directory = store.begin(7)
        assert not list(directory.iterdir())
        (directory / "weights").write_bytes(b"half")
    assert steps(tmp_path) == ["step-00000007.partial"]
    assert Checkpoints(tmp_path).latest() is None
    assert steps(tmp_path) == []


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["weights", "optimiser", "checkpoint.json"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["flipped", "cut", "missing"])
def test_a_damaged_one_gives_way_to_the_one_before(tmp_path, damage, name):
    store = stored(tmp_path, 1)
    damaged = write(store, 2)
    damage(damaged / name)
    with pytest.raises(CheckpointError):
        verify(damaged)
    assert aside(store) == []
    assert store.latest() == (tmp_path / "step-00000001", {"step": 1})
    assert aside(store) == [tmp_path / "step-00000002.damaged"]
    write(store, 2)
    assert store.latest() == (tmp_path / "step-00000002", {"step": 2})


def test_with_all_damaged_there_is_none_and_nothing_is_deleted(tmp_path):
    store = Checkpoints(tmp_path)
    for step in (1, 2):
        cut(write(store, step) / "weights")
    assert store.latest() is None
    assert len(aside(store)) == 2


MANIFESTS = ["[]", "5", "{}", '{"schema": 1, "files": "x", "facts": {}}', '{"schema": "x", "files": {}, "facts": {}}']


@pytest.mark.parametrize("manifest", [*MANIFESTS, "\udcff"])
def test_a_manifest_may_be_anything(tmp_path, manifest):
    directory = write(Checkpoints(tmp_path), 1)
    (directory / "checkpoint.json").write_bytes(manifest.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError):
        verify(directory)


def test_a_doubted_one_comes_back_when_it_was_not_to_blame_and_a_diverged_one_does_not(tmp_path):
    store = stored(tmp_path, 1, 2)
    store.set_aside(1, "doubted")
    assert newest(store) == 1
    store.set_aside(1, "doubted")
    assert store.take_back()
    assert newest(store) == 2
    store.set_aside(1, "doubted")
    assert newest(Checkpoints(tmp_path)) == 2, "another process tries it first"
    store.set_aside(1)
    assert not store.take_back()
    assert newest(Checkpoints(tmp_path)) == 1
    store.set_aside(1)
    assert list(tmp_path.glob("*.diverged")), "it is kept until another takes its place"


def test_a_doubted_one_does_not_come_back_over_newer_training(tmp_path):
    store = stored(tmp_path, 50, 100)
    store.set_aside(50, "doubted")
    write(store, 60, branch=2)  # the training went on from 50
    assert not store.take_back(), "a step from the older one succeeded: the doubt was right"
    assert newest(Checkpoints(tmp_path)) == 60
    assert steps(tmp_path) == ["step-00000050", "step-00000060"]


def test_a_kill_between_the_new_ones_name_and_the_olds_end(tmp_path, monkeypatch):
    store = stored(tmp_path, 50, 100)
    store.set_aside(50, "doubted")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # the process ends before any directory goes
        write(store, 60, branch=2)
    assert "step-00000100.doubted" in steps(tmp_path)
    assert newest(Checkpoints(tmp_path)) == 60


def test_kill_nine_at_any_moment_loses_only_the_step_that_was_being_written(tmp_path):
    rng = random.Random(0)
    newest = interrupted = 0
    for _ in range(30):
        child = program(WRITER, tmp_path)
        lines = [child.stdout.readline()]
        began = time.monotonic()
        lines += [child.stdout.readline(), child.stdout.readline()]  # one is written, the next one begun
        time.sleep(rng.uniform(0, time.monotonic() - began))
        child.kill()
        lines += child.stdout.read().splitlines(keepends=True)
        child.wait()
        child.stdout.close()
        events = [line.split() for line in lines if line.endswith("\n")]  # the kill may cut the last one
        begun = max(int(step) for word, step in events if word == "writing")
        written = max([newest, *(int(step) for word, step in events if word == "written")])
        interrupted += events[-1][0] == "writing"

        store = Checkpoints(tmp_path)
        found = store.latest()
        assert aside(store) == []
        assert found is not None
        directory, facts = found
        newest = facts["step"]
        assert newest in (written, begun)
        assert verify(directory) == facts
        assert (directory / "part-2").read_bytes() == f"{newest} 2".encode() * 4000
    assert interrupted > 5, "the kills never met a writer at work"
