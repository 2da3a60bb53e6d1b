"""``make kills``: kill -9 of a real daemon at random moments, again and again; as one JSON object on stdout.

Each time the newest sound checkpoint must be no older than it was, and the same command must go on from it; one was
never damaged. A kill may cost a step where every step is saved, else the minutes between checkpoints and a step; each
start has one of both settings. The exit code is 1 if any of that was not so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis_node.observe.metrics import read_events
from ftis_node.store.checkpoints import CheckpointError, verify
from ftis_node.store.home import Home
from tests.support.daemons import Daemon, gone

MINUTES = (0.0, 0.05)  # between checkpoints, at every other start
WRITE_SECONDS = 10.0  # for which a checkpoint may take to be written on a busy machine; it counts once it is
STEPS_SECONDS = 6.0  # a kill comes within so many seconds after the daemon has begun to train, or before that


def sound_step(home: Home) -> int:
    """The step of the newest sound checkpoint; -1 if there is none."""
    steps = []
    for directory in home.checkpoints.glob("step-*"):
        if directory.suffix:
            continue
        try:
            steps.append(int(verify(directory)["progress"]["step"]))
        except CheckpointError:
            continue
    return max(steps, default=-1)


@dataclass(frozen=True)
class Loss:
    """What a kill took: finished steps, and from the first of them to the last their seconds. minutes: the setting."""

    minutes: float
    steps: int
    seconds: float
    longest_step: float

    def problem(self) -> str | None:
        """Why that is more than the setting allows."""
        if self.minutes == 0 and self.steps > 1:
            return f"{self.steps} steps lost where each is saved"
        if self.seconds > 60 * self.minutes + self.longest_step + WRITE_SECONDS:
            return f"{self.seconds:.1f} s lost with {60 * self.minutes:.0f} s between checkpoints"
        return None


def loss(steps: Sequence[dict[str, Any]], saved: int, minutes: float) -> Loss:
    """Of the steps of one start, those after the newest checkpoint.

    Args:
        steps: events; saved: the step of the newest checkpoint.
    """
    lost = [event for event in steps if event["step"] > saved]
    seconds = lost[-1]["time"] - lost[0]["time"] if lost else 0.0
    return Loss(minutes, len(lost), seconds, max((event["seconds"]["total"] for event in steps), default=0.0))


def play(folder: Path, kills: int, rng: random.Random) -> dict[str, Any]:
    """Kills a daemon so many times; what was seen."""
    problems: list[str] = []
    states: Counter[str] = Counter()
    lost: list[Loss] = []
    node = Daemon(folder / "node", "--model", "tiny-a")
    saved, seen = -1, 0
    try:
        flags = node.flags
        for number in range(kills):
            minutes = MINUTES[number % len(MINUTES)]
            node.flags = (*flags, "--set", f"checkpoint_minutes={minutes}")
            node.start()
            states[moment(node, rng)] += 1
            family = node.kill()
            gone(family, 20)
            now = sound_step(node.home)
            steps = read_events(node.home.metrics, "step")[seen:]
            seen += len(steps)
            if now < saved:
                problems.append(f"kill {number}: the newest sound checkpoint went from step {saved} to {now}")
            if steps and now >= 0:
                lost.append(loss(steps, now, minutes))
                if (problem := lost[-1].problem()) is not None:
                    problems.append(f"kill {number}: {problem}")
            saved = max(saved, now)
            print(json.dumps({"kill": number, "saved": saved}), file=sys.stderr, flush=True)
        node.start()
        after = node.wait(lambda s: s.get("step", 0) >= saved + 2, "it goes on at last")
        if node.stop() != 0:
            problems.append("the last end was not clean")
    finally:
        node.clean_up()
    resumed = [event["step"] for event in read_events(node.home.metrics, "resumed")]
    if resumed != sorted(resumed):
        problems.append(f"it went on from an older checkpoint: {resumed}")
    if list(node.home.checkpoints.glob("*.damaged")):
        problems.append("a checkpoint was damaged")
    if (again := batches_twice(read_events(node.home.metrics, "step"))) > 0:
        problems.append(f"{again} packets were in two batches")
    if "Traceback" in node.log():
        problems.append("a traceback in the log")
    return {
        "kills": kills,
        "killed_while": dict(states),
        "steps": after["step"],
        "lost": [told(minutes, [one for one in lost if one.minutes == minutes]) for minutes in MINUTES],
        "problems": problems,
    }


def told(minutes: float, lost: Sequence[Loss]) -> dict[str, Any]:
    """What the kills cost with this setting."""
    steps, seconds = [one.steps for one in lost], [one.seconds for one in lost]
    return {
        "checkpoint_minutes": minutes,
        "kills": len(lost),
        "steps": {"mean": sum(steps) / len(steps) if steps else None, "most": max(steps, default=None)},
        "most_seconds": max(seconds, default=None),
    }


def batches_twice(steps: Sequence[dict[str, Any]]) -> int:
    """Packets that more than one step was taken on, also where the first of them was lost."""
    used = Counter(digest for event in steps for kind in ("own", "foreign") for digest in event["batch"][kind])
    return sum(count > 1 for count in used.values())


def moment(node: Daemon, rng: random.Random) -> str:
    """Waits until a random moment of the daemon's life, and says which part of it that is."""
    if rng.random() < 0.1:  # anywhere in the start
        time.sleep(rng.uniform(0.0, 6.0))
        return node.status().get("state", "starting")
    node.wait(lambda s: s.get("checkpoint", {}).get("step") is not None, "it trains")
    node.wait(lambda s: s["state"] not in ("LOADING", "JOINING"), "it trains")
    until = time.monotonic() + rng.uniform(0.0, STEPS_SECONDS)
    chosen = rng.choice(("any", "partial"))
    while time.monotonic() < until:
        if chosen == "partial" and list(node.home.checkpoints.glob("*.partial")):
            return "writing a checkpoint"
        time.sleep(0.002)
    return "training"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.manual.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        told = play(Path(folder), options.kills, random.Random(options.seed))
    print(json.dumps(told, indent=1))
    sys.exit(1 if told["problems"] else 0)


if __name__ == "__main__":
    main()
