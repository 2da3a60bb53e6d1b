"""A real swarm of `ftis-node join` daemons on loopback: together, alone, killed, late, and back again."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from ftis_node.observe.metrics import read_events
from ftis_node.store.checkpoints import Checkpoints
from ftis_node.swarm.identity import Identity
from tests.support.cli import printed
from tests.support.daemons import PATIENCE, WHOLE, Daemon, gone, kind_of, run_cli
from tests.support.documented import check_daemon

EVERY_STEP = ("--set", "checkpoint_minutes=0")
# Nobody listens there; a connection is refused at once.
DEAD = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKAFkdZjAMAKaNHMycURaoRJDkJLfz2N7GFb4fDUZPfWV"


def peer_id(daemon):
    return Identity.load_or_create(daemon.home.key).peer_id


def compute_process(daemon):
    (found,) = (process for process in daemon.pids() if kind_of(process) == "compute")
    return found


def used(author, groups=1):
    """A condition: so many groups of `author` were trained on."""
    name = peer_id(author)
    return lambda status: status.get("foreign_groups_used", {}).get(name, 0) >= groups


@pytest.mark.slow
def test_three_daemons_survive_the_death_of_their_bootstrap_and_welcome_it_back(tmp_path, join):
    a = join("a", "--model", "tiny-a", "--name", "A", *EVERY_STEP, *WHOLE)
    address = a.address()
    a.wait(lambda s: s["state"] == "ALONE" and s.get("step", 0) >= 2, "A trains alone, and says so")
    b = join("b", "--model", "tiny-b", "--peers", address, *WHOLE)
    c = join("c", "--model", "tiny-c", "--lora", "--peers", f"{DEAD},{address}", *WHOLE)
    for one, others in ((a, (b, c)), (b, (a, c)), (c, (a, b))):
        for other in others:
            one.wait(used(other, 3), f"{one.home.path.name} trains on groups of {other.home.path.name}")
    assert a.status()["state"] == "ONLINE"
    assert a.status()["run"] == b.status()["run"] == c.status()["run"]

    step_at_death = a.status()["step"]
    gone(a.kill()[1:])  # its p2pd and its compute process go with it
    marks = {d: d.status() for d in (b, c)}
    for one, other in ((b, c), (c, b)):
        seen = marks[one]["foreign_groups_used"][peer_id(other)]
        one.wait(used(other, seen + 5), "the others go on with one another")
        assert one.status()["step"] > marks[one]["step"]

    d = join("d", "--model", "tiny-a", "--peers", f"{address},{b.address()}", *WHOLE)
    d.wait(used(c), "a late joiner that knows only B learns from C")
    c.wait(used(d), "and C from it")

    a.start()  # the same home and no --peers: it remembers whom it knew
    a.reaches(step_at_death + 1, "A goes on from its checkpoint")
    resumed = read_events(a.home.metrics, "resumed")[0]["step"]
    assert step_at_death - 1 <= resumed <= step_at_death + 1
    before = a.status()["foreign_groups_used"][peer_id(b)]
    a.wait(used(b, before + 1), "A learns from B again")
    check_daemon(a)
    assert a.log().count("What leaves this machine") == 1, "told at the first start, and only then"
    before = b.status()["foreign_groups_used"][peer_id(a)]
    b.wait(used(a, before + 1), "and B from A")

    for daemon in (a, b, c, d):
        assert daemon.stop() == 0
        assert daemon.home.runtime() is None, "no socket and no record is left behind"


def kill(worker):
    """As the kernel does when memory runs out."""
    worker.kill()


def forbid_writing(worker):
    """Its next checkpoint raises inside the compute process, which itself lives on."""
    worker.rlimit(psutil.RLIMIT_FSIZE, (64, 64))


@pytest.mark.parametrize("harm", [kill, pytest.param(forbid_writing, marks=pytest.mark.slow)])
def test_a_failed_compute_process_is_replaced(harm, join):
    node = join("node", "--model", "tiny-a", "--name", "my secret", *EVERY_STEP)
    step = node.reaches(3, "it trains")["step"]
    worker = compute_process(node)
    harm(worker)
    back = node.wait(lambda s: s["worker_restarts"] == 1 and s["state"] == "DEGRADED", "it is replaced")
    after = node.reaches(back["step"] + 2, "it goes on")
    assert after["state"] == "DEGRADED"
    assert "failed 1 time" in after["reason"]
    assert read_events(node.home.metrics, "resumed")[0]["step"] >= step - 1
    assert node.stop() == 0
    gone([worker])
    assert not list(node.home.checkpoints.glob("*.partial")), "what could not be written makes room"
    assert "secret" not in node.home.run_file.read_text(), "the run file is what others are given"


@pytest.fixture(scope="module")
def strangers(tmp_path_factory) -> Iterator[tuple[Daemon, Daemon]]:
    """Two daemons of different runs; the second was told the first one's address. Both have a process group."""
    base = tmp_path_factory.mktemp("strangers")
    run_file = base / "other.toml"
    printed("run", "new", "--group", "6", "-o", run_file)
    one = Daemon(base / "one", "--model", "tiny-a")
    other = Daemon(base / "other", "--model", "tiny-a", "--run", run_file)
    try:
        other.flags += ("--peers", one.start(new_group=True).address())
        yield one, other.start(new_group=True)
    finally:
        one.clean_up()
        other.clean_up()


def test_a_daemon_of_another_run_is_left_out_on_both_sides(strangers):
    for daemon in strangers:
        daemon.wait(lambda s, d=daemon: "left out" in d.log(), "it says that the peer is left out")
        step = daemon.status()["step"]
        daemon.wait(lambda s, step=step: s["state"] == "ALONE" and s["step"] > step + 2, "it goes on alone")
        assert "left out" in printed("peers", "--home", daemon.home.path)


# Each of the two tests below ends one of them.


def test_ctrl_c_in_a_terminal_reaches_the_whole_group_and_saves_the_last_step(strangers):
    node, _ = strangers
    node.reaches(2, "it trains")
    family = node.pids()
    os.killpg(node.process.pid, signal.SIGINT)
    assert node.process.wait(PATIENCE) == 130
    gone(family)
    assert "Traceback" not in node.log()
    last = read_events(node.home.metrics, "step")[-1]["step"]
    _, facts = Checkpoints(node.home.checkpoints).latest()
    assert facts["progress"]["step"] == last


def test_a_stop_does_not_wait_for_a_compute_process_that_does_not_answer(strangers):
    _, node = strangers
    node.reaches(2, "it trains")
    compute_process(node).suspend()
    assert node.stop() == 0
    log = node.log()  # it was asked in the middle of a step, or between two
    assert "its work is given up" in log or "The end was cut short (out of time)" in log
    assert Checkpoints(node.home.checkpoints).latest() is not None


@pytest.mark.slow
def test_a_home_that_trained_alone_does_not_join_another_run_by_mistake(tmp_path, join):
    alone = join("alone", "--model", "tiny-a", "--task", "arithmetic")
    alone.reaches(1, "it starts a run of its own")
    alone.stop()
    run_file = tmp_path / "other.toml"
    printed("run", "new", "--group", "6", "-o", run_file)
    other = join("other", "--model", "tiny-a", "--run", run_file)
    other.reaches(1, "another run is there")
    ended = run_cli("join", "--home", alone.home.path, "--host", "127.0.0.1", "--peers", other.address())
    assert ended.returncode == 2
    assert "another run" in ended.stderr
    assert "fresh --home" in ended.stderr
