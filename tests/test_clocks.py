"""Clocks that are off, set, or asleep: a node says so, and loses nothing of its own."""

import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from ftis_node.host.clocks import boot_seconds
from ftis_node.node.condition import CLOCK_FAR, CLOCK_SHOWN, Signs, State, condition
from ftis_node.preflight.net import of_a_running_node
from ftis_node.step_report import ClockDifference
from ftis_node.store.packets import PACKET_BYTES, SEEN_SECONDS, PacketStore
from ftis_node.swarm import ftis_pb2, sessions
from ftis_node.swarm.handshake import greeting
from ftis_node.swarm.sessions import LATEST, Sessions
from tests.support.statuses import JOINING, answered
from tests.support.swarm import RUN, announcement, group, identity, member, packet
from tests.support.talkers import entry

ALICE = identity(1)
BOB = identity(2)
HOUR = 3600.0


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A wall clock that may be set, and one that may not."""
    clock = SimpleNamespace(time=1.8e9, passed=1000.0)
    monkeypatch.setattr(sessions, "unix_seconds", lambda: clock.time)
    monkeypatch.setattr(sessions, "boot_seconds", lambda: clock.passed)
    return clock


# --- between peers ----------------------------------------------------------------------------------------------------


def test_row_42_a_clock_four_hours_off_degrades_a_node_and_says_what_to_do():
    found = condition(Signs(peers=4, clock=ClockDifference(4 * HOUR, 4), replayed=7))
    assert found.state == State.DEGRADED
    assert "This node's clock is 4 h 0 min behind those of its 4 peers" in found.reason
    assert "7 announcements refused" in found.reason
    assert "timedatectl" in found.advice


def test_row_42_with_few_peers_nobody_can_say_whose_clock_is_wrong():
    found = condition(Signs(peers=1, clock=ClockDifference(-4 * HOUR, 1)))
    assert found.state == State.DEGRADED
    assert "ahead of that of 1 peer: it or theirs is wrong" in found.reason


@pytest.mark.parametrize(
    ("behind", "told"),
    [
        (CLOCK_SHOWN - 1, False),
        (CLOCK_SHOWN, True),
        (-CLOCK_FAR + 1, True),
    ],
)
def test_row_42_some_minutes_are_told_and_change_no_state(behind, told):
    found = condition(Signs(peers=3, clock=ClockDifference(behind, 3)))
    assert found.state == State.ONLINE
    assert ("clock" in found.reason, bool(found.advice)) == (told, told)


def test_row_42_one_liar_makes_no_difference(clock):
    peers = Sessions()
    for number, told in enumerate([clock.time, clock.time + 3, clock.time + 9 * HOUR]):
        peers[bytes([number])].note_time(told)
    assert peers.clock_difference(peers) == ClockDifference(3.0, 3)
    assert peers.clock_difference([b"\1", b"\2"]) == ClockDifference(3.0, 2), "of two the one that agrees more"
    assert peers.clock_difference([b"nobody"]) is None


def test_row_42_a_clock_that_is_set_right_is_right_at_once(clock):
    peers = Sessions()
    peers[b"a"].note_time(clock.time + 4 * HOUR)
    clock.time = clock.time + 60.0
    clock.passed = clock.passed + 60.0
    assert peers.clock_difference([b"a"]) == ClockDifference(4 * HOUR, 1)
    clock.time += 4 * HOUR
    assert peers.clock_difference([b"a"]) == ClockDifference(0.0, 1)


def test_row_42_what_is_no_time_says_nothing():
    peers = Sessions()
    for told in (0, LATEST, 2**64 - 1, -1.0, float("nan")):
        peers[b"a"].note_time(told)
        assert peers.clock_difference([b"a"]) is None


def test_row_42_a_handshake_says_the_time_and_one_without_it_is_taken():
    assert abs(greeting(RUN, []).time - time.time()) < 60
    assert ftis_pb2.Handshake.FromString(b"").time == 0


async def test_row_42_two_nodes_learn_that_their_clocks_differ(tmp_path, monkeypatch):
    real = time.time
    async with member(1, tmp_path) as alice:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: real() + 4 * HOUR)
            hello = greeting(RUN, [])
        known = alice.swarm.membership
        known.on_handshake(hello, BOB.author)
        found = known.sessions.clock_difference(known.active_view)
        assert found.peers == 1
        assert abs(found.behind - 4 * HOUR) < 60
        mended = announcement(BOB, 0, [packet(BOB.author, 0, 0)])
        await alice.swarm.on_exchange(ftis_pb2.ExchangeRequest(entries=[entry(mended)]), BOB.author)
        found = known.sessions.clock_difference(known.active_view)
        assert abs(found.behind) < 60, "its next announcement says that it was set right"


def test_row_42_the_doctor_tells_the_difference():
    for behind, verdict in (
        (1.0, "ok"),
        (-600.0, "warn"),
        (4 * HOUR, "fail"),
    ):
        network = JOINING["network"] | {"clock": {"behind": behind, "peers": 3}}
        (found,) = (one for one in of_a_running_node(answered(peers=3, network=network)) if one.subject == "clock")
        assert found.verdict == verdict


# --- sleep ------------------------------------------------------------------------------------------------------------


def test_row_42_ages_are_told_by_the_clock_that_counts_sleep():
    assert abs(boot_seconds() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60


def test_row_42_without_that_clock_ages_stop_in_sleep_and_nothing_fails():
    code = "import time; del time.CLOCK_BOOTTIME; from ftis_node.host.clocks import boot_seconds; "
    code += "assert abs(boot_seconds() - time.monotonic()) < 60"
    subprocess.run([sys.executable, "-c", code], check=True)


SLEPT = """
import time
from ftis_node.host.clocks import boot_seconds
print(boot_seconds() - time.monotonic())
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a time namespace needs root")
def test_row_42_in_a_machine_that_slept_for_a_night_everything_is_a_night_older():
    command = ["unshare", "--time", "--boottime", "28800", sys.executable, "-c", SLEPT]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no time namespace here: {done.stderr.strip()}")
    assert abs(float(done.stdout) - (boot_seconds() - time.monotonic()) - 28800) < 60


@pytest.mark.virtual_time
async def test_row_42_the_parts_of_a_node_age_by_that_clock(tmp_path, monkeypatch):
    async with member(1, tmp_path) as alice:
        alice.swarm.membership.on_handshake(greeting(RUN, []), BOB.author)
        assert abs(alice.swarm.membership.active_view[BOB.author].seen - boot_seconds()) < 60
        assert alice.swarm.gossip.table.clock is boot_seconds


# --- clocks that are set ----------------------------------------------------------------------------------------------


def stored(path, quota=1 << 30):
    return PacketStore(path / "store.sqlite", RUN.id, quota, clock=lambda: 0)


def set_clock(monkeypatch, by):
    real = time.clock_gettime
    monkeypatch.setattr(time, "time", lambda: real(time.CLOCK_REALTIME) + by)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "by",
    [
        -4 * HOUR,
        4 * HOUR,
        -30 * 365 * 24 * HOUR,
        30 * 365 * 24 * HOUR,
    ],
)
def test_row_42_after_the_clock_was_set_a_full_store_still_drops_its_oldest_first(by, restart, tmp_path, monkeypatch):
    made = [group(ALICE.author, packet(ALICE.author, n, 0)) for n in range(6)]
    quota = 3 * (PACKET_BYTES + max(len(one.data) for one in made))
    store = stored(tmp_path, quota)
    for one in made[:3]:
        store.add([one], own=True)
    set_clock(monkeypatch, by)
    if restart:
        store.close()
        store = stored(tmp_path, quota)
    for one in made[3:]:
        store.add([one], own=True)
        assert store.holds(one.digest), "the newest of its own was lost"
    assert not store.holds(made[0].digest)
    store.close()


def test_row_42_a_clock_that_jumps_and_returns_forgets_no_key(tmp_path, monkeypatch):
    store = stored(tmp_path)
    store.settle([(ALICE.author, 0, 0)], "trained")
    set_clock(monkeypatch, 10 * SEEN_SECONDS)
    for slot in range(1, 4):
        store.settle([(ALICE.author, 0, slot)], "trained")
    assert store.seen(ALICE.author, 0, 0), "it could be trained on again"
    store.close()


@pytest.mark.parametrize("by", [-4 * HOUR, 4 * HOUR])
def test_row_42_groups_are_found_whatever_the_clock(by, tmp_path, monkeypatch):
    body = packet(ALICE.author, 0, 0)
    store = stored(tmp_path)
    store.add([group(ALICE.author, body)], own=False)
    set_clock(monkeypatch, by)
    [(_, _, held)] = store.waiting(600.0)
    assert 0.0 <= held < 60
    store.close()
