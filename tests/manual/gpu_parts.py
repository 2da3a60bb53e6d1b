"""What `make gpu` measures, each part beside what was predicted of it (`lab/step_seconds.py`, `fit`)."""

import asyncio
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub import try_to_load_from_cache
from torch.nn import functional
from transformers import MistralConfig

from ftis_node.config.settings import Settings, collect
from ftis_node.errors import FtisError
from ftis_node.fit.geometry import Geometry
from ftis_node.fit.memory import CONTEXT_BYTES, NF4_BYTES, Workload
from ftis_node.fit.plan import Plan, Wishes, plan
from ftis_node.host.allocator import FIXED, GROWING, NAMES
from ftis_node.lab.bench import model as random_models
from ftis_node.lab.bench.devices import bench_devices
from ftis_node.lab.bench.fit import bench_fit
from ftis_node.lab.bench.generate import compare
from ftis_node.lab.bench.measure import device_name, timed
from ftis_node.lab.bench.model import Size, named_policy, own_work, planned
from ftis_node.lab.bench.whole import WholeNode
from ftis_node.lab.step_seconds import CARDS, DEQUANTISED, Card, Work, generating
from ftis_node.lab.step_seconds import training as seconds_to_train
from ftis_node.learner.loss_scale import FIRST
from ftis_node.observe.provenance import commit, versions
from ftis_node.policy.generate import native
from ftis_node.policy.generate.graphs import Graphs, failed
from ftis_node.policy.load import fastest_dtype
from ftis_node.policy.measure import geometry, geometry_of, known_config
from ftis_node.policy.names import resolve
from ftis_node.policy.nf4 import NF4Linear
from ftis_node.policy.room import Room, fitting
from ftis_node.preflight.machine import _driver, _version
from ftis_node.text import GB
from tests.manual.gpu_learn import run_piece
from tests.manual.gpu_page import Figures, line

ROOT = Path(__file__).parents[2]
FUSED = {"8.6": 128, "8.9": 256}  # rows by capability; elsewhere 64 (bitsandbytes 0.50)
TRAINED = 6  # groups, which fill the largest micro-batch


class Skipped(Exception):
    """This machine has nothing for a part; says why."""


@dataclass(frozen=True)
class Place:
    """Where parts run, whether in a tiny form, the card with the rates that `machine` measured, and a folder for what
    outlives a call."""

    device: str
    small: bool
    card: Card | None = None
    out: Path = ROOT / "build" / "gpu-tried"

    @property
    def on(self) -> torch.device:
        return torch.device(self.device)

    @property
    def half(self) -> torch.dtype:
        return getattr(torch, fastest_dtype(self.on)) if self.on.type == "cuda" else torch.bfloat16

    def settings(self, model: str, **wished: Any) -> Settings:
        """Settings of a model; in the tiny form of the smallest one."""
        chosen = {"model": "tiny-a" if self.small else model, "device": self.device, **wished}
        return collect(task="", flags=chosen, environment={})[0]

    def size(self, groups: int) -> Size:
        """Prompts of 60 tokens, each with 12 completions of 256."""
        return Size(2, 2, 8, 8) if self.small else Size(groups, 12, 60, 256)

    def seconds(self, phase: Callable[..., float], shape: Geometry, chosen: Plan, size: Size) -> float | None:
        """Predicted; None before the card's rates are known."""
        work = Work(size.groups, size.group, size.prompt_tokens, size.completion_tokens, size.completion_tokens)
        return phase(shape, chosen, work, self.card) if self.card else None

    def rate(self, phase: Callable[..., float], shape: Geometry, chosen: Plan, size: Size) -> float | None:
        """Predicted completion tokens a second."""
        seconds = self.seconds(phase, shape, chosen, size)
        return size.tokens / seconds if seconds else None


tell = partial(print, "   ", file=sys.stderr, flush=True)


def machine(place: Place) -> Figures:
    """The card, versions, the rate of a large product of 16-bit matrices, and of a copy."""
    device, width = place.on, 256 if place.small else 8_192
    cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    left, right = (torch.randn(width, width, device=device, dtype=place.half) for _ in range(2))
    flops = 2 * width**3 / statistics.median([timed(lambda: left @ right, device)[1] for _ in range(13)][3:])
    source = torch.empty(1 << 26 if place.small else 1 << 30, dtype=torch.uint8, device=device)  # larger than any cache
    target, name = torch.empty_like(source), device_name(device)
    copied = 2 * source.nbytes / min(timed(lambda: target.copy_(source), device)[1] for _ in range(5))
    sheet = next((card for known, card in CARDS.items() if known.rsplit(" ", 2)[0] in name), None)
    capability = f"{cuda.major}.{cuda.minor}" if cuda else ""
    card = Card("cuda", cuda.total_memory / GB if cuda else 0, flops / 1e12, copied / 1e9, FUSED.get(capability, 64))
    return {
        "lines": [
            line(f"{place.half} products", flops / 1e12, sheet.tflops if sheet else None, "TFLOP/s"),
            line("copies", copied / 1e9, sheet.bandwidth if sheet else None, "GB/s"),
        ],
        "card": asdict(card),
        "device": name,
        "memory_gb": card.vram,
        "capability": capability,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "wsl2": "microsoft" in Path("/proc/sys/kernel/osrelease").read_text().lower(),
        "allocator": os.environ.get(NAMES[1]),
        "commit": commit(),
        "versions": versions() | {name: _version(name) for name in ("bitsandbytes", "triton")},
    }


def tests(place: Place) -> Figures:
    """The tests marked `gpu`, without conftest.py, which needs hivemind."""
    marked = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-m", "gpu"]
    environment = os.environ | {"GPU_TESTS_ON": place.device}
    ended = subprocess.run([*command, *map(str, marked)], cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{ended.stdout[-4000:]}{ended.stderr[-2000:]}")
    last = ended.stdout.strip().splitlines()[-1]
    return {"lines": [line(how, int(number)) for number, how in re.findall(r"(\d+) (passed|skipped)", last)]}


def allocation(place: Place) -> Figures:
    """The first allocation of a process with segments that grow, which WSL2 may refuse, and of fixed size."""
    program = f"import torch; print(torch.ones(1, device='{place.device}').item())"
    lines = []
    for way in (GROWING, FIXED):
        environment = os.environ | {NAMES[1]: way}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        why = (ended.stderr.strip().splitlines() or [f"code {ended.returncode}"])[-1]
        lines.append(line(way, why if ended.returncode else "works", "works"))
    return {"lines": lines}


def generation(place: Place) -> Figures:
    """Tokens a second of the native engine, of transformers' `generate`, in turns."""
    size = place.size(12)
    settings, chosen = planned(place.settings("qwen2.5-1.5b"), size, steps=False)
    policy = named_policy(settings, random_weights=True)
    seen = compare(policy, size, batch=chosen.generation_batch, repeats=1, tell=tell)
    expected = place.rate(generating, geometry(settings.model), chosen, size)
    names = [name for name in ("plain", "nf4") if f"{name}_tokens_per_s" in seen]
    lines = [line("native", seen["native_tokens_per_s"], expected, "tokens/s")]
    lines += [line(name, seen[f"{name}_tokens_per_s"], None, "tokens/s") for name in names]
    return {"lines": lines, **seen}


def graphs(place: Place, model: str) -> Figures:
    """Tokens a second with CUDA graphs and without; captures, and what stays reserved."""
    size, before = place.size(24), Graphs._captured
    taken = []
    settings, chosen = planned(place.settings(model), size, steps=False)
    policy = named_policy(settings, random_weights=True)

    def captured(*given: Any) -> Any:
        made, seconds = timed(lambda: before(*given), place.on)
        taken.append(seconds)
        return made

    def run(graphs: bool) -> float:
        one = replace(policy, graphs=graphs and policy.graphs)
        return timed(lambda: own_work(one, size, chosen.generation_batch), place.on)[1]

    with patch.object(Graphs, "_captured", captured):
        first, count = run(True), len(taken)
        later = run(True)
    reserved = torch.cuda.memory_reserved(place.on) / 1e9 if policy.device.type == "cuda" else None
    run(False)
    expected = place.rate(generating, geometry(settings.model), chosen, size)
    needs = chosen.memory.weights + chosen.memory.kv_cache + chosen.memory.sampling  # nothing is trained here
    lines = [
        line("with graphs", size.tokens / later, expected, "tokens/s"),
        line("without", size.tokens / run(False), None, "tokens/s"),
        line("first generation", first, None, "s"),
        line("captures of it", count),
        line("a capture", 1e3 * statistics.mean(taken) if taken else None, 40, "ms at most"),
        line("captures of the second", len(taken) - count, 0),
        line("reserved", reserved, needs / 1e9, "GB"),
    ]
    return {"lines": lines, "capture_seconds": taken}


def products(place: Place) -> Figures:
    """A product with weights of four bits (the MLP of 7B): as decoding does it, and dequantised."""
    inputs, outputs = (512, 1_408) if place.small else (3_584, 18_944)
    module = NF4Linear(torch.nn.Linear(inputs, outputs, bias=False), place.on, place.half)
    ways = {"decoding": module.product, "dequantised": lambda x: functional.linear(x, module.dense())}
    weights, lines = inputs * outputs, []
    for rows in (12, 48, 96, 288):
        x = torch.randn(rows, inputs).to(place.on, module.dtype)
        for way, product in ways.items():
            with torch.inference_mode():
                taken = [timed(partial(product, x), place.on)[1] for _ in range(30)][10:]
            more = DEQUANTISED if way == "dequantised" or (place.card and rows > place.card.fused) else 0
            expected = place.card.product((NF4_BYTES + more) * weights, weights, rows) * 1e6 if place.card else None
            lines.append(line(f"{rows} rows, {way}", 1e6 * statistics.median(taken), expected, "µs"))
    return {"lines": lines}


def shortage(place: Place) -> Figures:
    """Memory runs out while the first graph is captured (without graphs: at the first token)."""
    size, cuda = place.size(4), place.on.type == "cuda"
    settings, chosen = planned(place.settings("qwen2.5-0.5b"), size, steps=False)
    policy = named_policy(settings, random_weights=True)
    met = []

    owner, name = (Graphs, "_captured") if cuda else (native._Decoding, "run")
    before = getattr(owner, name)

    def short(*given: Any) -> Any:
        if met:
            return before(*given)
        met.append(1)
        if not cuda:
            raise torch.OutOfMemoryError("out of memory: so is a CPU in this part")
        filled = []
        for block in (1 << 30, 64 << 20, 2 << 20):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    filled.append(torch.empty(block, dtype=torch.uint8, device=place.on))
        try:
            return before(*given)
        finally:
            filled.clear()

    with patch.object(owner, name, short):
        room, least = Room(chosen.generation_batch), {"there": size.completions, "least": size.group}
        work = fitting(lambda rows: own_work(policy, size, rows), room, **least)
    tokens = sum(len(one) for group in work.completions for one in group)
    lines = [line("shortages", len(met), 1), line("tokens all the same", tokens, size.tokens)]
    return {"lines": [*lines, line("graphs can be used", "no" if failed() else "yes", "yes")]}


def training(place: Place, model: str, vram_gb: float | None = None) -> Figures:
    """A generation that fills its places, and steps on six groups: speed, MFU, and memory beside `fit`."""
    if vram_gb and place.card and place.on.type == "cuda" and place.card.vram < 0.9 * vram_gb:
        raise Skipped(f"this card has {place.card.vram:.1f} GB, and {vram_gb:g} are asked for")
    limit = {"vram_gb": vram_gb} if vram_gb and not place.small else {}
    return _trained(place, place.settings(model, **limit))


def _trained(place: Place, settings: Settings) -> Figures:
    rows = planned(settings, place.size(24), steps=True)[1].generation_batch
    size = place.size(min(24, -(-rows // 12)))
    few, (_, chosen) = replace(size, groups=min(TRAINED, size.groups)), planned(settings, size, steps=True)
    seen = bench_fit(settings, size, repeats=1, tell=tell, trained=few.groups)
    shape = geometry(settings.model)
    tokens = few.tokens + (few.groups if shape.packed else few.completions) * few.prompt_tokens
    operations = (4 if chosen.lora else 6) * shape.parameters * tokens
    share = operations / (place.card.tflops * 1e12) if place.card else None
    expected = place.seconds(seconds_to_train, shape, chosen, few)
    kind = f"{chosen.quantisation} lora" if chosen.lora else "full"
    how = f"{kind}, {chosen.dtype}{', checkpointing' if chosen.gradient_checkpointing else ''}; {chosen.optimiser}"
    lines = [
        line("plan", f"{how}; {seen['micro_batch_tokens']:,} tokens, {chosen.generation_batch} rows"),
        line("way", seen["way"]),
        line("generate", seen["generate_tokens_per_s"], place.rate(generating, shape, chosen, size), "tokens/s"),
        line("train", seen["train_tokens_per_s"], place.rate(seconds_to_train, shape, chosen, few), "tokens/s"),
        line("model FLOPs utilisation", share and share / seen["step_s"], share and expected and share / expected),
        line("memory retries", seen["memory_retries"], 0),
    ]
    for phase in ("training", "generating"):
        peak, fit = seen[f"peak_{phase}_mb"], seen[f"predicted_{phase}_mb"]
        lines.append(line(f"{phase}'s peak", peak / 1e3, fit / 1e3, "GB"))
    reserved = torch.cuda.max_memory_reserved(place.on) / 1e9 if place.on.type == "cuda" else None
    held = (chosen.memory.total - CONTEXT_BYTES["cuda"]) / 1e9
    lines.append(line("reserved, of all but the context", reserved, held, "GB"))
    return {"lines": lines, **seen}


def windowed(place: Place) -> Figures:
    """The same of a Mistral of 1.1 billion parameters with a window, in full."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    shape = (64, 128, 2, 4, 512) if place.small else (2_048, 5_632, 22, 32, 32_000)
    config = MistralConfig(**dict(zip(names, shape, strict=True)), num_key_value_heads=4, sliding_window=4_096)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return _trained(place, collect(task="", flags={"model": folder, "device": place.device}, environment={})[0])


def float16(place: Place) -> Figures:
    """Generation and the first step of a 0.5B in float16, with its own weights where they are in the hub's cache."""
    size = place.size(4)
    settings, chosen = planned(place.settings("qwen2.5-0.5b", dtype="float16"), size, steps=True)
    source = resolve(settings.model)
    real = Path(source).is_dir() or isinstance(try_to_load_from_cache(source, "model.safetensors"), str)
    policy = named_policy(settings, random_weights=not real)
    learner = random_models.make_learner(policy, "ftis", settings)
    work = own_work(policy, size, chosen.generation_batch)
    report = learner.step(random_models.training_groups(work))
    sampled = all(math.isfinite(value) for group in work.completions for one in group for value in one.logprobs)
    finite = "yes" if sampled and not report.skipped else "no"
    lines = [line("weights", "its own" if real else "random, which say little"), line("finite", finite, "yes")]
    passes = 1 + math.log2(FIRST / learner.loss_scale.value)
    return {"lines": [*lines, line("passes of the first step", passes, 1)], "skipped": report.skipped}


def whole_step(place: Place) -> Figures:
    """Seconds of a step of the daemon's stepper with a 0.5B in full, from prompts to changed weights."""
    size, config = place.size(12), random_models.small_config() if place.small else known_config("qwen2.5-0.5b")
    devices = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, task = random_models.written(folder, config, size)
        flags = {"model": model, "device": place.device, "lora": False, "batch_groups": size.groups, "wait": 0.0}
        settings = collect(task="", flags=flags, environment={})[0]
        node = stack.enter_context(contextlib.closing(WholeNode(settings, size, task, folder)))
        for step in range(2 if place.small else 4):
            tell(f"step {step}" if step else "a step to warm up")
            devices.append(asyncio.run(node.step()))
    seen = {part: statistics.median(each[part] for each in devices[1:]) for part in devices[0]}
    shape = geometry_of(config, "the model of a step")
    caps = Workload(size.prompt_tokens, size.completion_tokens, size.group, size.groups)
    chosen = plan(shape, 1 << 62, caps, Wishes(lora=False), "cuda", eight_bit=False)  # as WholeNode has it
    made, trained = (place.seconds(phase, shape, chosen, size) for phase in (generating, seconds_to_train))
    lines = [line("generate", seen["generate"], made, "s"), line("train", seen["train"], trained, "s")]
    lines += [line(part, seen[part], None, "s") for part in ("score", "step_idle")]
    return {"lines": [*lines, line("step", seen["step_total"], made + trained if made and trained else None, "s")]}


def two_cards(place: Place) -> Figures:
    """A step of a small model on two devices beside one."""
    if place.on.type == "cuda" and torch.cuda.device_count() < 2:
        raise Skipped("this machine has one card")
    devices = "cpu,cpu" if place.on.type == "cpu" else "cuda:0,cuda:1"
    seen = bench_devices(place.size(12), devices, repeats=1 if place.small else 3, tell=tell)
    return {"lines": [line("speed-up of a step", seen["speedup_over_one"], 2.0)], **seen}


def learn(place: Place) -> Figures:
    """Real models from the folder MODELS learn GSM8K alone and together; an unfinished call is gone on with."""
    models = os.environ.get("MODELS", "")
    if not models and not place.small:
        raise Skipped("MODELS names no folder of real models")
    return run_piece(place.device, place.out / "learn", models, small=place.small)


@dataclass(frozen=True)
class Part:
    """limit: seconds after which it is ended."""

    limit: float
    measure: Callable[[Place], Figures]

    @property
    def about(self) -> str:
        return str(getattr(self.measure, "func", self.measure).__doc__)


PARTS: Mapping[str, Part] = {
    "machine": Part(60, machine),
    "allocation": Part(60, allocation),
    "tests": Part(150, tests),
    "generate": Part(180, generation),
    "0.5b-graphs": Part(90, partial(graphs, model="qwen2.5-0.5b")),
    "3b-graphs": Part(120, partial(graphs, model="qwen2.5-3b")),
    "nf4": Part(60, products),
    "shortage": Part(90, shortage),
    "3b-8gb": Part(150, partial(training, model="qwen2.5-3b", vram_gb=8)),
    "7b-12gb": Part(180, partial(training, model="qwen2.5-7b", vram_gb=12)),
    "3b-24gb": Part(150, partial(training, model="qwen2.5-3b", vram_gb=24)),
    "windowed": Part(150, windowed),
    "float16": Part(90, float16),
    "step": Part(120, whole_step),
    "two-cards": Part(120, two_cards),
    "learn": Part(570, learn),
}


def known_card(file: Path) -> Card | None:
    """The card with the rates that the part `machine` kept in this file; None where it has not."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    return Card(**kept["figures"]["card"]) if kept.get("state") == "done" else None


def measured(name: str, place: Place) -> Figures:
    """What a part found: `state` is done, unfinished, skipped or failed; `figures`, or `why` there are none."""
    try:
        figures = PARTS[name].measure(place)
        return {"state": "done", **figures.pop("ended", {}), "figures": figures}
    except Skipped as reason:
        return {"state": "skipped", "why": str(reason)}
    except FtisError as error:
        return {"state": "failed", "why": str(error)[:1000]}
    except Exception as error:  # one part must not end the others
        traceback.print_exc()
        return {"state": "failed", "why": f"{type(error).__name__}: {str(error)[-1000:]}"}
