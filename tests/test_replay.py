"""Replaying what daemons did: the same weights bit for bit, through a kill and a restart; and what is told if not."""

import asyncio
import gzip
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from typer.testing import CliRunner

from ftis_node.cli import app
from ftis_node.config.run import RunFile, dump_run_file
from ftis_node.errors import UsageError, UserError
from ftis_node.lab.compute import InProcess
from ftis_node.lab.replaying.lineage import lineage
from ftis_node.lab.replaying.replay import replay
from ftis_node.learner.learner import BAD_STEPS
from ftis_node.node.checkpointing import Saving
from ftis_node.observe.metrics import MetricsLog, read_events
from ftis_node.observe.provenance import versions
from ftis_node.store.checkpoints import complete
from ftis_node.store.home import Home
from ftis_node.swarm.admission import AdmissionContext
from ftis_node.worker.engine import Engine
from tests.support.cli import answer
from tests.support.daemons import Daemon
from tests.support.small_models import arithmetic_run, arithmetic_settings
from tests.support.steppers import stepper
from tests.support.steps import MACHINE, restored, resumed, started, took

SMALL = ("--set", "batch_groups=6", "--set", "eval_prompts=20", "--set", "learning_rate=3e-4", "--set", "wait=5")
Homes = dict[str, Path]
pytestmark = pytest.mark.timeout(1200)  # two daemons, and what they did once more, on a busy machine


@pytest.fixture(scope="module")
def homes(tmp_path_factory) -> Homes:
    """Two nodes that learned from one another; one was killed on the way, went on, and was killed again."""
    base = tmp_path_factory.mktemp("swarm")
    stopped = Daemon(base / "stopped", "--model", "tiny-a", "--set", "min_peers=1", *SMALL)
    killed = Daemon(base / "killed", "--model", "tiny-c", "--lora", *SMALL)
    try:
        stopped.start()
        killed.flags += ("--peers", stopped.address(), "--set", "weight_decay=0.1", "--set", "checkpoint_minutes=60")
        killed.start().wait(lambda s: s.get("step", 0) >= 3 and s["foreign_groups_used"], "it learns from the other")
        stopped.wait(lambda s: s["step"] >= 6 and s["foreign_groups_used"], "the other learns from it")
        killed.kill()
        [worker] = [process for process in stopped.pids() if "ftis_node.worker" in process.cmdline()]
        worker.suspend()  # or the restart would take twice as long on a single core
        # A person may have other wishes at each start: the first one loses the steps since its last checkpoint.
        killed.flags += ("--set", "weight_decay=0.0", "--set", "checkpoint_minutes=0")
        killed.start().reaches(6, "it goes on")
        killed.wait(lambda s: newest_checkpoint(killed.home) >= 5, "a step is saved beside the next ones")
        with pytest.raises(UsageError, match="A daemon is running") as refused:
            replay(killed.home.path)
        assert "ftis-node stop" in refused.value.fix
        killed.kill()
        worker.resume()
        assert stopped.stop() == 0
    finally:
        for daemon in (stopped, killed):
            daemon.clean_up()
    return {"stopped": stopped.home.path, "killed": killed.home.path}


@pytest.fixture
def copy(homes, tmp_path) -> Path:
    """A copy of the killed node's home, to be tampered with."""
    return Path(shutil.copytree(homes["killed"], tmp_path / "copy"))


def newest_checkpoint(home):
    """Its step; 0 if there is none."""
    names = [directory.name for directory in complete(home.checkpoints)]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def contents(home):
    """Every file with its time and its hash."""
    return {
        str(file.relative_to(home)): (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in home.rglob("*")
        if file.is_file()
    }


def edit(home, change):
    """Puts another line in place of each line of the log, or none."""
    log = home / "metrics.jsonl"
    lines = [change(json.loads(line)) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


def of(event, change, step=None):
    """The change of the lines of an event, of one step or of all."""
    return lambda line: change(line) if line["event"] == event and step in (None, line["step"]) else line


def test_a_daemons_training_comes_out_again_bit_for_bit(homes):
    home = homes["killed"]
    before = contents(home)
    report = answer("lab", "replay", home)
    assert report["identical"]
    assert set(report["max_differences"].values()) == {0.0}
    assert report["foreign_packets"] > 0
    assert report["steps"] >= 6
    saved = report["checkpoints"]
    assert saved[-1]["step"] >= 5
    assert all(entry["identical"] for entry in saved)
    assert report["void_steps"] >= 2, "what the first kill cost"
    assert contents(home) == before, "the home is only read, also with SQLite's log of a killed daemon in it"


def test_a_log_in_parts_is_replayed_like_one_file(copy):
    log = copy / "metrics.jsonl"
    events = read_events(log)
    lines = log.read_bytes().splitlines(keepends=True)
    for number, some in enumerate((lines[:3], lines[3:5]), start=1):
        (copy / f"metrics-{number:08d}.jsonl.gz").write_bytes(gzip.compress(b"".join(some)))
    log.write_bytes(b"".join(lines[5:]))
    assert replay(copy)["identical"]
    log.rename(copy / "metrics-00000003.jsonl")  # where a kill came before the next file was begun
    assert read_events(log) == events


def test_a_restart_is_in_the_log_with_its_settings(homes):
    log = homes["killed"] / "metrics.jsonl"
    first, second = read_events(log, "started")
    assert first["fresh"] is True
    assert second["fresh"] is False
    assert second["step"] >= 1
    assert [start["settings"]["weight_decay"] for start in (first, second)] == [0.1, 0.0]
    assert first["settings"]["lora"] is True
    assert first["threads"] == 1
    assert first["device"] == "cpu"
    assert {"python", "torch", "transformers", "peft", "ftis-node"} <= set(first["versions"])
    step = read_events(log, "step")[0]
    own = step["batch"]["own"]
    foreign = step["batch"]["foreign"]
    assert len(own) == step["own_groups"]
    assert len(foreign) == step["foreign_groups"]
    assert len(json.dumps(step["batch"])) < 100 * len(own + foreign)


def test_row_7_groups_of_steps_that_a_kill_took_are_not_trained_on_again(homes):
    steps = read_events(homes["killed"] / "metrics.jsonl", "step")
    foreign = [digest for step in steps for digest in step["batch"]["foreign"]]
    assert foreign
    assert len(foreign) == len(set(foreign))


def test_a_figure_that_does_not_come_out_is_told_with_its_step(copy):
    edit(copy, of("step", lambda line: line | {"loss": line["loss"] + 0.5}, 2))
    shutil.rmtree(copy / "checkpoints")
    ended = CliRunner().invoke(app, ["lab", "replay", str(copy)])
    assert ended.exit_code == 1
    for told in ("Not identical", "at step 2: loss", "0.5", "checkpoints is on disk"):
        assert told in ended.stdout


def test_the_log_of_another_version_is_taken_up_and_that_is_told(copy):
    """Of one that left groups out of a step, which count in its mean reward, and could weigh authors, and did not."""
    first = read_events(copy / "metrics.jsonl", "step")[0]

    def left_out(line):
        rewards = sum(one["own_groups"] * one["own_reward"] for one in (first, line))
        mean = rewards / (first["own_groups"] + line["own_groups"])
        return line | {"batch": line["batch"] | {"replaced": first["batch"]["own"]}, "own_reward": mean}

    def begun_earlier(line):
        settings = line["settings"] | {"author_weight": "equal"}
        return line | {"versions": {"torch": "2.0.0", "python": "3"}, "settings": settings}

    edit(copy, of("step", left_out, 2))
    edit(copy, of("started", begun_earlier))
    report = replay(copy)
    sizes = report["max_differences"]
    assert sizes.pop("own_reward") < 1e-9
    assert set(sizes.values()) == {0.0}
    assert report["other_versions"]["torch"][0] == "2.0.0"
    assert "torch was 2.0.0" in " ".join(report["notes"])


def test_a_batch_in_another_order_is_seen_in_the_weights(copy):
    def reversed_batch(line):
        batch = {name: made[::-1] for name, made in line["batch"].items()}
        return line | {"batch": batch}

    edit(copy, of("step", reversed_batch))
    report = replay(copy)
    assert not report["identical"]
    assert report["checkpoints"][0]["max_difference"] > 0


def sql(home, statement, *values):
    """Change the node's store."""
    with closing(sqlite3.connect(home / "store.sqlite")) as database, database:
        database.execute(statement, values)


def without_packets_of(home, step):
    lines = [line for line in read_events(home / "metrics.jsonl", "step") if line["step"] == step]
    digest = bytes.fromhex(lines[-1]["batch"]["own"][0])
    sql(home, "DELETE FROM packets WHERE digest = ?", digest)


def test_a_packet_that_was_evicted_ends_the_replay_before_its_step(copy):
    without_packets_of(copy, 4)
    with pytest.raises(UserError, match=r"Step 4 cannot be replayed: 1 of its 6 packets") as told:
        replay(copy)
    assert "The 3 steps before it were replayed and agree" in told.value.fix
    assert "packet_quota_mb" in told.value.fix
    without_packets_of(copy, 1)
    with pytest.raises(UserError, match="Step 1 cannot be replayed"):
        replay(copy)


def test_a_packet_that_was_altered_is_not_trained_on(copy):
    sql(copy, "UPDATE packets SET body = CAST(substr(body, 1, length(body) - 1) || x'00' AS BLOB)")
    with pytest.raises(UserError, match="is damaged: "):
        replay(copy)


def no_hex(line):
    return line | {"batch": {"own": ["no hex"], "foreign": []}}


def of_another_run(line):
    if line["step"]:  # a later start
        line["run"] = "00" * 16
    return line


@pytest.mark.parametrize(
    ("event", "step", "change", "why"),
    [
        ("step", 2, no_hex, "of step 2 cannot be"),
        ("step", 2, lambda line: None, "for step 2"),
        ("started", None, of_another_run, "of another run than the log"),
    ],
)
def test_a_log_that_cannot_be_followed_says_where(event, step, change, why, copy):
    edit(copy, of(event, change, step))
    with pytest.raises(UserError, match=why):
        replay(copy)


def test_what_is_not_what_it_was_is_refused(copy, monkeypatch):
    load = Engine.load
    monkeypatch.setattr(Engine, "load", lambda *args, **more: replace(load(*args, **more), tokenizer="another"))
    with pytest.raises(UserError, match="not what they were"):
        replay(copy)
    run_file = copy / "run.toml"
    run_file.write_text(run_file.read_text().replace("slots = 32", "slots = 31"))
    with pytest.raises(UserError, match="of another run than the log"):
        replay(copy)


def test_ctrl_c_ends_it_with_130(homes, monkeypatch):
    monkeypatch.setattr(Engine, "step", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    ended = CliRunner().invoke(app, ["lab", "replay", str(homes["stopped"]), "--json"])
    assert ended.exit_code == 130
    assert ended.stdout == ""


async def train_here(home, bad_steps, task="arithmetic"):
    """A node alone, without its processes: a step for each number of bad steps in a row that is told of it."""
    home.open()
    engine = Engine()
    loaded = engine.load(arithmetic_settings(batch_groups=4), task, code=True)
    run = arithmetic_run(loaded)
    context = AdmissionContext(run=run, prompt_digests=engine.open(run).prompt_digests)
    home.run_file.write_text(dump_run_file(RunFile(run=run)))
    log = MetricsLog(home.metrics)
    settings = loaded.settings.model_dump(mode="json")
    told = {
        "run": run.id.hex(),
        "settings": settings,
        "versions": versions(),
        "task": task,
    }
    log.write("started", step=0, fresh=True, **MACHINE | told)
    worker = InProcess(engine)
    node = stepper(home.path, 0, context=context, run=run, worker=worker, **settings)
    saving = Saving(home.checkpoints, {"model": "tiny-a (full)"}, log, 0)
    for bad in bad_steps:
        taken = await node.step(asyncio.Event())
        log.write("step", **taken.row())
        await saving.after_step(worker, node.progress, replace(taken.report, bad_steps=bad, diverged=bad == BAD_STEPS))
    await saving.flush()
    engine.close()
    log.close()
    node.means.store.close()
    home.close()


async def test_a_return_to_older_weights_is_followed_and_the_count_of_steps_goes_on(tmp_path):
    home = Home(tmp_path / "home")
    await train_here(home, (0, 0, BAD_STEPS, 0))
    report = replay(home.path)
    [restored] = read_events(home.metrics, "restored")
    assert restored["weights_of_step"] == 1
    assert report["steps"] == 2
    assert report["last_step"] == 4
    assert report["void_steps"] == 2
    assert report["identical"]
    assert [entry["step"] for entry in report["checkpoints"]] == [1, 4]


async def test_each_step_is_taken_again_with_its_own_threads(tmp_path, monkeypatch):
    """On a busy machine a node takes fewer; earlier versions kept those of their start."""
    home = Home(tmp_path / "home")
    await train_here(home, (0, 0))
    edit(home.path, of("step", lambda line: line | {"threads": None}, 1))
    edit(home.path, of("step", lambda line: line | {"threads": 2}, 2))
    used = []
    taken = Engine.step

    def watched(*args, **more):
        used.append(torch.get_num_threads())
        return taken(*args, **more)

    monkeypatch.setattr(Engine, "step", watched)
    replay(home.path)
    assert used == [1, 2]


# --- which steps count ------------------------------------------------------------------------------------------------


BEGUN = [started(fresh=True)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([*BEGUN, *took(1, 2)], [(1, ""), (2, "")], id="straight on"),
        pytest.param(
            [*BEGUN, *took(1, 2, 3), resumed(2), started(2), *took(3, 4, mark="aa")],
            [(1, ""), (2, ""), (3, "aa"), (4, "aa")],
            id="a restart takes back what was not saved",
        ),
        pytest.param(
            [*BEGUN, *took(1, 2, 3, 4, 5, 6), restored(6, 1), *took(7, mark="aa")],
            [(1, ""), (7, "aa")],
            id="older weights come back, the count goes on",
        ),
        pytest.param(
            [*BEGUN, *took(1, 2, 3), restored(3, 1), *took(4, 5), resumed(4), started(4), *took(5, mark="aa")],
            [(1, ""), (4, ""), (5, "aa")],
            id="both",
        ),
        pytest.param(
            [*BEGUN, *took(1, 2, 3), started(3, fresh=True), *took(4, mark="aa")], [(4, "aa")], id="nothing was saved"
        ),
        pytest.param([*took(1, 2), started(fresh=True), *took(1, mark="aa")], [(1, "aa")], id="an older log before it"),
        pytest.param([*BEGUN, *took(1, 3), resumed(1), *took(2)], [(1, ""), (2, "")], id="what lacks was lost anyway"),
    ],
)
def test_only_steps_that_led_here_are_taken(events, expected):
    line = lineage(events)
    taken = [(link.step, link.logged.batch.own[0]) for link in line.links if link.logged]
    assert taken == expected
    steps = [event for event in events if event["event"] == "step"]
    assert line.void == len(steps) - len(expected)


NO_BEGINNING = "kept no step log"


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([*took(1, 2)], NO_BEGINNING),
        ([*took(1, 2), resumed(2), started(2), *took(3)], NO_BEGINNING),
        ([*BEGUN, *[{k: v for k, v in line.items() if k != "batch"} for line in took(1)]], NO_BEGINNING),
        ([*BEGUN, *took(1, 3)], "no line for step 2"),
        ([*BEGUN, *took(1), resumed(2), started(2), *took(3)], "no line for step 2"),
        ([*BEGUN, *took(1, 2, 4), restored(4, 3), *took(5)], "no line for step 3"),
    ],
)
def test_a_log_that_lacks_its_beginning_or_a_line_is_refused(events, why):
    with pytest.raises(UserError, match=why):
        lineage(events)


PYTHON = """
from ftis_node.tasks import Score, make_task

def judge(text, answer):
    return Score(len(text) % 3 / 2, True, True)

def build():
    return make_task([(f"{i}+{i}=", str(2 * i)) for i in range(20)], reward=judge, template="{question}",
                     completion_tokens=16, prompt_tokens=16)
"""


async def test_a_task_in_python_is_replayed_by_who_names_it(tmp_path, monkeypatch):
    (tmp_path / "replayed_task.py").write_text(PYTHON)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    home = Home(tmp_path / "home")
    await train_here(home, (0, 0), "replayed_task:build")
    with pytest.raises(UsageError, match="only if the owner") as refused:
        replay(home.path)
    assert "--task and that name" in refused.value.fix
    with pytest.raises(UsageError, match="is replayed_task:build, not another:build"):
        replay(home.path, task="another:build")
    assert answer("lab", "replay", home.path, "--task", "replayed_task:build")["identical"]
    (tmp_path / "replayed_task.py").write_text(PYTHON.replace("% 3 / 2", "% 2"))
    monkeypatch.delitem(sys.modules, "replayed_task")
    with pytest.raises(UserError, match="data or the code of replayed_task:build, or"):
        replay(home.path, task="replayed_task:build")
