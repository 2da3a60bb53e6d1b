"""Fuzzes one target or all, each in a process of its own: python -m tests.fuzz all --seconds 600.

What is found is one JSON object on stdout; the exit code is 1 if anything is not as it must be. Inputs that reach
something new are kept under --corpus, and go on from there the next time. Which few of them show all that they show,
libFuzzer says: python -m tests.fuzz.child TARGET FOLDER -merge=1 NEW build/fuzz/TARGET/corpus.
"""

import argparse
import hashlib
import json
import logging
import re
import subprocess
import sys
import time
import timeit
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS

KEPT = Path(__file__).parent / "corpus"
SLOW_MS = 50.0
MEASURED = 5
INPUT_SECONDS = 10
RSS_LIMIT_MB = 2048
GROWTH_MB = 4.0
MEMORY_SECONDS = 30


def write(folder: Path, inputs: Iterable[bytes]) -> Path:
    """The folder, with each input in a file that is named by its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in inputs:
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return folder


def emptied(folder: Path) -> Path:
    """The folder, without the inputs of before."""
    for file in write(folder, []).iterdir():
        file.unlink()
    return folder


def read(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.iterdir())] if folder.is_dir() else []


def fuzz(name: str, seconds: int, home: Path) -> dict[str, Any]:
    """Fuzzes one target, and says what came of it; `problems` is empty if all is well."""
    slow = emptied(home / "slow")
    crashes = write(home / "crashes", [])
    before = set(crashes.iterdir())
    options = (
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_SECONDS}",
        f"-rss_limit_mb={RSS_LIMIT_MB}",
        f"-max_len={TARGETS[name].max_bytes}",
        f"-artifact_prefix={crashes}/",
        "-len_control=0",
        "-print_final_stats=1",
    )
    folders = (
        write(home / "corpus", []),
        write(home / "seeds", TARGETS[name].seeds()),
        write(KEPT / name, []),
    )
    log = home / "log"
    code = _logged(_command("child", name, slow, *options, *folders), log)
    told = {key: int(value) for key, value in re.findall(r"^stat::(\w+):\s+(\d+)$", log.read_text(), re.MULTILINE)}
    slowest = max((measure(name, data) for data in read(slow)), default=0.0)
    new = sorted(str(path) for path in set(crashes.iterdir()) - before)
    problems = [f"it ended with code {code} and {len(new)} findings, see {log}"] if code or new else []
    if slowest > SLOW_MS:
        problems.append(f"an input takes {slowest:.0f} ms, see {slow}")
    again = subprocess.run(_command("memory", name, MEMORY_SECONDS, *folders), capture_output=True, check=False)
    memory = json.loads(again.stdout or "{}")
    if again.returncode:
        problems.append(f"an input fails without the fuzzer: {again.stderr[-500:].decode(errors='replace')}")
    elif memory["end_mb"] > memory["warm_mb"] + GROWTH_MB:
        problems.append(f"memory grew from {memory['warm_mb']:.0f} to {memory['end_mb']:.0f} MB")
    return {
        "problems": problems,
        "crashes": new,
        "executions": told.get("number_of_executed_units"),
        "corpus": len(read(folders[0])),
        "memory": memory,
        "slowest_ms": round(slowest, 2),
    }


def measure(name: str, data: bytes) -> float:
    """Milliseconds of CPU that an input takes; the least of several, for a busy machine makes any slow."""
    return 1000 * min(timeit.repeat(lambda: TARGETS[name].run(data), timer=time.thread_time, number=1, repeat=MEASURED))


def _command(module: str, name: str, *options: object) -> list[str]:
    return [sys.executable, "-m", f"tests.fuzz.{module}", name, *map(str, options)]


def _logged(command: list[str], log: Path) -> int:
    """The exit code; what the process says goes into `log`."""
    with log.open("w") as file:
        return subprocess.run(command, stdout=file, stderr=file, check=False).returncode


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=(*TARGETS, "all"))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz"), help="where inputs are kept")
    options = parser.parse_args()
    logging.disable()
    found = {}
    for name in TARGETS if options.target == "all" else [options.target]:
        home = options.corpus.absolute() / name
        found[name] = fuzz(name, options.seconds, home)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))
    sys.exit(1 if any(one["problems"] for one in found.values()) else 0)


if __name__ == "__main__":
    main()
