"""What must not be after a week: from samples, events of the nodes, and their logs."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
SILENT_SECONDS, SILENT_STEPS = 120.0, 10.0  # a node that takes no step for longer, and so many usual steps, is stuck
HEAR_SECONDS = 90.0  # until an announcement must have been heard of: a lone peer is away for a minute at most


@dataclass(frozen=True)
class Slope:
    """By how much something grows in an hour, and the half width of its interval."""

    hourly: float
    half: float

    def __str__(self) -> str:
        return f"({self.hourly:+.1f} ± {self.half:.1f} an hour)"


def slope(times: Sequence[float], values: Sequence[float], tests: int) -> Slope:
    """Of the least squares line. times: in seconds. tests: how many such intervals are to hold together (Bonferroni).

    Neighbouring samples are alike, so there are fewer independent ones than samples: n (1 - r) / (1 + r), where r is
    the residuals' correlation with the next (Bayley and Hammersley 1946, for first-order autoregression).
    """
    hours, n = np.array(times) / 3600, len(times)
    hourly, offset = np.polyfit(hours, values, 1)
    rest = np.array(values) - hourly * hours - offset
    spread = float(rest @ rest)
    r = min(0.95, max(0.0, float(rest[1:] @ rest[:-1]) / spread)) if spread > 1e-9 else 0.0
    free = max(1.0, n * (1 - r) / (1 + r) - 2)
    error = math.sqrt(spread / free / float(((hours - hours.mean()) ** 2).sum()))
    return Slope(float(hourly), float(stats.t.ppf(1 - (1 - CONFIDENCE) / tests, free)) * error)


def slopes(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str, int], dict[str, Slope]]:
    """Of every process that lived long enough, by node, kind and pid: how each thing of `LIMITS` grows."""
    lives = defaultdict(list)
    for row in rows:
        if "pid" in row and row["at"] - row["born"] > WARM_UP_SECONDS:
            lives[row["name"], row["process"], row["pid"]].append(row)
    long = {life: found for life, found in lives.items() if len(found) >= LEAST}
    tests = max(1, len(long) * len(LIMITS))
    return {
        life: {what: slope([row["at"] for row in found], [row[what] for row in found], tests) for what in LIMITS}
        for life, found in long.items()
    }


def silence(member: Member, until: float) -> tuple[float, float]:
    """The longest time without a step, up to `until`, in which nothing was done to the node, and how long it may be; in
    seconds."""
    steps = read_events(member.daemon.home.metrics, "step")
    gaps = list(itertools.pairwise([*(member.real(event["time"]) for event in steps), until]))
    calm = [b - a for a, b in gaps if not any(began < b and ended > a for began, ended in member.away)]
    usual = float(np.median([b - a for a, b in gaps])) if gaps else 0.0
    return max(calm, default=0.0), max(SILENT_SECONDS, SILENT_STEPS * usual)


def lost(rows: Sequence[dict[str, Any]], fleet: Fleet) -> tuple[int, list[str]]:
    """Groups that one announced and another heard of, while nothing was done to either; and which were not heard of.

    What an author announced between two of its samples must be among what the other heard between a sample that is
    `HEAR_SECONDS` older than the first, and one that is so much younger than the second.
    """
    compared, missing = 0, []
    for author, hearer in itertools.permutations(fleet, 2):
        if author.role.run != hearer.role.run or not author.trains:
            continue
        pair = (author.role.name, hearer.role.name)
        there, here = ([row for row in rows if row["name"] == name and row.get("heard")] for name in pair)
        for began, ended in _calm(here, author, hearer):
            first, last = began["at"] + HEAR_SECONDS, ended["at"] - HEAR_SECONDS
            own = [row["heard"].get(author.id, 0) for row in there if first <= row["at"] <= last]
            made = own[-1] - own[0] if own else 0
            came = ended["heard"].get(author.id, 0) - began["heard"].get(author.id, 0)
            compared += made
            if came < made:
                missing.append(f"{hearer.role.name} heard of {came} of {made} groups of {author.role.name}")
    return compared, missing


def _calm(rows: Sequence[dict[str, Any]], *members: Member) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The first and last of the rows of each stretch of time in which nothing was done to the members."""
    away = [stretch for member in members for stretch in member.away]
    free = [row for row in rows if not any(began <= row["at"] <= ended for began, ended in away)]
    for _, stretch in itertools.groupby(free, key=lambda row: sum(ended < row["at"] for _, ended in away)):
        first, *_, last = [*stretch] * 2
        yield first, last


def judge(fleet: Fleet, rows: Sequence[dict[str, Any]], until: float) -> tuple[list[str], list[str]]:
    """Of all members, which have ended: a table, and what must not be. until: when the week was over (unix seconds)."""
    grown, (compared, problems), ids = slopes(rows), lost(rows, fleet), {member.id for member in fleet}
    told = [f"groups announced: {compared}, unheard of by a peer: {len(problems)}"]
    for (name, kind, _), known in grown.items():
        problems += [
            f"{name} {kind} grows: {what} {s}" for what, s in known.items() if s.hourly - s.half > LIMITS[what]
        ]
    for member in fleet:
        name, home = member.role.name, member.daemon.home
        last = {row["process"]: row for row in rows if row["name"] == name}
        node = last.pop("node")
        for kind, row in last.items():
            known = grown.get((name, kind, row["pid"]), {})
            figures = ", ".join(f"{what} {row[what]:.0f} {known.get(what, '')}".strip() for what in LIMITS)
            told.append(f"{name} {kind}: {row['pss_mb']:.0f} MB with its share of libraries; {figures}")
        problems += [f"{name}, {times} times: {text}" for text, times in unexplained(home.path, ids).items()]
        if member.trains:
            longest, most = silence(member, until)
            held = f"{node['disk_mb']:.0f} MB on disk, {node['blocks']} blocks"
            told.append(f"{name}: step {node['step']}, {held}, at most {longest:.0f} s without a step")
            if longest > most and "--own-share" not in member.role.flags:
                problems.append(f"{name} took no step for {longest:.0f} s")
            if twice := used_twice(member.daemon):
                problems.append(f"{name} trained on {twice} groups twice")
            if len(checkpoints := sorted(path.name for path in home.checkpoints.iterdir())) > 3:
                problems.append(f"{name} has checkpoints {checkpoints}")
    return told, problems
