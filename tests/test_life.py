"""What an owner does with a running node: into the background, look at it, pause, resume, finish."""

import asyncio
import json
import socket
from collections.abc import Iterator

import psutil
import pytest
import uvloop

from ftis_node.config.settings import collect
from ftis_node.errors import UserError
from ftis_node.node.condition import State
from ftis_node.node.daemon import Node
from ftis_node.node.options import JoinOptions
from ftis_node.observe.metrics import read_events
from ftis_node.store.checkpoints import newest_facts
from ftis_node.store.home import Home
from ftis_node.swarm.identity import Identity
from tests.support.cli import answer, printed, refused
from tests.support.daemons import STILL, Daemon, gone, run_cli, until

PLACE = ("--host", "127.0.0.1")


@pytest.fixture
def node(tmp_path) -> Iterator[Daemon]:
    """A home; whatever a failed test left running on it is ended."""
    daemon = Daemon(tmp_path / "node")
    yield daemon
    daemon.clean_up()
    runtime = daemon.home.runtime()
    if runtime is not None and psutil.pid_exists(runtime.pid):
        for process in [*psutil.Process(runtime.pid).children(recursive=True), psutil.Process(runtime.pid)]:
            process.kill()


def test_a_node_that_is_to_finish_before_it_has_anything_to_lose_ends_at_once(tmp_path):
    node = Node(JoinOptions(Home(tmp_path)), lambda task: collect(task=task, flags={"model": "tiny-a"})[0])
    with pytest.raises(UserError, match="still starting"):
        asyncio.run(node.change({"wait": "3"}))
    node.finish()
    assert node.condition().state is State.STOPPING
    assert uvloop.run(node.run()) == 0


def test_a_node_in_the_background_says_which_named_peer_does_not_answer(node):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: a peer that is dead
        dead = f"/ip4/127.0.0.1/tcp/{nobody.getsockname()[1]}/p2p/{Identity(bytes(32)).peer_id}"
        begun = run_cli(
            "join",
            "--detach",
            "--home",
            str(node.home.path),
            *PLACE,
            *STILL,
            "--model",
            "tiny-a",
            "--peers",
            dead,
            "--set",
            "patience=3",
        )
    assert begun.returncode == 1
    assert "None of the peers gave their run" in begun.stderr
    told = begun.stderr.partition("error: ")[0].splitlines()
    assert any("Asking the peers for their run" in line for line in told), told
    assert any(line.startswith(dead) and "it is asked again" in line for line in told), told


def test_a_node_in_the_background_is_paused_resumed_and_finished(node):
    home = ("--home", str(node.home.path))
    begun = run_cli("join", "--detach", *home, *PLACE, *STILL, "--model", "tiny-a", "--nice", "12")
    assert begun.returncode == 0, begun.stderr
    assert "What leaves this machine" in begun.stderr
    assert "starting" in begun.stderr or "Loading tiny-a." in begun.stderr, "each is said only if it lasts"
    assert "ftis-node stop" in begun.stdout
    record = node.home.runtime()
    assert str(record.pid) in begun.stdout
    daemon = psutil.Process(record.pid)
    priorities = sorted(child.nice() for child in daemon.children())
    assert daemon.nice() < 12 and priorities[-1] == 12, "what samples and trains gives way"
    assert priorities[:-1] == [daemon.nice()], "and p2pd does not, so that peers are answered at once"
    logged = (node.home.path / "output.log").read_bytes()
    again = run_cli("join", "--detach", *home, *PLACE)
    assert (node.home.path / "output.log").read_bytes().startswith(logged), "it is the running one's"
    assert again.returncode == 1
    assert "Another ftis-node daemon is running" in again.stderr

    told = answer("set", "threshold=2.5", "wait=3", "own_share=default", *home)
    assert told == {"threshold": 2.5, "wait": 3.0, "own_share": None}
    assert "cannot be changed while the node runs" in refused("set", "model=tiny-b", *home).what

    until(lambda: node.status().get("step"), "a first step")
    assert answer("save", *home)["step"]
    before = node.status()["step"]
    exported = run_cli("export", "--checkpoint", str(node.home.path), "--to", str(node.home.path / "out"), "--json")
    assert exported.returncode == 0, exported.stderr
    assert "The running node saves first" in exported.stderr
    assert json.loads(exported.stdout)["step"] >= before

    until(lambda: read_events(node.home.metrics, "changed"), "the change, before a step")  # a pause may come first
    family = daemon.children()
    assert answer("pause", "--wait", *home) == {"state": "PAUSED", "pausing": True, "finishing": False}
    status = node.status()
    assert "Paused at step" in status["reason"]
    assert "resume" in status["advice"]
    step = status["step"]
    facts = newest_facts(node.home.checkpoints)
    assert facts["progress"]["step"] == step
    left = daemon.children()
    assert len(left) == 1 and left[0].name() == "p2pd", "the compute process and its memory are gone"
    gone([child for child in family if child not in left])

    assert "threshold = none" in printed("set", "threshold=none", *home)
    resumed = answer("resume", "--wait", *home)
    assert resumed["state"] not in ("PAUSED", "LOADING") and not resumed["pausing"], "it trains again"
    assert "tiny-a (full, float32)" in printed("status", *home)
    node.process = None
    until(lambda: node.status().get("step", 0) >= step + 2, "steps after the pause")
    assert "ended" in printed("finish", "--wait", *home)
    gone([daemon])
    last = read_events(node.home.metrics, "step")[-1]["step"]
    facts = newest_facts(node.home.checkpoints)
    assert facts["progress"]["step"] == last >= step + 2
    changes = [event["settings"] for event in read_events(node.home.metrics, "changed")]
    assert changes == [{"threshold": 2.5}, {"threshold": "none"}]
    assert answer("lab", "replay", node.home.path)["identical"]
    assert "Traceback" not in node.home.log.read_text()
    assert "No ftis-node daemon is running" in refused("pause", *home).what


@pytest.mark.slow
def test_a_bootstrap_trains_nothing_and_goes_on(node, tmp_path, monkeypatch):
    home = ("--home", str(node.home.path))
    peer_id = run_cli("keys", "new", *home).stdout.strip()
    assert json.loads(run_cli("keys", "new", "--json", *home).stdout)["id"] == peer_id, "a key that is there is kept"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
        monkeypatch.setenv("WATCHDOG_USEC", "400000")
        node.flags = ("--model", "tiny-a", "--paused")
        node.start()
        heard = ""
        while "STATUS=PAUSED: Paused at step 0" not in heard:
            heard = manager.recv(4096).decode()
            assert heard == "READY=1" or heard.endswith("\nWATCHDOG=1"), heard
    status = node.status()
    assert status["addresses"][0].endswith(peer_id)
    assert status["step"] == 0
    assert not status["stalled"]
    assert [child.name() for child in node.pids()[1:]] == ["p2pd"], "no compute process"
    health = run_cli("health", *home)
    assert health.returncode == 0
    assert health.stdout.partition(":")[0] == "PAUSED"
    assert node.stop() == 0
    assert run_cli("health", *home).returncode == 1


def test_what_keeps_a_background_node_from_starting_is_said_at_once(node, tmp_path):
    away = tmp_path / "questions.jsonl"
    begun = run_cli("join", "--detach", "--home", str(node.home.path), *PLACE, "--model", "tiny-a", "--task", str(away))
    assert begun.returncode == 2
    assert begun.stderr.splitlines()[-2] == f"error: Cannot read {away}: No such file or directory."
