"""``make gpu``: what only a card can tell, beside what was predicted, in ten minutes: gpu.md for an issue, gpu.json.

    python -m tests.manual.gpu [--list] [--parts machine,tests] [--again]
    python -m tests.manual.gpu --device cpu --small     # every part in a tiny form, which shows that it runs
    python -m tests.manual.gpu --predict                # the table of docs/performance.md, without measuring anything

Each part is a process with a time limit of its own. What it measured is kept in build/gpu/PART.json and not measured
again without `--again`, so the same command goes on after a part that failed. No model is downloaded: weights are
random, made from a known geometry. Only `learn` takes real ones, from a folder that the environment variable MODELS
names; each call is a piece of at most ten minutes, and the next goes on. Neither hivemind nor an installation of the
project is needed. Exit codes: 0; 1, a part failed; 2, there is no such device, a library is missing, or a part is
unknown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.manual.part import ROOT, run_part

if TYPE_CHECKING:
    from tests.manual.gpu_page import Figures
    from tests.manual.gpu_place import Place

RATE = 165  # TFLOP/s of an RTX 4090: slower cards have longer
LIBRARIES = (
    "torch",
    "transformers",
    "base58",
    "cryptography",
    "google.protobuf",
    "msgpack",
    "msgspec",
    "peft",
    "psutil",
    "pydantic",
    "pytest",
    "rich",
    "scipy",
    "typer",
)


def run(name: str, place: Place, file: Path, limit: float) -> Figures:
    """Measure a part in a process that is ended after `limit` seconds with all that it started; keep what it found."""
    file.unlink(missing_ok=True)
    words = ["--into", str(file), "--parts", name, "--device", place.device]
    if place.small:
        words.append("--small")
    began = time.monotonic()
    why = run_part("tests.manual.gpu", *words, limit=limit)
    if why is None:
        found = json.loads(file.read_text())
    else:
        found = {"state": "failed", "why": why}
    found |= {
        "part": name,
        "seconds": time.monotonic() - began,
        "device": place.device,
        "small": place.small,
    }
    file.write_text(json.dumps(found, indent=1) + "\n")
    return found


def refusal(device: str) -> str | None:
    """Why nothing can be measured on this device, and what to do; None if it can."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name.split(".")[0]) is None]
    if missing:
        return f"{', '.join(missing)} not installed. `make gpu-wheels` has them for a machine without a package index."
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        return "There is no CUDA device. To see that every part runs: --device cpu --small."
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are not done yet; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="Name the parts and run none.")
    parser.add_argument("--predict", action="store_true", help="Print predicted seconds of a step, and run none.")
    parser.add_argument("--parts", help="Only these, by commas.")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu.")
    parser.add_argument("--small", action="store_true", help="A tiny form, which shows only that it runs.")
    parser.add_argument("--again", action="store_true", help="Measure again what is done.")
    parser.add_argument("--out", type=Path, help="Default: build/gpu; of a CPU or the tiny form build/gpu-tried.")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    measures = not (asked.list or asked.predict)
    reason = refusal(asked.device if measures else "cpu")
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    from tests.manual.gpu_page import page, predicted
    from tests.manual.gpu_parts import PARTS, known_card, measured
    from tests.manual.gpu_place import Place

    names = asked.parts.split(",") if asked.parts else list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    if asked.into is not None:
        place = Place(asked.device, asked.small, known_card(asked.into.parent / "machine.json"), asked.into.parent)
        asked.into.write_text(json.dumps(measured(names[0], place)))
        return 0
    if asked.list:
        for name, part in PARTS.items():
            print(f"{name:16} {part.limit:4.0f} s  {part.about}")
        return 0
    if asked.predict:
        print(predicted())
        return 0
    kept = "gpu"
    if asked.small or asked.device == "cpu":
        kept = "gpu-tried"
    out = asked.out or ROOT / "build" / kept
    found = measure(names, Place(asked.device, asked.small), out.resolve(), again=asked.again)
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    command = shlex.join(["python", "-m", "tests.manual.gpu", *(sys.argv[1:] if arguments is None else arguments)])
    text = page(found, command)
    (out / "gpu.md").write_text(text + "\n")
    print(text)
    return int(any(one["state"] == "failed" for one in found))


def measure(names: Sequence[str], place: Place, out: Path, *, again: bool) -> list[Figures]:
    """What was found of every part by now: of the named ones that are not done, now."""
    from tests.manual.gpu_page import in_a_line
    from tests.manual.gpu_parts import PARTS, known_card

    out.mkdir(parents=True, exist_ok=True)
    found = []
    for name, part in PARTS.items():
        file = out / f"{name}.json"
        kept = json.loads(file.read_text()) if file.exists() else None
        if name in names and again:
            shutil.rmtree(out / name, ignore_errors=True)
            kept = None
        if name in names and (kept is None or kept["state"] != "done"):
            limit = part.limit
            card = known_card(out / "machine.json")
            if card is not None and not place.small:
                limit *= max(1.0, RATE / card.tflops)
            print(f"{name}: {part.about} At most {limit:.0f} s.", file=sys.stderr, flush=True)
            kept = run(name, place, file, limit)
            why = in_a_line(kept.get("why", ""))
            print(f"{name}: {kept['state']}, {kept['seconds']:.0f} s. {why}", file=sys.stderr, flush=True)
        if kept is not None:
            found.append(kept)
    return found


if __name__ == "__main__":
    sys.exit(main())
