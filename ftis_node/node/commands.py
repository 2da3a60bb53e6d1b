"""What a node's owner wants of it now: whether it goes on, and whether it may train, by commands or by a schedule of
hours, the battery, and other programs on its GPU."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from pathlib import Path

import psutil

from ftis_node.config.hours import is_open, next_opening, read_hours
from ftis_node.config.settings import Settings
from ftis_node.host.clocks import boot_seconds, unix_seconds

LOOK_SECONDS = 5.0  # between looks at clock and battery
CARD_SECONDS = 15.0  # between looks at the GPU
BUSY_LOOKS = 2  # in a row, after which another program counts
QUIET_SECONDS = 60.0  # without another program until the node goes on
BUSY_PERCENT = 10  # of the GPU's time that a program takes
PMON = ("nvidia-smi", "pmon", "-c", "1", "-s", "u")
PMON_SECONDS = 10.0
SUPPLIES = Path("/sys/class/power_supply")  # of Linux

logger = logging.getLogger(__name__)


def _has_battery() -> bool:
    """Whether this machine may have one: of a machine without, psutil takes a wireless mouse's."""
    return not SUPPLIES.exists() or any(SUPPLIES.glob("BAT*"))


class Schedule:
    """Says whether hours, battery and other programs on the GPU let the node train. It looks when it is asked:
    `Commands` asks every five seconds, for as long as the node runs."""

    def __init__(self, settings: Callable[[], Settings], own: Callable[[], Collection[int]]) -> None:
        """
        Args:
            settings: returns the node's present settings.
            own: returns the process ids of the node that may use a GPU; none while it runs on a CPU, or not at all.
        """
        self._settings = settings
        self._own = own
        self._card: str | None = None  # the GPU on which the node's own process was seen, by nvidia-smi's number
        self._looked = self._busy_at = -QUIET_SECONDS
        self._busy_looks = 0
        self._blind = False  # nvidia-smi does not work here
        self.why = ""  # at the latest look, overruled or not
        self._overruled = False

    async def why_not(self) -> str:
        """Look, and return why the node should not train now, as a sentence, or "". Sets `why`; if the owner overruled
        that, the answer is "" all the same.

        Raises:
            OSError: a battery is being unplugged; the next look succeeds.
        """
        self.why = await self._look()
        self._overruled = self._overruled and bool(self.why)
        if self._overruled:
            return ""
        return self.why

    def overrule(self) -> None:
        """Let the node train in spite of `why`, until a look finds nothing against it. Without a `why` nothing
        changes."""
        self._overruled = bool(self.why)

    async def _look(self) -> str:
        """Why hours, battery or other programs on the GPU are against training now, as a sentence, or "". May start
        nvidia-smi. Raises OSError where a battery is being unplugged."""
        settings = self._settings()
        now = datetime.fromtimestamp(unix_seconds())
        spans = read_hours(settings.hours)
        if not is_open(spans, now):
            return f"It is outside of its hours ({settings.hours}); it goes on at {next_opening(spans, now):%a %H:%M}."
        if not settings.idle_only:
            return ""
        battery = psutil.sensors_battery() if _has_battery() else None
        if battery is not None and battery.power_plugged is False:
            return f"The machine runs on its battery ({battery.percent:.0f} %)."
        if await self._others_on_card():
            return "Another program uses the GPU."
        return ""

    async def _others_on_card(self) -> bool:
        """Whether another program was busy on this node's GPU in two looks in a row, the latest within the last minute.

        It runs nvidia-smi every 15 s at most, and never while no process of the node was on a GPU yet. A node that
        pauses has none there, but remembers its GPU.
        """
        now = boot_seconds()
        if not self._blind and now - self._looked >= CARD_SECONDS and (self._own() or self._card is not None):
            self._looked = now
            self._busy_looks += 1
            if not self._others_in(await self._pmon()):
                self._busy_looks = 0
            if self._busy_looks >= BUSY_LOOKS:
                self._busy_at = now
        return now - self._busy_at < QUIET_SECONDS

    def _others_in(self, text: str) -> bool:
        """Whether nvidia-smi's text names another busy process on the node's GPU. That is the one that it names for the
        node's own process, of several the one listed last; without one there, that of an earlier look."""
        own = self._own()
        busy_cards = set()
        for card, pid, busy in read_pmon(text):
            if pid in own:
                self._card = card
            elif busy >= BUSY_PERCENT:
                busy_cards.add(card)
        return self._card in busy_cards

    async def _pmon(self) -> str:
        """The output of nvidia-smi; empty if it is missing, which ends all further looks, or takes over ten seconds."""
        try:
            asked = await asyncio.create_subprocess_exec(
                *PMON, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
            )
        except OSError as error:
            self._blind = True
            logger.warning("nvidia-smi cannot be asked (%s): the GPU counts as idle.", error.strerror)
            return ""
        try:
            async with asyncio.timeout(PMON_SECONDS):
                return (await asked.communicate())[0].decode(errors="replace")
        except TimeoutError:
            return ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                asked.kill()


def read_pmon(text: str) -> Iterator[tuple[str, int, int]]:
    """The GPU, the process id and the percentage of its time, of each process that `nvidia-smi pmon -s u` lists; 0
    where it has no figure (`-`)."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 3 and words[0].isdigit() and words[1].isdigit():
            busy = 0
            if words[3].isdigit():
                busy = int(words[3])
            yield words[0], int(words[1]), busy


class Commands:
    """The present commands. A command only sets what is read here: `Training` reads it between steps.

    stopping: set once the node is to end within half a minute. deadline: by when it must have ended (`time.monotonic`);
    0 before. finishing: it ends after the running step. Neither is taken back, but `stop` takes the place of `finish`.
    why: why the schedule holds it, a sentence; "" if it does not, or the owner paused it.
    flush: set if the running step is to wait for nothing, because the node pauses or ends.
    """

    def __init__(self, schedule: Schedule, *, paused: bool) -> None:
        self.stopping = asyncio.Event()
        self.flush = asyncio.Event()
        self.deadline = 0.0
        self.finishing = False
        self.why = ""
        self._paused = paused  # by its owner
        self._schedule = schedule
        self._came = asyncio.Event()
        self._note()

    @property
    def ending(self) -> bool:
        """Whether the node ends."""
        return self.finishing or self.stopping.is_set()

    @property
    def pausing(self) -> bool:
        """Whether the node is not to train, by its owner or the schedule; a running step is finished."""
        return self._paused or bool(self.why)

    def stop(self, seconds: float) -> None:
        """End the node within so many seconds."""
        self.deadline = time.monotonic() + seconds
        self.stopping.set()
        self.finishing = False
        self._note()

    def finish(self) -> None:
        """End the node after the running step, however long that takes."""
        self.finishing = True
        self._note()

    def pause(self) -> None:
        """Train no more after the running step, until `resume`; the schedule does not end this."""
        self._hold(paused=True)

    def resume(self) -> None:
        """Train, also in spite of hours, battery and GPU, until these allow it anyway."""
        self._schedule.overrule()
        self._hold(paused=False)

    async def keep_hours(self) -> None:
        """Pause and continue by the schedule, without an end."""
        while True:
            with contextlib.suppress(OSError):  # of a battery that is being unplugged
                await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Ask the schedule, and hold the node or let it go on if its answer has changed. Called every five seconds and
        after a change of settings.

        Raises:
            OSError: see `Schedule.why_not`.
        """
        why = await self._schedule.why_not()
        if not self._paused and why != self.why:
            self._hold(paused=False, why=why)

    async def next(self) -> None:
        """Wait for the next command; one that came before this call does not count, so read the present ones first."""
        self._came.clear()
        await self._came.wait()

    def _hold(self, *, paused: bool, why: str = "") -> None:
        """Hold the node from now on by its owner, or by the schedule for this reason, or let it train."""
        self._paused = paused
        self.why = why
        self._note()

    def _note(self) -> None:
        """Set or clear `flush` by the present commands, and wake what waits for the next one."""
        if self.pausing or self.ending:
            self.flush.set()
        else:
            self.flush.clear()
        self._came.set()
