"""The report's section on how much sooner nodes get to the target together than alone, at a free pace."""

import math
import statistics
from dataclasses import dataclass

from ftis_node.lab.reporting import figures
from ftis_node.lab.reporting import page as say
from ftis_node.lab.reporting.figures import Row
from ftis_node.lab.reporting.page import ReportPage
from ftis_node.lab.reporting.results import Results, over_nodes
from ftis_node.lab.reporting.statistics import Interval, mean_interval

BASELINE = "alone"


@dataclass(frozen=True)
class Speed:
    """times: seed → simulated seconds to the target, the mean over the cell's nodes but for slower ones; inf where one
    of them never got there. gains: how many times as soon as the baseline, of the seeds in which both did, and neither
    was there before its first step.
    """

    times: dict[int, float]
    gains: dict[int, float]

    @property
    def finite(self) -> list[float]:
        """The times of the seeds that got there."""
        return [seconds for seconds in self.times.values() if math.isfinite(seconds)]

    def gain(self) -> Interval:
        """The geometric mean of the gains with its 95 % interval, of their logarithms. There must be gains."""
        logs = list(map(math.log, self.gains.values()))
        around = mean_interval(logs)
        mean, low, high = map(math.exp, (around.mean, around.low, around.high))
        return Interval(mean, low, high, around.n)


def speeds(results: Results) -> dict[str, Speed]:
    """By cell, in order; nothing unless all cells have a free pace and one of them is the baseline, `alone`."""
    paces = {results.cell(cell).pace for cell in results.cells}
    if BASELINE not in results.cells or paces != {"free"}:
        return {}
    alone = _times(results, BASELINE)
    found = {}
    for cell in results.cells:
        times = _times(results, cell)
        gains = {}
        for seed, seconds in times.items():
            if _is_gain(seconds) and _is_gain(alone.get(seed, math.inf)):
                gains[seed] = alone[seed] / seconds
        found[cell] = Speed(times, gains)
    return found


def _is_gain(seconds: float) -> bool:
    """Whether a node got to the target, and not before its first step."""
    return 0 < seconds < math.inf


def sooner(results: Results, page: ReportPage) -> None:
    """Section: times to the target, and how many times as soon as alone; nothing where `speeds` finds nothing."""
    found = speeds(results)
    if not found:
        return
    page.write(
        f"## How much sooner to pass@1 = {results.manifest.target:g}",
        "A seed's time is the mean over the nodes of a cell, slower ones left out, of the simulated seconds to the "
        f"target; its gain is the time of {results.label(BASELINE)} with the same seed divided by it. In brackets the "
        "95 % interval over seeds, of the gain's logarithm. A seed in which a node of the cell or the "
        "baseline never got there is counted as not reached and has no gain, which then is one of the others only.",
    )
    rows = []
    for cell, speed in found.items():
        label = results.label(cell)
        reached = f"{len(speed.finite)} of {len(speed.times)}"
        mean = say.NONE
        median = say.NONE
        gain = say.NONE
        if speed.finite:
            mean = say.level(mean_interval(speed.finite), 0)
        if speed.times:
            median = f"{statistics.median(speed.times.values()):.0f}"
        if speed.gains:
            gain = say.level(speed.gain(), 2)
        rows.append((label, reached, mean, median, gain, str(len(speed.gains))))
    page.table(["cell", "reached", "seconds [95 %]", "median", "times as soon [95 %]", "seeds of it"], rows)
    _draw(results, page, found)


def _draw(results: Results, page: ReportPage, found: dict[str, Speed]) -> None:
    """The picture of the section, where there is anything to draw."""
    seconds = []
    gains = []
    for look, (cell, speed) in enumerate(found.items()):
        label = results.label(cell)
        if speed.finite:
            seconds.append(Row(label, speed.finite, mean_interval(speed.finite), look))
        if cell != BASELINE and speed.gains:
            gains.append(Row(label, list(speed.gains.values()), speed.gain(), look))
    parts = {}
    if seconds:
        parts["simulated seconds to the target"] = seconds
    if gains:
        parts["times as soon as alone"] = gains
    caption = "A dot a seed that got there, a diamond the mean (of gains the geometric one), a bar its 95 % interval."
    if parts:
        picture = figures.dots(parts, x="", bounded=False)
        page.picture("sooner", picture, caption)


def _times(results: Results, cell: str) -> dict[int, float]:
    """The times of a cell by seed, as `Speed` has them."""
    slower = results.cell(cell).slower
    times = [results.values(cell, node, "time") for node in results.nodes(cell) if node not in slower]
    return over_nodes(times)
