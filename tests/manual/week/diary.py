"""Who takes part, and what happens to whom, when: as data."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec

DAYS = 7
DAY_SECONDS = 86_400.0
QUIET_SECONDS = 130.0  # at the end: whoever is apart then has its two minutes, too
STEPS = (20, 120, 1_000)  # after which a page is looked at, and at the end
WATCH = "watch"
TRACKED = ("--track", "tensorboard") if find_spec("tensorboard") else ()


@dataclass(frozen=True)
class Role:
    """A daemon. The first of a run begins it, and dials nobody in a local network, as a public one would.

    minutes: between its checkpoints. file: what the run's file is made with, if it has one. What grows is seen in those
    that no deed ends.
    """

    name: str
    run: str
    flags: tuple[str, ...] = ()
    minutes: float = 0.1
    file: tuple[str, ...] = ()

    @property
    def line(self) -> tuple[str, ...]:
        """Its flags, but those by which it finds its run."""
        line = (*COMMON, *self.flags)
        if self.name == WATCH:
            return line
        return (*line, *SMALL, "--name", self.name, "--set", f"checkpoint_minutes={self.minutes}")


COMMON = ("--set", "log_format=json", "--set", "patience=120", "--set", "port=4001")
SMALL = ("--set", "batch_groups=6", "--set", "eval_prompts=16", "--set", "eval_every=10", "--set", "packet_quota_mb=4")
HOURS = "mon-fri"
HORIZONTAL = ("--collaboration", "horizontal", "--parts", "2", "--epoch", "60", "--group", "6")
ROLES = (
    Role("gate", "open", ("--model", "tiny-a"), minutes=0.0),
    Role("ann", "open", ("--model", "tiny-b", *TRACKED)),
    Role("ear", "open", ("--model", "tiny-c", "--own-share", "0", "--hours", HOURS)),
    Role("chars", "text", ("--model", "tiny-chars"), 0.0, ("--any-tokenizer",)),
    Role("digits", "text", ("--model", "tiny-numbers")),
    Role("rows", "wide", ("--model", "tiny-a"), file=HORIZONTAL),
    Role("cols", "wide", ("--model", "tiny-b")),
    Role("host", "own", ("--model", "tiny-a")),
    Role("guest", "own", ("--model", "tiny-b")),
    Role(WATCH, "open"),
)
SMALL_DISK = "rows"  # whose home is on a disk of its own

PAIRS = ("chars", "digits", "rows", "cols", "host", "guest")  # each of them has one peer
AWAY = "lone_peer_away"
AWAY_SECONDS = (4.0, 60.0)
ENDED = ("gate", "ear", "chars", "rows", "guest")
MOVED = ("ann", "ear", "digits", "cols", "guest")
MISDATED = ("ann", "ear", "digits", "guest")  # not of the horizontal run, whose epochs of a minute go by the clock
DEEDS: dict[str, tuple[str, ...]] = {
    "kill": ENDED,
    "kill_p2pd": ENDED,
    "restart": ENDED,
    "sleep": (*ENDED, *MOVED, "host"),
    "new_address": MOVED,
    "unplug": MOVED,
    "cut_in_two": ("gate", "chars", "rows", "host"),
    "fill_disk": (SMALL_DISK,),
    "attack": ("gate", "chars"),
    "set": (*ENDED, *MOVED),
    "pause": ("gate", "chars", "rows"),
    "clock_ahead": MISDATED,
    "leave_and_join": ("guest",),
    AWAY: PAIRS,
}
"""What may happen (the methods of `deeds.Deeds`), and to whom of those who are there."""
NIGHT = "night"


@dataclass(frozen=True)
class Event:
    """at: seconds after the start. seconds: how long it lasts; of a night, by how much all clocks are put ahead."""

    at: float
    what: str
    who: str
    seconds: float


def plan(seconds: float, seed: int, names: Collection[str]) -> list[Event]:
    """Everything that happens: each deed comes once before any comes again, and a lone peer is away twice. Each day
    ends with a night."""
    chance = random.Random(seed)
    day = (seconds - QUIET_SECONDS) / DAYS
    each = max(30.0, min(75.0, day / 2))
    possible = {}
    for what, who in DEEDS.items():
        there = [name for name in who if name in names]
        if there:
            possible[what] = there
    cards = [*possible]
    if AWAY in possible:
        cards.append(AWAY)
    cards.sort()
    deck = []
    events = []
    for number in range(DAYS):
        for turn in range(max(1, int(day // each))):
            if not deck:
                deck = chance.sample(cards, k=len(cards))
            what = deck.pop()
            lasts = 0.5 * each
            if what == AWAY:
                lasts = chance.uniform(*AWAY_SECONDS)
            events.append(Event(number * day + turn * each, what, chance.choice(possible[what]), lasts))
        events.append(Event((number + 1) * day, NIGHT, "", DAY_SECONDS - day))
    return events
