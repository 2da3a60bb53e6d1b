"""``make real``: real pretrained models through every door, beside plain transformers and peft; a table at the end.

    python -m tests.manual.real [--models FOLDER] [--only NAME,…] [--parts asked,text,…] [--again]

A model is a folder in FOLDER (the environment variable MODELS), else one of the hub's. Each part of each model is a
process of its own. What it found is kept in build/real-suite/MODEL.PART.json and not measured again without `--again`,
so the same command goes on where it was. Exit codes: 0; 1, a check failed; 2, there is no model or no such part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.manual.part import ROOT, run_part

OUT = ROOT / "build" / "real-suite"
# By the name of their folder: the hub's id, and whether a step of all its weights fits into 16 GB.
MODELS = {
    "coder-0.5b": ("Qwen/Qwen2.5-Coder-0.5B-Instruct", True),
    "gemma3-270m": ("google/gemma-3-270m", True),
    "coder-1.5b": ("Qwen/Qwen2.5-Coder-1.5B-Instruct", False),
}
# Parts that need two models, by the models' names.
PAIRS = {"exchange": ("coder-0.5b", "coder-0.5b"), "text-run": ("coder-0.5b", "gemma3-270m")}
LIMIT = 3600.0  # seconds of one part

Row = dict[str, Any]  # a check by name, passed and figure; or a part with its checks


def measured(part: str, names: Sequence[str], sources: Sequence[str], dtype: str) -> Iterator[Row]:
    """The checks of one part, made in this process, as they are found."""
    if part == "device":
        from tests.pretend import device

        device.install()  # before anything of the product is imported
    from tests.manual.real_guard import GUARD_PARTS
    from tests.manual.real_pairs import PAIR_PARTS
    from tests.manual.real_parts import PARTS
    from tests.support.bf16 import multiply_in_fp32

    multiply_in_fp32()
    if part in PAIR_PARTS:
        found = PAIR_PARTS[part](sources[0], sources[1], dtype)
    else:
        _, full = MODELS[names[0]]
        found = (PARTS | GUARD_PARTS)[part](sources[0], dtype, full=full)
    for check in found:
        yield check._asdict()


def run(part: str, names: Sequence[str], sources: Sequence[str], dtype: str, file: Path) -> Row:
    """Make a part's checks in a process that ends after `LIMIT`; keep and return what it found."""
    rows_file = file.with_suffix(".rows")  # what was found so far, if the process is ended
    rows_file.unlink(missing_ok=True)
    words = ["--into", str(rows_file), "--parts", part, "--dtype", dtype, "--only", ",".join(names)]
    began = time.monotonic()
    why = run_part("tests.manual.real", *words, "--sources", *sources, limit=LIMIT)
    rows = json.loads(rows_file.read_text()) if rows_file.exists() else []
    rows_file.unlink(missing_ok=True)
    if why is not None:
        rows.append({"check": part, "passed": False, "figure": why})
    found = {
        "part": part,
        "models": list(names),
        "dtype": dtype,
        "seconds": time.monotonic() - began,
        "checks": rows,
    }
    file.write_text(json.dumps(found, indent=1) + "\n")
    return found


def table(found: Sequence[Row]) -> str:
    """Markdown: a row for each check."""
    lines = ["| model | part | check | | figure |", "|---|---|---|---|---|"]
    verdicts = []
    for one in found:
        models = " + ".join(dict.fromkeys(one["models"]))
        for row in one["checks"]:
            verdict = "ok" if row["passed"] else "FAILED"
            lines.append(f"| {models} | {one['part']} | {row['check']} | {verdict} | {row['figure']} |")
            verdicts.append(row["passed"])
    minutes = sum(one["seconds"] for one in found) / 60
    return "\n".join([*lines, "", f"{sum(verdicts)} of {len(verdicts)} checks hold; {minutes:.0f} minutes."])


def sources_in(folder: str | None) -> dict[str, str]:
    """Where each model is found: its folder, or the hub's id if no folder of models is named."""
    if folder is None:
        return {name: hub for name, (hub, _) in MODELS.items()}
    found = {}
    for name in MODELS:
        place = Path(folder).resolve() / name
        if (place / "config.json").exists():
            found[name] = str(place)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the checks that are not made yet; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=os.environ.get("MODELS") or None, help="A folder of models' folders.")
    parser.add_argument("--only", help="Only these models, by commas.")
    parser.add_argument("--parts", help="Only these parts, by commas.")
    parser.add_argument("--dtype", default="float32", help="bfloat16 is faster on a CPU with AMX.")
    parser.add_argument("--again", action="store_true", help="Make the checks again that are made.")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sources", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.into is not None:
        rows = []
        for row in measured(asked.parts, asked.only.split(","), asked.sources, asked.dtype):
            rows.append(row)
            asked.into.write_text(json.dumps(rows))
        return 0
    from tests.manual.real_guard import GUARD_PARTS
    from tests.manual.real_pairs import PAIR_PARTS
    from tests.manual.real_parts import PARTS

    alone = PARTS | GUARD_PARTS
    sources = sources_in(asked.models)
    names = asked.only.split(",") if asked.only else list(sources)
    parts = asked.parts.split(",") if asked.parts else [*alone, *PAIR_PARTS]
    missing = sorted(set(names) - set(sources))
    if missing or not names:
        print(f"There is no model {', '.join(missing)} in {asked.models}.", file=sys.stderr)
        return 2
    unknown = sorted(set(parts) - alone.keys() - PAIR_PARTS.keys())
    if unknown:
        print(f"There is no part {', '.join(unknown)}.", file=sys.stderr)
        return 2
    work = [(part, (name,)) for name in names for part in alone if part in parts]
    for part, pair in PAIRS.items():
        if part in parts and set(pair) <= set(names):
            work.append((part, pair))
    OUT.mkdir(parents=True, exist_ok=True)
    found = []
    for part, subjects in work:
        file = OUT / f"{'+'.join(dict.fromkeys(subjects))}.{part}.json"
        if file.exists() and not asked.again:
            kept = json.loads(file.read_text())
        else:
            print(f"{' + '.join(subjects)}: {part} …", file=sys.stderr, flush=True)
            kept = run(part, subjects, [sources[name] for name in subjects], asked.dtype, file)
        found.append(kept)
    print(table(found))
    passed = [row["passed"] for one in found for row in one["checks"]]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
