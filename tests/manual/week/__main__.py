"""A week of use, seen through: `python -m tests.manual.week`, as root.

In build/week are the nodes' homes, `samples.jsonl`, `events.jsonl`, pictures of all pages and, in the end, `table.txt`
with what is wrong; then the exit code is 1.
"""

import argparse
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.manual.week.deeds import Deeds
from tests.manual.week.diary import ROLES, Role, plan
from tests.manual.week.fleet import fleet
from tests.manual.week.gauges import Album, Apart, Gauges, repeated
from tests.manual.week.verdict import judge
from tests.support.browser import missing

OUT = Path("build/week").resolve()
APART_SECONDS = 120.0
VIEW_SECONDS = 3.0


def week(seconds: float, seed: int, roles: list[Role]) -> tuple[list[str], list[str]]:
    """A table of what was measured, and what is wrong."""
    with fleet(OUT, roles) as found, ExitStack() as measured, ExitStack() as looking:
        album = Album(found)
        gauges = Gauges(found)
        views = {role.run: Apart(APART_SECONDS) for role in roles}
        looking.enter_context(repeated(VIEW_SECONDS, album.look_if_due))
        found.start()
        deeds = Deeds(found, seed)
        began = time.monotonic()
        measured.enter_context(repeated(min(60.0, seconds / 60), gauges.sample))
        for run, view in views.items():
            measured.enter_context(repeated(VIEW_SECONDS, partial(view.sample, found.of(run), deeds.half)))
        for event in plan(seconds, seed, [role.name for role in roles]):
            time.sleep(max(0.0, began + event.at - time.monotonic()))
            deeds.do(event)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        looking.close()
        for member in found:
            album.look(member, "end")
        measured.close()
        until = time.time()
        codes = {member.role.name: member.stop() for member in found}
        problems = [*deeds.problems, *album.faults, *(f"left: {what}" for what in found.left())]
        problems += [f"{name} ended with {code}" for name, code in codes.items() if code]
        told = [f"not come to these steps: {album.due}"]
        for run, view in views.items():
            longest = max(view.times, default=0.0)
            told.append(f"{run}: {len(view.times)} times a pair met again, after {longest:.0f} s at most")
            problems += [f"{pair} of run {run} were apart for {long:.0f} s" for pair, long in view.late.items()]
        try:
            judged, wrong = judge(found, gauges.rows, until)
        except Exception:  # what else was measured is not lost
            judged = []
            wrong = [traceback.format_exc()]
    return [*judged, *told], [*problems, *wrong]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.manual.week", description=__doc__)
    parser.add_argument("--seconds", type=float, default=7200.0, help="for seven days, the start left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="these runs, separated by commas: open,text,wide,own")
    options = parser.parse_args()
    if (why := missing()) is not None:
        sys.exit(f"make week {why}")
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is cleaned up
    shutil.rmtree(OUT, ignore_errors=True)
    roles = [role for role in ROLES if not options.only or role.run in options.only.split(",")]
    told, problems = week(options.seconds, options.seed, roles)
    text = "\n".join([*told, f"{len(problems)} problems", *problems])
    (OUT / "table.txt").write_text(text + "\n")
    print(text)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
