"""``python -m tests.kills``: kill -9 of a real daemon at random moments, again and again; as one JSON object on stdout.

Each time the newest sound checkpoint must be no older than it was, and the same command must go on from it; one was
never damaged. The exit code is 1 if any of that was not so.
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
from pathlib import Path
from typing import Any

from ftis_node.observe.metrics import read_events
from ftis_node.store.checkpoints import CheckpointError, verify
from ftis_node.store.home import Home
from tests.daemons import Daemon, gone

STEPS_SECONDS = 4.0  # a kill comes within so many seconds after the daemon has begun to train, or before that


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


def play(folder: Path, kills: int, rng: random.Random) -> dict[str, Any]:
    """Kills a daemon so many times; what was seen."""
    problems: list[str] = []
    states: Counter[str] = Counter()
    lost: list[int] = []
    node = Daemon(folder / "node", "--model", "tiny-a")
    saved, seen = -1, 0
    try:
        for number in range(kills):
            node.start()
            states[moment(node, rng)] += 1
            family = node.kill()
            gone(family, 20)
            now = sound_step(node.home)
            steps = [event["step"] for event in read_events(node.home.metrics, "step")][seen:]
            seen += len(steps)
            if now < saved:
                problems.append(f"kill {number}: the newest sound checkpoint went from step {saved} to {now}")
            if steps and now >= 0:
                lost.append(max(0, steps[-1] - now))
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
    if "Traceback" in node.log():
        problems.append("a traceback in the log")
    return {
        "kills": kills,
        "killed_while": dict(states),
        "steps": after["step"],
        "steps_lost": {"mean": sum(lost) / len(lost) if lost else None, "most": max(lost, default=None)},
        "problems": problems,
    }


def moment(node: Daemon, rng: random.Random) -> str:
    """Waits until a random moment of the daemon's life, and says which part of it that is."""
    if rng.random() < 0.1:  # anywhere in the start
        time.sleep(rng.uniform(0.0, 6.0))
        return node.status().get("state", "starting")
    node.wait(lambda s: s.get("step") is not None and s["state"] not in ("LOADING", "JOINING"), "it trains")
    until = time.monotonic() + rng.uniform(0.0, STEPS_SECONDS)
    chosen = rng.choice(("any", "partial"))
    while time.monotonic() < until:
        if chosen == "partial" and list(node.home.checkpoints.glob("*.partial")):
            return "writing a checkpoint"
        time.sleep(0.002)
    return "training"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__)
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
