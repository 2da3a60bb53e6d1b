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
from ftis_node.fit.memory import CONTEXT_BYTES, NF4_BYTES, Workload
from ftis_node.fit.plan import Wishes, plan
from ftis_node.host.allocator import FIXED, GROWING, NAMES
from ftis_node.lab.bench import model as random_models
from ftis_node.lab.bench.devices import bench_devices
from ftis_node.lab.bench.fit import bench_fit
from ftis_node.lab.bench.generate import compare
from ftis_node.lab.bench.measure import device_name, timed
from ftis_node.lab.bench.model import named_policy, own_work, planned
from ftis_node.lab.bench.whole import WholeNode
from ftis_node.lab.step_seconds import CARDS, DEQUANTISED, Card, generating
from ftis_node.lab.step_seconds import training as seconds_to_train
from ftis_node.learner.loss_scale import FIRST
from ftis_node.observe.provenance import commit, versions
from ftis_node.policy.generate import native
from ftis_node.policy.generate.graphs import Graphs, failed
from ftis_node.policy.measure import geometry, geometry_of, known_config
from ftis_node.policy.names import resolve
from ftis_node.policy.nf4 import NF4Linear
from ftis_node.policy.policy import Policy
from ftis_node.policy.room import Room, fitting
from ftis_node.preflight.machine import _driver, _version
from ftis_node.text import GB
from tests.manual.gpu_learn import run_piece
from tests.manual.gpu_page import Figures, line
from tests.manual.gpu_place import Place, Skipped, tell
from tests.manual.part import ROOT

FUSED = {"8.6": 128, "8.9": 256}  # rows by capability; elsewhere 64 (bitsandbytes 0.50)
TRAINED = 6  # groups, which fill the largest micro-batch


def machine(place: Place) -> Figures:
    """The card, versions, the rate of a large product of 16-bit matrices, and of a copy."""
    name = device_name(place.on)
    products = product_rate(place) / 1e12
    copies = copy_rate(place) / 1e9
    capability = ""
    card = Card(vram=0, tflops=products, bandwidth=copies, fused=64)
    if place.cuda:
        properties = torch.cuda.get_device_properties(place.on)
        capability = f"{properties.major}.{properties.minor}"
        card = replace(card, vram=properties.total_memory / GB, fused=FUSED.get(capability, 64))
    expected_products = None
    expected_copies = None
    for known, sheet in CARDS.items():
        if known.rsplit(" ", 2)[0] in name:
            expected_products = sheet.tflops
            expected_copies = sheet.bandwidth
    return {
        "lines": [
            line(f"{place.half} products", products, expected_products, "TFLOP/s"),
            line("copies", copies, expected_copies, "GB/s"),
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


def product_rate(place: Place) -> float:
    """Operations a second of a large product of 16-bit matrices, the first three left out."""
    width = 256 if place.small else 8_192
    left = torch.randn(width, width, device=place.on, dtype=place.half)
    right = torch.randn_like(left)
    seconds = [timed(lambda: left @ right, place.on)[1] for _ in range(13)]
    return 2 * width**3 / statistics.median(seconds[3:])


def copy_rate(place: Place) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    size = 1 << 26 if place.small else 1 << 30  # larger than any cache
    source = torch.empty(size, dtype=torch.uint8, device=place.on)
    target = torch.empty_like(source)
    seconds = [timed(lambda: target.copy_(source), place.on)[1] for _ in range(5)]
    return 2 * size / min(seconds)


def tests(place: Place) -> Figures:
    """The tests marked `gpu`, without conftest.py, which needs hivemind."""
    marked = []
    for path in sorted(ROOT.glob("tests/test_*.py")):
        if "mark.gpu" in path.read_text("utf-8"):
            marked.append(str(path))
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-m", "gpu", *marked]
    environment = os.environ | {"GPU_TESTS_ON": place.device}
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(f"{ended.stdout[-4000:]}{ended.stderr[-2000:]}")
    last = ended.stdout.strip().splitlines()[-1]
    counts = re.findall(r"(\d+) (passed|skipped)", last)
    return {"lines": [line(how, int(number)) for number, how in counts]}


def allocation(place: Place) -> Figures:
    """The first allocation of a process with segments that grow, which WSL2 may refuse, and of fixed size."""
    program = f"import torch; print(torch.ones(1, device='{place.device}').item())"
    lines = []
    for way in (GROWING, FIXED):
        environment = os.environ | {NAMES[1]: way}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        found = "works"
        if ended.returncode:
            found = [f"code {ended.returncode}", *ended.stderr.strip().splitlines()][-1]
        lines.append(line(way, found, "works"))
    return {"lines": lines}


def generation(place: Place) -> Figures:
    """Tokens a second of the native engine, of transformers' `generate`, in turns."""
    size = place.size(12)
    settings, chosen = planned(place.settings("qwen2.5-1.5b"), size, steps=False)
    policy = named_policy(settings, random_weights=True)
    seen = compare(policy, size, batch=chosen.generation_batch, repeats=1, tell=tell)
    expected = place.rate(generating, geometry(settings.model), chosen, size)
    lines = [line("native", seen["native_tokens_per_s"], expected, "tokens/s")]
    for name in ("plain", "nf4"):
        if f"{name}_tokens_per_s" in seen:
            lines.append(line(name, seen[f"{name}_tokens_per_s"], None, "tokens/s"))
    return {"lines": lines, **seen}


def graphs(place: Place, model: str) -> Figures:
    """Tokens a second with CUDA graphs and without; captures, and what stays reserved."""
    size = place.size(24)
    settings, chosen = planned(place.settings(model), size, steps=False)
    policy = named_policy(settings, random_weights=True)
    before = Graphs._captured
    taken = []

    def captured(*given: Any) -> Any:
        made, seconds = timed(lambda: before(*given), place.on)
        taken.append(seconds)
        return made

    def seconds_of(policy: Policy) -> float:
        return timed(lambda: own_work(policy, size, chosen.generation_batch), place.on)[1]

    with patch.object(Graphs, "_captured", captured):
        first = seconds_of(policy)
        count = len(taken)
        later = seconds_of(policy)
    reserved = None
    if place.cuda:
        reserved = torch.cuda.memory_reserved(place.on) / 1e9
    one_by_one = replace(policy, graphs=False)
    seconds_of(one_by_one)
    without = seconds_of(one_by_one)
    expected = place.rate(generating, geometry(settings.model), chosen, size)
    needs = chosen.memory.weights + chosen.memory.kv_cache + chosen.memory.sampling  # nothing is trained here
    mean = 1e3 * statistics.mean(taken) if taken else None
    lines = [
        line("with graphs", size.tokens / later, expected, "tokens/s"),
        line("without", size.tokens / without, None, "tokens/s"),
        line("first generation", first, None, "s"),
        line("captures of it", count),
        line("a capture", mean, 40, "ms at most"),
        line("captures of the second", len(taken) - count, 0),
        line("reserved", reserved, needs / 1e9, "GB"),
    ]
    return {"lines": lines, "capture_seconds": taken}


def products(place: Place) -> Figures:
    """A product with weights of four bits (the MLP of 7B): as decoding does it, and dequantised."""
    inputs = 512 if place.small else 3_584
    outputs = 1_408 if place.small else 18_944
    weights = inputs * outputs
    module = NF4Linear(torch.nn.Linear(inputs, outputs, bias=False), place.on, place.half)

    def dequantised(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, module.dense())

    lines = []
    for rows in (12, 48, 96, 288):
        x = torch.randn(rows, inputs).to(place.on, module.dtype)
        for way, product in (("decoding", module.product), ("dequantised", dequantised)):
            with torch.inference_mode():
                taken = [timed(partial(product, x), place.on)[1] for _ in range(30)]
            expected = None
            if place.card is not None:
                fused = way == "decoding" and rows <= place.card.fused
                read = NF4_BYTES if fused else NF4_BYTES + DEQUANTISED  # bytes a weight
                expected = 1e6 * place.card.product(read * weights, weights, rows)
            lines.append(line(f"{rows} rows, {way}", 1e6 * statistics.median(taken[10:]), expected, "µs"))
    return {"lines": lines}


def shortage(place: Place) -> Figures:
    """Memory runs out while the first graph is captured (without graphs: at the first token)."""
    size = place.size(4)
    settings, chosen = planned(place.settings("qwen2.5-0.5b"), size, steps=False)
    policy = named_policy(settings, random_weights=True)
    owner = Graphs if place.cuda else native._Decoding
    name = "_captured" if place.cuda else "run"
    before = getattr(owner, name)
    met = []

    def short(*given: Any) -> Any:
        if met:
            return before(*given)
        met.append(1)
        if not place.cuda:
            raise torch.OutOfMemoryError("out of memory: so is a CPU in this part")
        filling = filled(place.on)
        try:
            return before(*given)
        finally:
            filling.clear()

    with patch.object(owner, name, short):
        room = Room(chosen.generation_batch)
        work = fitting(lambda rows: own_work(policy, size, rows), room, there=size.completions, least=size.group)
    tokens = 0
    for group in work.completions:
        tokens += sum(map(len, group))
    usable = "no" if failed() else "yes"
    return {
        "lines": [
            line("shortages", len(met), 1),
            line("tokens all the same", tokens, size.tokens),
            line("graphs can be used", usable, "yes"),
        ]
    }


def filled(device: torch.device) -> list[torch.Tensor]:
    """Blocks that take all of a card's memory."""
    blocks = []
    for size in (1 << 30, 64 << 20, 2 << 20):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
    return blocks


def training(place: Place, model: str, vram_gb: float | None = None) -> Figures:
    """A generation that fills its places, and steps on six groups: speed, MFU, and memory beside `fit`."""
    limit = {}
    if vram_gb is not None and not place.small:
        if place.cuda and place.card is not None and place.card.vram < 0.9 * vram_gb:
            raise Skipped(f"this card has {place.card.vram:.1f} GB, and {vram_gb:g} are asked for")
        limit["vram_gb"] = vram_gb
    return _trained(place, place.settings(model, **limit))


def _trained(place: Place, settings: Settings) -> Figures:
    rows = planned(settings, place.size(24), steps=True)[1].generation_batch
    size = place.size(min(24, -(-rows // 12)))
    few = replace(size, groups=min(TRAINED, size.groups))
    chosen = planned(settings, size, steps=True)[1]
    seen = bench_fit(settings, size, repeats=1, tell=tell, trained=few.groups)
    shape = geometry(settings.model)
    expected = place.seconds(seconds_to_train, shape, chosen, few)
    use = None
    expected_use = None
    if place.card is not None and expected is not None:
        prompts = few.groups if shape.packed else few.completions
        tokens = few.tokens + prompts * few.prompt_tokens
        operations = (4 if chosen.lora else 6) * shape.parameters * tokens
        ideal = operations / (place.card.tflops * 1e12)  # seconds
        use = ideal / seen["step_s"]
        expected_use = ideal / expected
    chosen_way = [chosen.kind, f"quantisation {chosen.quantisation}", chosen.dtype, chosen.optimiser]
    if chosen.gradient_checkpointing:
        chosen_way.append("checkpointing")
    chosen_way += [f"{seen['micro_batch_tokens']:,} tokens", f"{chosen.generation_batch} rows"]
    generate_rate = place.rate(generating, shape, chosen, size)
    train_rate = place.rate(seconds_to_train, shape, chosen, few)
    lines = [
        line("plan", ", ".join(chosen_way)),
        line("way", seen["way"]),
        line("generate", seen["generate_tokens_per_s"], generate_rate, "tokens/s"),
        line("train", seen["train_tokens_per_s"], train_rate, "tokens/s"),
        line("model FLOPs utilisation", use, expected_use),
        line("memory retries", seen["memory_retries"], 0),
    ]
    for phase in ("training", "generating"):
        peak = seen[f"peak_{phase}_mb"] / 1e3
        fit = seen[f"predicted_{phase}_mb"] / 1e3
        lines.append(line(f"{phase}'s peak", peak, fit, "GB"))
    reserved = None
    if place.cuda:
        reserved = torch.cuda.max_memory_reserved(place.on) / 1e9
    held = (chosen.memory.total - CONTEXT_BYTES["cuda"]) / 1e9
    lines.append(line("reserved, of all but the context", reserved, held, "GB"))
    return {"lines": lines, **seen}


def windowed(place: Place) -> Figures:
    """The same of a Mistral of 1.1 billion parameters with a window, in full."""
    config = MistralConfig(
        hidden_size=64 if place.small else 2_048,
        intermediate_size=128 if place.small else 5_632,
        num_hidden_layers=2 if place.small else 22,
        num_attention_heads=4 if place.small else 32,
        vocab_size=512 if place.small else 32_000,
        num_key_value_heads=4,
        sliding_window=4_096,
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        settings, _ = collect(task="", flags={"model": folder, "device": place.device}, environment={})
        return _trained(place, settings)


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
    sampled = [value for group in work.completions for one in group for value in one.logprobs]
    finite = all(map(math.isfinite, sampled)) and not report.skipped
    passes = 1 + math.log2(FIRST / learner.loss_scale.value)
    lines = [
        line("weights", "its own" if real else "random, which say little"),
        line("finite", "yes" if finite else "no", "yes"),
        line("passes of the first step", passes, 1),
    ]
    return {"lines": lines, "skipped": report.skipped}


def whole_step(place: Place) -> Figures:
    """Seconds of a step of the daemon's stepper with a 0.5B in full, from prompts to changed weights."""
    size = place.size(12)
    config = random_models.small_config() if place.small else known_config("qwen2.5-0.5b")
    steps = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, task = random_models.written(folder, config, size)
        flags = {
            "model": model,
            "device": place.device,
            "lora": False,
            "batch_groups": size.groups,
            "wait": 0.0,
        }
        settings, _ = collect(task="", flags=flags, environment={})
        node = stack.enter_context(contextlib.closing(WholeNode(settings, size, task, folder)))
        for step in range(2 if place.small else 4):
            tell(f"step {step}" if step else "a step to warm up")
            steps.append(asyncio.run(node.step()))
    seen = {}
    for part in steps[0]:
        seen[part] = statistics.median(step[part] for step in steps[1:])
    shape = geometry_of(config, "the model of a step")
    caps = Workload(size.prompt_tokens, size.completion_tokens, size.group, size.groups)
    chosen = plan(shape, 1 << 62, caps, Wishes(lora=False), "cuda", eight_bit=False)  # as WholeNode has it
    made = place.seconds(generating, shape, chosen, size)
    trained = place.seconds(seconds_to_train, shape, chosen, size)
    whole = None
    if made is not None and trained is not None:
        whole = made + trained
    lines = [
        line("generate", seen["generate"], made, "s"),
        line("train", seen["train"], trained, "s"),
        line("score", seen["score"], None, "s"),
        line("step_idle", seen["step_idle"], None, "s"),
        line("step", seen["step_total"], whole, "s"),
    ]
    return {"lines": lines}


def two_cards(place: Place) -> Figures:
    """A step of a small model on two devices beside one."""
    devices = "cpu,cpu"
    if place.cuda:
        devices = "cuda:0,cuda:1"
        if torch.cuda.device_count() < 2:
            raise Skipped("this machine has one card")
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
    if not file.exists():
        return None
    kept = json.loads(file.read_text())
    if kept["state"] != "done":
        return None
    return Card(**kept["figures"]["card"])


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
