"""Why a node should not train now: its owner's hours, the battery, or another program on its GPU."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from datetime import datetime

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

logger = logging.getLogger(__name__)


class Schedule:
    """Looks at clock, battery and GPU again and again."""

    def __init__(self, settings: Callable[[], Settings], own: Callable[[], Collection[int]]) -> None:
        """
        Args:
            settings: returns the node's present settings.
            own: returns the process ids of the node that may use a GPU; none while it runs on a CPU, or not at all.
        """
        self._settings, self._own = settings, own
        self._card: str | None = None  # the GPU on which the node's own process was seen, by nvidia-smi's number
        self._looked = self._busy_at = -QUIET_SECONDS
        self._busy_looks = 0
        self._blind = False  # nvidia-smi does not work here
        self.why: str | None = None  # at the latest look, overruled or not
        self._overruled = False

    async def why_not(self) -> str | None:
        """Return why the node should not train now, as a sentence, or None."""
        self.why = await self._look()
        self._overruled = self._overruled and self.why is not None
        return None if self._overruled else self.why

    def overrule(self) -> None:
        """Let the node train until there was nothing against it once."""
        self._overruled = self.why is not None

    async def _look(self) -> str | None:
        settings, now = self._settings(), datetime.fromtimestamp(unix_seconds())
        spans = read_hours(settings.hours)
        if not is_open(spans, now):
            return f"It is outside of its hours ({settings.hours}); it goes on at {next_opening(spans, now):%a %H:%M}."
        if not settings.idle_only:
            return None
        battery = psutil.sensors_battery()
        if battery is not None and battery.power_plugged is False:
            return f"The machine runs on its battery ({battery.percent:.0f} %)."
        if await self._others_on_card():
            return "Another program uses the GPU."
        return None

    async def _others_on_card(self) -> bool:
        """Whether another program was seen twice on this node's GPU, and within the last minute."""
        now = boot_seconds()
        if not self._blind and now - self._looked >= CARD_SECONDS and (self._own() or self._card is not None):
            self._looked = now
            busy = self._sees_others(await self._pmon())
            self._busy_looks = self._busy_looks + 1 if busy else 0
            if self._busy_looks >= BUSY_LOOKS:
                self._busy_at = now
        return now - self._busy_at < QUIET_SECONDS

    def _sees_others(self, text: str) -> bool:
        own, rows = self._own(), list(read_pmon(text))
        for card, pid, _ in rows:
            if pid in own:
                self._card = card
        return any(card == self._card and pid not in own and busy >= BUSY_PERCENT for card, pid, busy in rows)

    async def _pmon(self) -> str:
        """The output of nvidia-smi; empty if there is none."""
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
    """The GPU, the process id and the percentage of its time, of each process that `nvidia-smi pmon -s u` lists."""
    for line in text.splitlines():
        words = line.split()
        if len(words) > 3 and words[0].isdigit() and words[1].isdigit():
            yield words[0], int(words[1]), int(words[3]) if words[3].isdigit() else 0
