"""``make gpu``: what only a card can tell, in ten minutes; a table for docs/performance.md, and one JSON.

    python -m tests.manual.gpu [--list] [--parts machine,tests] [--again] [--json]
    python -m tests.manual.gpu --device cpu --small     # every part in a tiny form, which shows that it runs

Each part is a process with a time limit of its own. What it measured is kept in build/gpu/PART.json and not measured
again without `--again`, so the same command goes on after a part that failed. No model is downloaded: weights are
random, made from a known geometry. Neither hivemind nor an installation of the project is needed. Exit codes: 0; 1, a
part failed; 2, there is no such device, a library is missing, or a part is unknown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ftis_node.host.allocator import expand_segments

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    *("torch", "transformers", "base58", "cryptography", "google.protobuf", "msgpack", "msgspec", "peft", "psutil"),
    *("pydantic", "pytest", "rich", "scipy", "typer"),
)
LAB = """
name = "two"
title = "Two nodes"
about = "Two nodes take some steps and learn from one another."
seeds = [0]
steps = {steps}
settings = {{ device = "{device}", batch_groups = {groups}, eval_prompts = 16 }}
nodes = [{{ name = "A", model = "tiny-a" }}, {{ name = "B", model = "tiny-b" }}]
cells = [{{ name = "both", pace = "free" }}]
"""
Figures = dict[str, Any]


class Skipped(Exception):
    """This checkout or this machine has nothing for a part; says why."""


@dataclass(frozen=True)
class Place:
    """Where parts run, and whether in a tiny form."""

    device: str
    small: bool

    def settings(self, model: str, **wished: Any) -> Any:
        """Settings of a model; in the tiny form of the smallest one.

        Raises:
            Skipped: there is no such setting yet.
        """
        from ftis_node.config.settings import Settings, collect

        for name in wished.keys() - Settings.model_fields.keys():
            raise Skipped(f"there is no setting {name}")
        chosen = {"model": "tiny-a" if self.small else model, "device": self.device, **wished}
        return collect(task="", flags=chosen, environment={})[0]

    def size(self, groups: int) -> Any:
        """Prompts of 60 tokens, each with 12 completions of 256."""
        from ftis_node.lab.bench.model import Size

        return Size(2, 2, 8, 8) if self.small else Size(groups, 12, 60, 256)


def tell(line: str) -> None:
    print(f"    {line}", file=sys.stderr, flush=True)


# --- what is measured -------------------------------------------------------------------------------------------------


def machine(place: Place) -> Figures:
    """Names, the rate of a large product of bf16 matrices, and of a copy."""
    import torch

    from ftis_node.lab.bench.generate import bandwidth
    from ftis_node.lab.bench.measure import device_name, timed
    from ftis_node.observe.provenance import commit, versions

    device, width, cuda = torch.device(place.device), 256 if place.small else 8_192, place.device != "cpu"
    left, right = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = [timed(lambda: left @ right, device)[1] for _ in range(13)][3:]
    return {
        "device": device_name(device),
        "memory_gb": torch.cuda.get_device_properties(device).total_memory / 1e9 if cuda else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if cuda else None,
        "matrix_flops": 2 * width**3 / statistics.median(seconds),
        "copy_bytes_per_s": None if place.small else bandwidth(device),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "commit": commit(),
        "versions": versions(),
    }


def tests(place: Place) -> Figures:
    """The tests marked `gpu`, without conftest.py, which needs hivemind."""
    marked = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    line = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-m", "gpu"]
    environment = os.environ | {"GPU_TESTS_ON": place.device}
    ended = subprocess.run([*line, *map(str, marked)], cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{ended.stdout[-4000:]}{ended.stderr[-2000:]}")
    last = ended.stdout.strip().splitlines()[-1]
    return {how: int(number) for number, how in re.findall(r"(\d+) (passed|skipped)", last)}


def generation(place: Place, **wished: Any) -> Figures:
    """Tokens a second of the native engine, of transformers' `generate` with log-probs and without, in turns."""
    from ftis_node.config.settings import Settings
    from ftis_node.lab.bench.generate import bench_generate, sized_policy

    if "cuda_graphs" in Settings.model_fields:
        wished.setdefault("cuda_graphs", False)
    settings, size = place.settings("qwen2.5-1.5b", **wished), place.size(24)
    policy, batch = sized_policy(settings, size, random_weights=True)
    return bench_generate(policy, size, batch=batch, repeats=1 if place.small else 2, tell=tell)


def training(place: Place, model: str, **wished: Any) -> Figures:
    """Steps and a generation: tokens a second, operations a second, and memory beside the plan.

    Operations are 6 (LoRA: 4) for each weight of a matrix and each token, prompts too; attention and what
    checkpointing computes again do not count.
    """
    from ftis_node.lab.bench.fit import bench_fit

    size = place.size(12)
    settings = place.settings(model, **wished)
    figures = bench_fit(settings, size, random_weights=True, repeats=1 if place.small else 2, tell=tell)
    shape = figures["model"]
    embedding = 0 if shape["tie_word_embeddings"] else shape["vocab_size"] * shape["hidden_size"]
    tokens = size.tokens + size.groups * size.prompt_tokens
    operations = (4 if figures["kind"] == "lora" else 6) * (figures["parameters"] - embedding) * tokens
    return figures | {"operations_per_s": operations / figures["step_s"]}


def whole_step(place: Place) -> Figures:
    """Seconds of a step of the daemon's stepper with a 0.5B in full, from prompts to changed weights."""
    from ftis_node.lab.bench.model import small_config
    from ftis_node.lab.bench.whole import WholeNode
    from ftis_node.policy.measure import known_config

    config = small_config() if place.small else known_config("qwen2.5-0.5b")
    devices = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        node = stack.enter_context(contextlib.closing(WholeNode(config, place.size(12), folder, device=place.device)))
        for step in range(2 if place.small else 4):
            tell(f"step {step}" if step else "a step to warm up")
            devices.append(asyncio.run(node.step())["device"])
    parts = ("step_total", "generate", "score", "train", "step_idle")
    return {part: statistics.median(each[part] for each in devices[1:]) for part in parts}


def two_nodes(place: Place) -> Figures:
    """Steps of two built-in models in one run, by the lab's exchange."""
    steps = 2 if place.small else 20
    with tempfile.TemporaryDirectory() as folder:
        toml, out = Path(folder) / "two.toml", Path(folder) / "out"
        toml.write_text(LAB.format(steps=steps, device=place.device, groups=4 if place.small else 24))
        line = [sys.executable, "-m", "ftis_node", "lab", "run", str(toml), "--out", str(out), "--jobs", "1"]
        began = time.perf_counter()
        subprocess.run(line, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        (events,) = (out / "trials").glob("*/events.jsonl")
        taken = [one for one in map(json.loads, events.read_text().splitlines()) if one["event"] == "step"]
    if len(taken) != 2 * steps:
        raise RuntimeError(f"{len(taken)} steps of {2 * steps} were taken")
    return {"steps": len(taken), "seconds": seconds, "step_s": seconds / len(taken)}


@dataclass(frozen=True)
class Part:
    """limit: seconds after which it is ended."""

    limit: float
    measure: Callable[[Place], Figures]

    @property
    def about(self) -> str:
        whole = self.measure if isinstance(self.measure, partial) else partial(self.measure)
        wished = ", ".join(f"{name} {value}" for name, value in whole.keywords.items())
        return f"{(whole.func.__doc__ or '').splitlines()[0]}{f' With {wished}.' if wished else ''}"


PARTS: Mapping[str, Part] = {
    "machine": Part(60, machine),
    "tests": Part(150, tests),
    "generate": Part(240, generation),
    "generate-graphs": Part(240, partial(generation, cuda_graphs=True)),
    "1.5b-full": Part(180, partial(training, model="qwen2.5-1.5b", lora=False)),
    "3b-lora": Part(180, partial(training, model="qwen2.5-3b", lora=True)),
    "3b-nf4": Part(180, partial(training, model="qwen2.5-3b", lora=True, quantisation="nf4")),
    "7b-nf4": Part(180, partial(training, model="qwen2.5-7b", lora=True, quantisation="nf4")),
    "step": Part(120, whole_step),
    "two-nodes": Part(180, two_nodes),
}


# --- a part in its process --------------------------------------------------------------------------------------------


def measured(name: str, place: Place) -> Figures:
    """What a part found: `state` is done, skipped or failed; `figures`, or `why` there are none."""
    from ftis_node.errors import FtisError

    try:
        return {"state": "done", "figures": PARTS[name].measure(place)}
    except Skipped as reason:
        return {"state": "skipped", "why": str(reason)}
    except FtisError as error:
        return {"state": "failed", "why": str(error)[:1000]}
    except Exception as error:  # one part must not end the others
        traceback.print_exc()
        return {"state": "failed", "why": f"{type(error).__name__}: {str(error)[-1000:]}"}


def run(name: str, place: Place, file: Path, limit: float) -> Figures:
    """Measure a part in a process that is ended after `limit` seconds with all that it started; keep what it found."""
    file.unlink(missing_ok=True)
    line = [sys.executable, "-m", "tests.manual.gpu", "--into", str(file), "--parts", name, "--device", place.device]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    expand_segments(environment)  # before torch is imported, as in the compute process
    began = time.monotonic()
    child = subprocess.Popen(
        [*line, *(["--small"] if place.small else [])], cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        child.wait(limit)
        found = {"state": "failed", "why": f"its process ended with code {child.returncode}"}
    except subprocess.TimeoutExpired:
        found = {"state": "failed", "why": f"it took longer than {limit:g} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if file.exists() and child.returncode == 0:
        found = json.loads(file.read_text())
    found |= {"part": name, "seconds": time.monotonic() - began, "device": place.device, "small": place.small}
    file.write_text(json.dumps(found, indent=1) + "\n")
    return found


# --- the table --------------------------------------------------------------------------------------------------------


def table(found: Sequence[Figures]) -> str:
    """Markdown: a row for each part, with what it found and what was aimed at."""
    rates = [one["figures"]["matrix_flops"] for one in found if one["part"] == "machine" and one["state"] == "done"]
    rows = ["| part | measured | aim |", "|---|---|---|"]
    for one in found:
        said, aim = _row(one["part"], one["figures"], rates) if one["state"] == "done" else ("", "")
        rows.append(f"| {one['part']} | {said or one['state'] + ': ' + _line(one['why'])} | {aim} |")
    return "\n".join(rows)


def _line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[-300:]


def _row(part: str, seen: Figures, rates: Sequence[float]) -> tuple[str, str]:
    if part == "machine":
        copies = f", copies {seen['copy_bytes_per_s'] / 1e9:,.0f} GB/s" if seen["copy_bytes_per_s"] else ""
        return f"{seen['device']}: bf16 matrices {seen['matrix_flops'] / 1e12:,.3g} TFLOP/s{copies}", ""
    if "over_floor" in seen:
        floor = f"; {seen['over_floor']:.2f} × the bandwidth's time" if seen["over_floor"] else ""
        speed = f"{seen['native_tokens_per_s']:,.0f} tokens/s, `hf` {seen['hf_tokens_per_s']:,.0f}"
        return f"{speed}: {seen['ratio_hf']:.2f} ×{floor}", "5 × `hf` on an H200; 2 × the bandwidth's time"
    if "operations_per_s" in seen:
        way = f"{seen['kind']}, {seen['dtype']}{', checkpointing' if seen['gradient_checkpointing'] else ''}"
        share = f", {seen['operations_per_s'] / rates[0]:.0%} of the matrix rate" if rates else ""
        memory = f"{seen['peak_memory_mb'] / 1e3:.2f} GB of {seen['predicted_memory_mb'] / 1e3:.2f} predicted"
        speed = f"{seen['train_tokens_per_s']:,.0f} tokens/s{share}"
        return f"{way}, micro-batches of {seen['micro_batch_tokens']:,}: {speed}; {memory}", "40 %; memory within 10 %"
    return ", ".join(f"{name} {value:.4g}" for name, value in seen.items()), ""


# --- the command ------------------------------------------------------------------------------------------------------


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
    parser.add_argument("--parts", default=",".join(PARTS), help="Only these, by commas.")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu.")
    parser.add_argument("--small", action="store_true", help="A tiny form, which shows only that it runs.")
    parser.add_argument("--again", action="store_true", help="Measure again what is done.")
    parser.add_argument("--out", type=Path, help="Default: build/gpu; of a CPU or the tiny form build/gpu-tried.")
    parser.add_argument("--json", action="store_true", help="Print the JSON in place of the table.")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    names = asked.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    place = Place(asked.device, asked.small)
    if asked.into is not None:
        asked.into.write_text(json.dumps(measured(names[0], place)))
        return 0
    if asked.list:
        print("\n".join(f"{name:16} {part.limit:4.0f} s  {part.about}" for name, part in PARTS.items()))
        return 0
    if reason := refusal(asked.device):
        print(reason, file=sys.stderr)
        return 2
    out = asked.out or ROOT / "build" / ("gpu-tried" if asked.small or asked.device == "cpu" else "gpu")
    found = list(measure(names, place, out.resolve(), again=asked.again))
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "gpu.md").write_text(table(found) + "\n")
    print(json.dumps(found) if asked.json else table(found))
    return int(any(one["state"] == "failed" for one in found))


def measure(names: Sequence[str], place: Place, out: Path, *, again: bool) -> list[Figures]:
    """What was found of every part by now: of the named ones that are not done, now."""
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for name, part in PARTS.items():
        file = out / f"{name}.json"
        kept = json.loads(file.read_text()) if file.exists() else None
        if name in names and (again or kept is None or kept["state"] != "done"):
            print(f"{name}: {part.about} At most {part.limit:g} s.", file=sys.stderr, flush=True)
            kept = run(name, place, file, part.limit)
            why = _line(kept.get("why", ""))
            print(f"{name}: {kept['state']}, {kept['seconds']:.0f} s. {why}", file=sys.stderr, flush=True)
        found += [kept] if kept is not None else []
    return found


if __name__ == "__main__":
    sys.exit(main())
