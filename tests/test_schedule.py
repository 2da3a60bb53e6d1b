"""When a node trains: hours, battery, another program on its GPU, and a machine that was asleep."""

import asyncio
import stat
import time
from datetime import datetime, timedelta

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psutil import _pslinux

from ftis_node.config.hours import MINUTES, is_open, next_opening, read_hours
from ftis_node.config.settings import Settings, changed, collect
from ftis_node.errors import UsageError
from ftis_node.host.clocks import Clocks, replaced, unix_seconds
from ftis_node.node import commands as schedule_module
from ftis_node.node.commands import Commands, Schedule, read_pmon
from tests.support.cli import answer, printed, refused
from tests.support.clock import Clock
from tests.support.daemons import used_twice
from tests.support.swarm import eventually, member

MONDAY = datetime(2026, 11, 23)

# --- hours ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22-07", ["mon 22:00", "mon 23:59", "tue 00:00", "tue 06:59"], ["mon 21:59", "mon 07:00", "mon 12:00"]),
        ("09:30-17:15", ["mon 09:30", "sun 17:14"], ["mon 09:29", "sun 17:15", "sun 00:00"]),
        ("mon-fri 19-07, sat-sun", ["fri 19:00", "sat 03:00", "sat 12:00", "sun 23:59"], ["mon 03:00", "fri 12:00"]),
        ("fri-mon 10-11", ["fri 10:30", "sun 10:30", "mon 10:59"], ["tue 10:30", "thu 10:30"]),
        ("sun 23-01", ["sun 23:30", "mon 00:30"], ["mon 23:30", "sun 00:30"]),
        ("SAT", ["sat 00:00", "sat 23:59"], ["fri 23:59", "sun 00:00"]),
        ("00-24", ["mon 00:00", "sun 23:59"], []),
        ("", ["mon 00:00", "wed 13:13"], []),
        (" , ", ["mon 00:00"], []),
    ],
)
def test_hours_hold_what_they_say(text, inside, outside):
    for moments, expected in ((inside, True), (outside, False)):
        for moment in moments:
            assert is_open(read_hours(text), at(moment)) is expected, moment


def at(moment):
    day, time = moment.split()
    hour, minute = map(int, time.split(":"))
    days = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"].index(day)
    return MONDAY + timedelta(days=days, hours=hour, minutes=minute)


@pytest.mark.parametrize("text", ["always", "22", "25-07", "7-7", "12:60-13", "mon-abc 10-11", "22-07;23-04", "24-05"])
def test_hours_that_mean_nothing_are_refused_by_name(text):
    with pytest.raises(UsageError) as error:
        collect(task="arithmetic", flags={"hours": text}, environment={})
    assert "hours" in error.value.what
    assert text.split(";")[0].split()[0] in error.value.what
    with pytest.raises(UsageError):
        changed(Settings(), {"hours": text}, Settings())


@given(
    st.integers(0, MINUTES - 1),
    st.integers(0, MINUTES - 1),
    st.integers(0, 7 * MINUTES - 1),
    st.sampled_from(("", "tue ", "fri-mon ")),
)
def test_the_next_opening_is_the_first_moment_that_is_open(start, end, now, days):
    if start == end:
        return
    spans = read_hours(f"{days}{start // 60}:{start % 60:02}-{end // 60}:{end % 60:02}")
    moment = MONDAY + timedelta(minutes=now, seconds=30)
    opening = next_opening(spans, moment)
    assert is_open(spans, opening)
    assert opening >= moment.replace(second=0)
    assert is_open(spans, moment) == (opening == moment.replace(second=0))
    assert not is_open(spans, opening - timedelta(minutes=1)) or opening == moment.replace(second=0)


# --- battery and GPU --------------------------------------------------------------------------------------------------


class Machine:
    """A machine with a clock in hand, a battery in files, and an nvidia-smi that prints what a test wrote."""

    def __init__(self, place, monkeypatch):
        self.clock = Clock()
        self.own = {100}
        self.settings = Settings(idle_only=True)
        self._power = place / "power"
        self._listing = place / "pmon"
        self._mains = place / "power" / "AC0" / "online"
        (place / "power").mkdir()
        monkeypatch.setattr(_pslinux, "POWER_SUPPLY_PATH", str(place / "power"))
        monkeypatch.setattr(schedule_module, "SUPPLIES", place / "power")
        monkeypatch.setattr(schedule_module, "boot_seconds", self.clock)
        program = place / "nvidia-smi"
        program.write_text(f'#!/bin/sh\n[ "$*" = "{" ".join(schedule_module.PMON[1:])}" ] && cat {self._listing}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{place}:/bin:/usr/bin")
        self.schedule = Schedule(lambda: self.settings, lambda: self.own)

    def has_battery(self, *, plugged, name="BAT0"):
        (supply := self._power / name).mkdir(exist_ok=True)
        self._mains.parent.mkdir(exist_ok=True)
        for fact, value in {
            "energy_now": 50,
            "energy_full": 100,
            "power_now": 10,
            "capacity": 50,
        }.items():
            (supply / fact).write_text(str(value))
        (supply / "status").write_text("Charging" if plugged else "Discharging")
        self._mains.write_text(str(int(plugged)))

    def runs(self, *rows):
        """GPU, process id and percentage of each process."""
        head = "# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command\n# Idx   #   C/G  %\n"
        body = "".join(
            f"    {gpu}   {pid}     C     {busy}     10      -      -      -      -    x\n" for gpu, pid, busy in rows
        )
        self._listing.write_text(head + body)

    async def looks(self, seconds=schedule_module.CARD_SECONDS):
        self.clock.now += seconds
        return await self.schedule.why_not()


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


async def test_on_battery_the_node_pauses_if_its_owner_wants_that(machine):
    machine.own = set()
    machine.has_battery(plugged=False, name="hidpp_battery_0")
    assert psutil.sensors_battery() is not None
    assert not await machine.looks(), "a wireless mouse's"
    machine.has_battery(plugged=False)
    assert "battery" in await machine.looks()
    machine.has_battery(plugged=True)
    assert not await machine.looks()
    machine.has_battery(plugged=False)
    machine.settings = Settings()
    assert not await machine.looks()


async def test_another_program_on_the_same_gpu_counts_once_it_stays_until_a_minute_later(machine):
    machine.runs((0, 100, 90))
    assert not await machine.looks()
    machine.runs((0, 100, 90), (1, 300, 99), (0, 200, 2))
    for _ in range(2 * schedule_module.BUSY_LOOKS):
        assert not await machine.looks(), "another GPU, and one that only draws the desktop"
    machine.runs((0, 100, 50), (0, 200, 50))
    for _ in range(schedule_module.BUSY_LOOKS - 1):
        assert not await machine.looks()
    assert "GPU" in await machine.looks()
    machine.own = set()  # the node rests
    machine.runs((0, 200, 99))
    assert "GPU" in await machine.looks(10 * schedule_module.QUIET_SECONDS), "still there"
    machine.runs()
    assert "GPU" in await machine.looks()
    assert not await machine.looks(schedule_module.QUIET_SECONDS)


async def test_what_its_owner_says_goes_before_the_schedule_until_that_allows_it_anyway(machine):
    commands = Commands(machine.schedule, paused=False)
    machine.has_battery(plugged=False)
    await commands.look()
    assert "battery" in commands.why
    assert commands.flush.is_set()
    commands.pause()
    await commands.look()
    assert commands.pausing and not commands.why
    commands.resume()
    await commands.look()
    assert not commands.pausing and not commands.flush.is_set(), "in spite of the battery"
    machine.has_battery(plugged=True)
    await commands.look()
    machine.has_battery(plugged=False)
    await commands.look()
    assert "battery" in commands.why, "the next time it counts again"
    commands.finish()
    commands.resume()
    assert commands.finishing
    assert commands.ending
    assert commands.flush.is_set()
    assert not commands.stopping.is_set()
    commands.stop(0.0)
    assert not commands.finishing
    assert commands.stopping.is_set()
    assert Commands(machine.schedule, paused=True).pausing


async def test_where_the_own_process_is_not_listed_nobody_is_blamed(machine):
    machine.runs((0, 7, 99))  # in a container process ids are others
    for _ in range(3 * schedule_module.BUSY_LOOKS):
        assert not await machine.looks()


async def test_without_nvidia_smi_the_gpu_counts_as_idle_and_one_warning_says_so(machine, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    for _ in range(3):
        assert not await machine.looks()
    assert caplog.text.count("nvidia-smi cannot be asked") == 1


@given(st.text())
def test_no_listing_breaks_the_reader(text):
    assert all(busy >= 0 for _, _, busy in read_pmon(text))


# --- a daemon ---------------------------------------------------------------------------------------------------------


def test_a_daemon_keeps_its_hours_and_shows_its_page_as_told(join):
    daemon = join("a", "--hours", closed_hours())
    paused = daemon.wait(lambda status: status["state"] == "PAUSED", "a pause")
    assert "outside of its hours" in paused["reason"]
    assert "goes on at" in paused["reason"]
    assert paused["step"] == 0
    home = ("--home", daemon.home.path)
    printed("resume", *home)
    daemon.reaches(2, "steps that its owner asked for")
    printed("set", "hours=", *home)
    printed("set", f"hours={closed_hours()}", *home)
    paused = daemon.wait(lambda status: status["state"] == "PAUSED", "a pause by its hours")
    assert paused["worker_memory_bytes"] is None
    assert answer("set", "page=false", *home) == {"page": False}
    assert daemon.status()["page"] is None
    printed("set", "page=true", "log_level=debug", "hours=", *home)
    assert daemon.status()["page"].startswith("http://")
    step = daemon.status()["step"]
    daemon.wait(lambda status: status["step"] > step and status["state"] == "ALONE", "further steps")
    assert "is no time" in refused("set", "hours=never", *home).what


def closed_hours():
    """Two hours that are over for at least another twenty."""
    hour = (datetime.now().hour + 22) % 24
    return f"{hour}-{(hour + 1) % 24 or 24}"


@pytest.mark.slow
def test_after_a_sleep_of_the_machine_two_daemons_learn_from_one_another_again(join):
    first = join("a")
    second = join("b", "--model", "tiny-b", "--peers", first.address())
    for one in (first, second):
        one.wait(lambda status: status.get("foreign_groups_used"), "foreign groups")
    second.freeze()
    first.wait(lambda status: status["peers"] == 0, "the loss of the sleeper")
    second.thaw()
    before = [sum(one.status()["foreign_groups_used"].values()) for one in (first, second)]
    for one, groups in zip((first, second), before, strict=True):
        one.wait(lambda status, seen=groups: sum(status["foreign_groups_used"].values()) > seen + 4, "new groups")
        status = one.status()
        assert not status["stalled"]
        assert status["worker_restarts"] == 0
        assert not status["network"]["p2pd_restarts"]
        assert not status["refused_packets"].get("wrong bytes")
    assert used_twice(first) == used_twice(second) == 0


@pytest.mark.virtual_time
async def test_after_a_night_asleep_what_is_old_is_old_and_peers_go_on_at_once(tmp_path):
    asleep = 0.0
    awake = asyncio.get_running_loop().time
    began = time.time()
    clocks = Clocks(boot=lambda: awake() + asleep, unix=lambda: began + awake() + asleep, thread=time.thread_time)
    with replaced(clocks):
        async with (
            member(1, tmp_path, unix=unix_seconds) as ann,
            member(2, tmp_path, [ann.address], unix=unix_seconds) as ben,
        ):
            ann.make(2)
            await eventually(lambda: len(ben.admitted) == 2, "groups before the night")
            asleep = 8 * 3600.0  # the event loop's clock stands still, as in a suspended machine
            ann.make(3)
            await eventually(lambda: len(ben.admitted) == 5, "groups after it")
            for node in (ann, ben):
                assert not node.swarm.reputation.left_alone()
                assert not node.swarm.membership.refused
            assert ben.swarm.recent_authors(3600.0) == {ann.author}
            kept = [len(known.announcement.packets) for known in ben.swarm.gossip.table]
            assert sum(kept) == 3, "the old ones are gone"
