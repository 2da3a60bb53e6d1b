"""Looks at a page in a browser at every size, and says what is wrong with it; and histories to look at."""

import json
import math
import time
from pathlib import Path
from typing import Any, TypeAlias

from ftis_node.swarm.chronicle import HISTORY_ROWS, Trend
from tests.support.browser import Browser
from tests.support.steps import step

SCRIPT = Path(__file__).with_name("look.js").read_text(encoding="utf-8")
Sizes: TypeAlias = list[tuple[int, bool]]
SIZES: Sizes = [(width, dark) for width in (1280, 360) for dark in (False, True)]
STEPS = (0, 20, 101, 1_000, 100_000)
EVALUATIONS = 50
PEAKS = {5.0: 600.0, 2.0: 17.0, 3.0: 19.0}  # seconds of a step, by the tenth of all steps; the last two fit an axis
BEGAN = 1_760_000_000.0  # unix seconds
MINUTE = 60.0
NIGHT = 8 * 3600.0
POLL = 6.0  # seconds in which a page asks again


def faults(browser: Browser, url: str, name: str, out: Path | None = None, sizes: Sizes = SIZES) -> list[str]:
    """What is wrong with a page at a desk's width and a phone's, light and dark.

    Args:
        name: of the pictures in `out`, which gets one of each size. sizes: fewer of them.
    """
    found = []
    for width, dark in sizes:
        browser.show(width, 900, dark=dark)
        browser.open(url)
        browser.wait("return document.querySelector('.tile, #nodes .empty')")
        size = f"{name}-{width}-{'dark' if dark else 'light'}"
        told = browser.run(SCRIPT)
        if told:  # a node may have taken a step between the page's question and this one's
            time.sleep(POLL)
            told = browser.run(SCRIPT)
        if out is not None:
            browser.picture(out / f"{size}.png", "footer")
        browser.open("about:blank")  # its node may end
        found += [f"{size}: {what}" for what in (*told, *browser.errors())]
    return found


def wave(number: int, period: float) -> float:
    """From 0 to 1 and back."""
    return 0.5 - 0.5 * math.cos(number / period)


def write_steps(log: Path, steps: int, *, alone: bool = False):
    """A `metrics.jsonl` of so many steps. alone: of a node without peers, which still says hello now and then."""
    with log.open("w") as file:
        write(file, 0, evaluated(0.2))
        for number in range(1, steps + 1):
            swing = wave(number, 7.0)
            foreign_groups = 0
            foreign_reward = None
            sent = number / 3
            if not alone:
                foreign_groups = round(16 * swing)
                foreign_reward = 0.4 + 0.4 * swing
                sent = 40_000 * number + 9_000 * swing
            facts = step(
                number,
                event="step",
                own_groups=24 - foreign_groups,
                own_reward=0.3 + 0.5 * swing,
                foreign_groups=foreign_groups,
                foreign_reward=foreign_reward,
                peers=2 + number % 3,
                pool=round(9 * swing),
                seconds={"wait": 1.0, "train": 2.0, "total": PEAKS.get(10 * number / steps, 6.0)},
                bytes_in=sent,
                bytes_out=sent / 2,
            )
            facts["diagnostics"]["foreign"]["excess"] = 2.0 - 4.0 * swing  # over its 100 tokens
            if alone:
                facts["diagnostics"]["foreign"] = {}
            write(file, number, facts)
            if number % max(5, steps // EVALUATIONS) == 0:
                write(file, number, evaluated(0.2 + 0.6 * number / steps))


def write(file: Any, number: int, facts: dict[str, Any]):
    file.write(json.dumps({"time": BEGAN + number, "step": number} | facts) + "\n")


def evaluated(reached: float) -> dict[str, Any]:
    return {
        "event": "evaluation",
        "pass_at_1": reached,
        "low": reached - 0.05,
        "high": reached + 0.05,
    }


def minutes(steps: int, end: float) -> Trend:
    """What an observer keeps of so many minutes until `end`, and a night: nodes, groups a minute, mean pass@1."""
    curve = Trend(HISTORY_ROWS)
    for number in range(steps):
        at = end - MINUTE * (steps - number)
        if number < steps // 2:
            at -= NIGHT
        curve.add(at, 3 + number % 2, 100 * wave(number, 30.0), 0.2 + 0.6 * number / steps)
    return curve
