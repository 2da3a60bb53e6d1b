"""The store never gives a round twice, never forgets a fate, and keeps within its quota."""

import random
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.errors import UserError
from ftis_node.packet import packet_digest
from ftis_node.store.packets import PACKET_BYTES, SEEN_BYTES, PacketStore
from tests.support.clock import Clock
from tests.support.daemons import program
from tests.support.swarm import OTHER_RUN, RUN, group, identity, packet, take_round

ALICE = identity(1).author
BOB = identity(2).author
ROOMY = 1 << 30
HOUR = 3_600_000  # in milliseconds

ROUND_TAKER = """
import sys
from pathlib import Path
from ftis_node.store.packets import PacketStore

store = PacketStore(Path(sys.argv[1]), bytes(16), 1 << 20)
while True:
    number = store.upcoming_round()
    store.take_round(number)
    print(number, flush=True)
"""


def opened(path, run_id=RUN.id, quota=ROOMY):
    return PacketStore(path / "store.sqlite", run_id, quota, clock=lambda: 0)


def made(author, round):
    return group(author, packet(author, round, 0))


def another(content, body):
    """A group with other bytes, which the store does not read."""
    return replace(content, digest=packet_digest(body), data=body)


def test_a_node_whose_store_was_lost_takes_no_round_a_second_time(tmp_path):
    lost, fresh = (PacketStore(tmp_path / name, RUN.id, ROOMY) for name in ("lost", "fresh"))
    taken = [take_round(lost) for _ in range(3)]
    assert take_round(PacketStore(tmp_path / "later", RUN.id, ROOMY)) >= taken[0]
    assert taken == list(range(taken[0], taken[0] + 3))
    assert take_round(fresh) > 1_700_000_000_000, "milliseconds since 1970"


def test_rounds_count_up_and_a_restart_but_no_first_start_leaves_one_out(tmp_path):
    store = opened(tmp_path)
    store.skip_round()
    assert [take_round(store) for _ in range(3)] == [0, 1, 2]
    store.close()
    store = opened(tmp_path)
    assert take_round(store) == 3
    store.skip_round()
    assert take_round(store) == 5


def test_kill_nine_never_makes_a_round_come_twice(tmp_path):
    rng = random.Random(1)
    taken = []
    for _ in range(8):
        with program(ROUND_TAKER, tmp_path / "store.sqlite") as child:
            for _ in range(rng.randint(1, 20)):
                taken.append(int(child.stdout.readline()))
            child.kill()
            taken += map(int, child.stdout.read().split())
    assert len(taken) > 8
    assert taken == sorted(set(taken))


def test_two_runs_in_one_home_do_not_mix(tmp_path):
    first = opened(tmp_path)
    second = opened(tmp_path, OTHER_RUN.id)
    first.add([made(ALICE, 0)], own=False)
    first.settle([(BOB, 1, 0)], "refused")
    take_round(first)
    assert take_round(second) == 0
    assert not second.seen(ALICE, 0, 0)
    assert not second.seen(BOB, 1, 0)
    assert second.waiting(60.0) == []


def test_what_was_stored_and_what_became_of_it_is_known_also_after_a_restart(tmp_path):
    store = opened(tmp_path)
    content = made(ALICE, 0)
    assert not store.holds(content.digest)
    assert store.body(content.digest) is None
    store.add([content], own=False)
    store.settle([(ALICE, 1, 5), (BOB, 2, 6)], "refused")
    store.close()
    store = opened(tmp_path)
    assert store.holds(content.digest)
    assert store.body(content.digest) == content.data
    for known in (content.key, (ALICE, 1, 5), (BOB, 2, 6)):
        assert store.seen(*known)
    for unknown in ((BOB, 0, 0), (ALICE, 0, 1), (ALICE, 5, 1)):
        assert not store.seen(*unknown)


@given(round=st.integers(0, 2**64 - 1), other=st.integers(0, 2**64 - 1), slot=st.integers(0, 2**32 - 1))
def test_a_round_may_be_any_number_that_can_be_signed(round, other, slot):
    store = PacketStore(Path(":memory:"), RUN.id, ROOMY, clock=lambda: 0)
    store.settle([(ALICE, round, slot)], "refused")
    store.add([made(BOB, round)], own=False)
    assert store.seen(ALICE, round, slot)
    assert store.seen(BOB, round, 0)
    assert store.seen(ALICE, other, slot) is (round == other)
    store.close()


@pytest.mark.parametrize(
    ("fate", "synced"),
    [
        ("trained", True),
        ("no-signal", False),
        ("refused", False),
    ],
)
def test_row_32_only_what_is_trained_on_waits_for_the_disk(tmp_path, fate, synced):
    store = opened(tmp_path)
    statements = []
    store._db.set_trace_callback(statements.append)
    store.settle([(ALICE, 0, 0)], fate)
    assert ("PRAGMA synchronous = FULL" in statements) is synced
    assert store.seen(ALICE, 0, 0)


def test_only_foreign_groups_without_a_fate_are_waiting(tmp_path):
    store = opened(tmp_path)
    waits = made(ALICE, 0)
    trained = made(ALICE, 1)
    own = made(BOB, 0)
    store.add([waits, trained], own=False)
    store.add([own], own=True)
    store.settle([trained.key], "trained")
    store.close()
    [(author, body, held)] = opened(tmp_path).waiting(60.0)
    assert author == ALICE
    assert body == waits.data
    assert 0 <= held < 60
    assert opened(tmp_path).waiting(-1.0) == []


@given(
    sizes=st.lists(st.integers(1, 400), max_size=40),
    quota=st.integers(0, 1000),
    most=st.integers(0, 8),
    reopen=st.sets(st.integers(0, 39)),
    repeat=st.sets(st.integers(0, 39)),
)
def test_the_oldest_make_just_enough_room(sizes, quota, most, reopen, repeat):
    content = made(ALICE, 0)
    with tempfile.TemporaryDirectory() as directory:
        limit = quota + SEEN_BYTES + most * PACKET_BYTES
        store = opened(Path(directory), quota=limit)
        model = []
        bodies = [number.to_bytes(2, "big") * size for number, size in enumerate(sizes)]
        for number, body in enumerate(bodies):
            named = another(content, body)
            store.add([named], own=False)
            if number in repeat:  # the same packet twice is one packet
                store.add([named, named], own=False)
            model.append(body)
            while sum(map(len, model)) + len(model) * PACKET_BYTES > limit - SEEN_BYTES:
                model.pop(0)
            if number in reopen:
                store.close()
                store = opened(Path(directory), quota=limit)
        for body in bodies:
            assert store.holds(packet_digest(body)) is (body in model)
        store.close()


@pytest.mark.parametrize("size", [300, 1100, 1500, 5000, 20_000])
def test_the_file_is_no_larger_than_the_quota(tmp_path, size):
    content = made(ALICE, 0)
    quota = 1 << 21
    store = opened(tmp_path, quota=quota)
    for number in range(3 * quota // (size + PACKET_BYTES)):
        body = number.to_bytes(4, "big") + b"x" * (size - 4)
        store.add([another(content, body)], own=True)
    store.close()
    assert quota / 8 < (tmp_path / "store.sqlite").stat().st_size <= quota + (1 << 16)


def test_a_smaller_quota_gives_the_disk_its_room_back(tmp_path):
    content = made(ALICE, 0)
    store = opened(tmp_path, quota=1 << 22)
    for number in range(20):
        store.add([another(content, bytes([number]) * 100_000)], own=False)
    store.close()
    store = opened(tmp_path, quota=1 << 18)
    store.add([made(ALICE, 20)], own=False)
    store.close()
    assert (tmp_path / "store.sqlite").stat().st_size < 1 << 19


def test_a_full_disk_refuses_whole_and_works_again_when_there_is_room(tmp_path):
    content = made(ALICE, 0)
    big = another(content, b"x" * 4_000_000)
    both = [content, big]
    store = opened(tmp_path, quota=2 * (SEEN_BYTES + PACKET_BYTES) + len(content.data) + len(big.data))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 10}")
    for _ in range(3):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            store.add(both, own=False)
    assert not store.holds(content.digest)
    assert not store.seen(*content.key)
    store._db.execute("PRAGMA max_page_count = 100000")
    store.add(both, own=False)
    assert store.holds(content.digest)
    assert store.holds(big.digest), "bytes never stored were counted"
    assert take_round(store) == 0


def test_a_damaged_database_and_one_that_cannot_be_made_say_what_to_do(tmp_path):
    (tmp_path / "store.sqlite").write_bytes(b"this was a database once " * 400)
    with pytest.raises(UserError, match=r"store\.sqlite") as error:
        opened(tmp_path)
    assert "Move the file away" in error.value.fix
    with pytest.raises(UserError, match="itself is sound"):
        opened(tmp_path / "nowhere")


def test_a_full_disk_is_no_reason_to_move_the_database_away(tmp_path, monkeypatch):
    def full(_):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(PacketStore, "_make_room", full)
    with pytest.raises(UserError, match="has room"):
        PacketStore(tmp_path / "store.sqlite", RUN.id, ROOMY)


NOW = 1_760_000_000_000  # milliseconds since 1970


@pytest.fixture
def wall() -> Clock:
    return Clock(NOW)


def clocked(wall):
    return PacketStore(Path(":memory:"), RUN.id, ROOMY, clock=lambda: int(wall.now))


def test_row_36_rounds_begin_anew_at_the_clock_before_they_fall_out_of_others_fence(wall):
    store = clocked(wall)
    first = take_round(store)
    assert first == wall.now
    wall.now += 2 * HOUR
    assert take_round(store) == first + 1, "it counts on by one for two hours"
    wall.now += 1000
    assert take_round(store) == wall.now
    assert take_round(store) == wall.now + 1


def test_row_36_a_clock_that_was_days_ahead_or_behind_and_was_put_right_silences_nobody_and_repeats_no_round(wall):
    store = clocked(wall)
    start = take_round(store)
    for wrong in (3 * 24 * HOUR, -5 * 24 * HOUR):
        wall.now += wrong
        assert take_round(store) == wall.now
        take_round(store)
        wall.now -= wrong - 60_000
        assert start < take_round(store) < start + 100, "near the clock it counts on where it was"


@given(st.lists(st.tuples(st.integers(-4 * 24, 4 * 24), st.integers(1, 6)), max_size=30), st.integers(0, 999))
def test_row_36_no_round_is_used_twice_however_the_clock_is_set(moves, odd):
    wall = Clock(NOW)
    store = clocked(wall)
    used = set()
    for hours, rounds in moves:
        wall.now += hours * HOUR // 24 + odd - 500
        for _ in range(rounds):
            number = take_round(store)
            assert number not in used
            assert -2 * HOUR <= number - wall.now <= 3 * HOUR + 200, "and it lies within the fence of others"
            used.add(number)
        store.skip_round()
