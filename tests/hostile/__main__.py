"""Plays attacks against honest daemons on loopback and tells what became of them, as one JSON object on stdout.

Quiet phases and attacks take turns, so that what else the machine does weighs on both alike. The models have all cores
but the last; the rest of the nodes has that one, and attackers take what is left of it, unless --sharing. The exit code
is 1 if a node died, restarted a process or logged an unforeseen error, grew, or blamed an innocent one. Attacks under
which the swarm took fewer than nine tenths of its steps are named in `slow`.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from tests.hostile.arena import Arena, arena
from tests.hostile.attack import Attack
from tests.hostile.attacks import chosen
from tests.hostile.stage import Stage

SLOW = 0.9
WARM_UP_SECONDS = 10.0


async def play(ring: Arena, kinds: Sequence[type[Attack]], seconds: float, *, together: bool, seed: int) -> Any:
    """Everything, one after another or at once."""
    acts = {kind.__name__: [kind] for kind in kinds}
    if together:
        acts = {"together": list(kinds)}
    told = {}
    with tempfile.TemporaryDirectory(prefix="hostile-") as scratch:
        stage = Stage(ring, Path(scratch), seed)
        await stage.watch(min(WARM_UP_SECONDS, seconds / 4))
        for name, act in acts.items():
            told[name] = await stage.act(act, seconds / len(acts))
            print(json.dumps({name: brief(told[name])}), file=sys.stderr, flush=True)
    return told


def brief(found: dict[str, Any]) -> dict[str, Any]:
    """What a person wants to know while it goes on."""
    kept = ("refused", "attackers_groups_used", "groups_used", "memory_peaks", "tracebacks", "dead", "innocents_blamed")
    ratios = {name: round(found[name]["ratio"], 2) for name in ("pace", "cpu_seconds_a_step")}
    return ratios | {name: found[name] for name in kept if found[name]}


def problems(told: dict[str, Any]) -> list[str]:
    """What must not be."""
    found = []
    for name, seen in told.items():
        for kind in ("dead", "tracebacks", "innocents_blamed"):
            found += [f"{name}: {text}" for text in seen[kind]]
        found += [f"{name}: memory of {who} from {a} to {b} MB" for who, (a, b) in seen["memory_grown"].items()]
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--rows", default="all", help="numbers separated by commas, or all")
    parser.add_argument("--seconds", type=float, default=300.0, help="for everything, the start left out")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument(
        "--work", type=int, default=1, help="times the width of the honest models' feed-forward layers: longer steps"
    )
    parser.add_argument("--mixed", action="store_true", help="a text run among models of three tokenizers")
    parser.add_argument("--private", action="store_true", help="a run of invited members; attackers are members too")
    parser.add_argument("--together", action="store_true", help="all attacks at once, not one after another")
    parser.add_argument("--sharing", action="store_true", help="all want all cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="without spaces and line breaks")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the daemons end too
    try:
        kinds = chosen(options.rows, version=2 if options.mixed else 1)
    except ValueError as error:
        parser.error(str(error))
    shape = {"work": options.work, "mixed": options.mixed, "private": options.private}
    with (
        tempfile.TemporaryDirectory(prefix="arena-") as folder,
        arena(Path(folder), options.nodes, **shape) as ring,
    ):
        cores = sorted(os.sched_getaffinity(0))
        if not options.sharing and len(cores) > 1:
            ring.spread(cores[:-1], cores[-1:])
        told = uvloop.run(play(ring, kinds, options.seconds, together=options.together, seed=options.seed))
    found = problems(told)
    paces = {name: seen["pace"]["ratio"] for name, seen in told.items()}
    slow = {name: pace for name, pace in paces.items() if pace < SLOW}
    indent = None if options.json else 1
    print(json.dumps({"problems": found, "slow": slow, "attacks": told}, indent=indent))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
