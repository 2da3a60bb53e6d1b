"""What must not be after a week: from samples, events of the nodes, and their logs."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import stats

from ftis_node.observe.metrics import read_events
from tests.manual.week.explained import unexplained
from tests.manual.week.fleet import Fleet, Member
from tests.support.daemons import used_twice

WARM_UP_SECONDS = 3600.0  # of a process: some 2,000 steps fill the 16 MiB of the latest packets in its memory
LEAST = 20  # samples after that, else nothing can be said
LIMITS = {"memory_mb": 2.0, "files": 1.0, "sockets": 1.0, "threads": 1.0}
"""What a process may grow by in an hour."""
CONFIDENCE = 0.95  # that no process is called growing which is not, all of them together
SILENT_SECONDS = 120.0  # a node that takes no step for longer,
SILENT_STEPS = 10.0  # and for so many usual steps, is stuck
HEAR_SECONDS = 90.0  # until an announcement must have been heard of: a lone peer is away for a minute at most


Row: TypeAlias = dict[str, Any]
"""A sample of a process or a node, as `gauges` takes it."""
Rows: TypeAlias = Sequence[Row]
Life: TypeAlias = tuple[str, str, int]
"""A process by its node, kind and pid."""


@dataclass(frozen=True)
class Slope:
    """By how much something grows in an hour, and the half width of its interval."""

    hourly: float
    half: float

    def __str__(self) -> str:
        return f"({self.hourly:+.1f} ± {self.half:.1f} an hour)"


Grown: TypeAlias = dict[Life, dict[str, Slope]]
"""How each thing of `LIMITS` grows, by process."""


def slope(times: Sequence[float], values: Sequence[float], tests: int) -> Slope:
    """Of the least squares line. times: in seconds. tests: how many such intervals are to hold together (Bonferroni).

    Neighbouring samples are alike, so there are fewer independent ones than samples: n (1 - r) / (1 + r), where r is
    the residuals' correlation with the next (Bayley and Hammersley 1946, for first-order autoregression).
    """
    hours = np.array(times) / 3600
    hourly, offset = np.polyfit(hours, values, 1)
    rest = np.array(values) - hourly * hours - offset
    spread = float(rest @ rest)
    r = 0.0
    if spread > 1e-9:
        r = float(np.clip(rest[1:] @ rest[:-1] / spread, 0.0, 0.95))
    free = max(1.0, len(times) * (1 - r) / (1 + r) - 2)
    apart = hours - hours.mean()
    error = math.sqrt(spread / free / float(apart @ apart))
    quantile = stats.t.ppf(1 - (1 - CONFIDENCE) / tests, free)
    return Slope(float(hourly), float(quantile) * error)


def slopes(rows: Rows) -> Grown:
    """Of every process that lived long enough: how each thing of `LIMITS` grows."""
    lives = defaultdict(list)
    for row in rows:
        if "pid" in row and row["at"] - row["born"] > WARM_UP_SECONDS:
            lives[row["name"], row["process"], row["pid"]].append(row)
    long = {life: samples for life, samples in lives.items() if len(samples) >= LEAST}
    tests = max(1, len(long) * len(LIMITS))
    found = {}
    for life, samples in long.items():
        times = [row["at"] for row in samples]
        found[life] = {}
        for what in LIMITS:
            values = [row[what] for row in samples]
            found[life][what] = slope(times, values, tests)
    return found


def growing(grown: Grown) -> Iterator[str]:
    """Of each process the things that certainly grow by more than they may."""
    for (name, kind, _), known in grown.items():
        for what, found in known.items():
            if found.hourly - found.half > LIMITS[what]:
                yield f"{name} {kind} grows: {what} {found}"


def silence(member: Member, until: float) -> tuple[float, float]:
    """The longest time without a step, up to `until`, in which nothing was done to the node, and how long it may be; in
    seconds."""
    steps = read_events(member.daemon.home.metrics, "step")
    times = [member.real(event["time"]) for event in steps]
    gaps = []
    longest = 0.0
    for begin, end in itertools.pairwise([*times, until]):
        gaps.append(end - begin)
        if not member.was_away(begin, end):
            longest = max(longest, end - begin)
    usual = float(np.median(gaps)) if gaps else 0.0
    return longest, max(SILENT_SECONDS, SILENT_STEPS * usual)


def lost(rows: Rows, fleet: Fleet) -> tuple[int, list[str]]:
    """Groups that one announced and another heard of, while nothing was done to either; and which were not heard of.

    What an author announced between two of its samples must be among what the other heard between a sample that is
    `HEAR_SECONDS` older than the first, and one that is so much younger than the second.
    """
    compared = 0
    missing = []
    heard = defaultdict(list)
    for row in rows:
        if row.get("heard"):
            heard[row["name"]].append(row)
    for author, hearer in itertools.permutations(fleet, 2):
        if author.role.run != hearer.role.run or not author.trains:
            continue
        for began, ended in _calm(heard[hearer.role.name], author, hearer):
            first = began["at"] + HEAR_SECONDS
            last = ended["at"] - HEAR_SECONDS
            own = [row for row in heard[author.role.name] if first <= row["at"] <= last]
            if not own:
                continue
            made = _announced(own[-1], author) - _announced(own[0], author)
            came = _announced(ended, author) - _announced(began, author)
            compared += made
            if came < made:
                missing.append(f"{hearer.role.name} heard of {came} of {made} groups of {author.role.name}")
    return compared, missing


def _announced(row: Row, author: Member) -> int:
    """The groups that an author has announced, as far as the row's node had heard of them."""
    return row["heard"].get(author.id, 0)


def _calm(rows: Rows, *members: Member) -> Iterator[tuple[Row, Row]]:
    """The first and last of the rows of each stretch of time in which nothing was done to the members."""
    away = [times for member in members for times in member.away]
    free = [row for row in rows if not any(began <= row["at"] <= ended for began, ended in away)]

    def before(row: Row) -> int:
        return sum(ended < row["at"] for _, ended in away)

    for _, rows_between in itertools.groupby(free, key=before):
        stretch = list(rows_between)
        yield stretch[0], stretch[-1]


def judge(fleet: Fleet, rows: Rows, until: float) -> tuple[list[str], list[str]]:
    """Of all members, which have ended: a table, and what must not be. until: when the week was over (unix seconds)."""
    grown = slopes(rows)
    compared, problems = lost(rows, fleet)
    told = [f"groups announced: {compared}, unheard of by a peer: {len(problems)}"]
    problems += growing(grown)
    ids = {member.id for member in fleet}
    for member in fleet:
        name = member.role.name
        home = member.daemon.home
        last = {row["process"]: row for row in rows if row["name"] == name}
        node = last.pop("node")
        told += [_held(row, grown) for row in last.values()]
        problems += [f"{name}, {times} times: {text}" for text, times in unexplained(home.path, ids).items()]
        if not member.trains:
            continue
        longest, most = silence(member, until)
        held = f"{node['disk_mb']:.0f} MB on disk, {node['blocks']} blocks"
        told.append(f"{name}: step {node['step']}, {held}, at most {longest:.0f} s without a step")
        if longest > most and "--own-share" not in member.role.flags:
            problems.append(f"{name} took no step for {longest:.0f} s")
        twice = used_twice(member.daemon)
        if twice:
            problems.append(f"{name} trained on {twice} groups twice")
        checkpoints = sorted(path.name for path in home.checkpoints.iterdir())
        if len(checkpoints) > 3:
            problems.append(f"{name} has checkpoints {checkpoints}")
    return told, problems


def _held(row: Row, grown: Grown) -> str:
    """A line of the table: what a process held at its last sample, and how that grew."""
    known = grown.get((row["name"], row["process"], row["pid"]), {})
    figures = [f"{what} {row[what]:.0f} {known.get(what, '')}".strip() for what in LIMITS]
    process = f"{row['name']} {row['process']}"
    return f"{process}: {row['pss_mb']:.0f} MB with its share of libraries; {', '.join(figures)}"
