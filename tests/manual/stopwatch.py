"""``make stopwatch``: how long a new user needs to the first foreign group learned in a private swarm of two.

The README's commands and no others, from a fresh clone in a temporary folder: make's installation, `join --private`,
`invite`, `join ftis:…`. Prints one JSON object of seconds. Both nodes run on this machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOOK_SECONDS = 0.2
PATIENCE = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--installed", type=Path, help="The ftis-node to take; by default a fresh one is installed.")
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="ftis-stopwatch-"))
    try:
        print(json.dumps(measured(place, arguments.installed)))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def measured(place: Path, program: Path | None) -> dict[str, float]:
    """Seconds of each stretch, and in all."""
    began = time.monotonic()
    if program is None:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(place / "ftis-node")], check=True)
        subprocess.run(["make", ".venv/.installed"], cwd=place / "ftis-node", check=True, stdout=subprocess.DEVNULL)
        program = place / "ftis-node" / ".venv" / "bin" / "ftis-node"
    installed = time.monotonic()
    first, second = ("--home", str(place / "first")), ("--home", str(place / "second"))
    try:
        told(program, "join", "--private", "--model", "tiny-a", "--host", "127.0.0.1", "--detach", *first)
        begun = time.monotonic()
        line = told(program, "invite", "--no-qr", *first).strip()
        (place / "invitation").write_text(line)
        told(
            program, "join", str(place / "invitation"), "--model", "tiny-b", "--host", "127.0.0.1", "--detach", *second
        )
        joined = time.monotonic()
        while not status(program, *second).get("foreign_groups_used"):
            if time.monotonic() > joined + PATIENCE:
                raise SystemExit("no foreign group was learned")
            time.sleep(LOOK_SECONDS)
        learned = time.monotonic()
    finally:
        for home in (first, second):
            subprocess.run([program, "stop", "--wait", *home], check=False, capture_output=True)
    return {
        "installation": round(installed - began, 1),
        "first_node": round(begun - installed, 1),
        "second_node": round(joined - begun, 1),
        "first_group_learned": round(learned - joined, 1),
        "without_installation": round(learned - installed, 1),
        "in_all": round(learned - began, 1),
    }


def told(program: Path, *words: str) -> str:
    """The stdout of a command that has to end well; what it says on stderr is shown."""
    return subprocess.run([program, *words], check=True, text=True, stdout=subprocess.PIPE).stdout


def status(program: Path, *home: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(told(program, "status", "--json", *home))
    return answer


if __name__ == "__main__":
    main()
