"""The best way to train a model within a given memory. Pure: `memory` says what things take, this chooses.

Best comes first, and the first that fits is taken: full training, with gradient checkpointing, with 8-bit AdamW, LoRA,
LoRA with checkpointing; on a CPU models of `SMALL_MODEL` parameters or more begin with LoRA. Before checkpointing,
which computes every layer twice, come smaller micro-batches, as far as a GPU is as fast with them. If none of these
fits, generation batches shrink, then micro-batches, as far as one group and one sequence; each phase by itself, for
they do not need memory at the same time. Where that would crawl, LoRA on frozen weights of four bits (NF4) is taken
instead: it costs some accuracy, and time to dequantise.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ftis_node.fit.geometry import Geometry
from ftis_node.fit.memory import (
    Device,
    Dtype,
    Memory,
    OptimiserName,
    Quantisation,
    Setup,
    Workload,
    estimate,
    trained_part,
)
from ftis_node.text import GB, rounded

# Sizes that choosing starts from; it only makes them smaller.
MICRO_BATCH_TOKENS: dict[Device, int] = {"cpu": 2_048, "cuda": 16_384}  # on a CPU larger ones leave the caches
GENERATION_BATCH = 288

# Sizes that are tried before gradient checkpointing. Below them a GPU waits for its host to launch kernels (counted on
# the pretend GPU of `tests/pretend`, not measured). `PROMPTS_AGAIN`: smaller micro-batches read prompts more often, and
# may cost so much of the tokens; checkpointing costs a forward pass, a quarter to a half of the other work.
SMALLER_MICRO_BATCHES: dict[Device, tuple[int, ...]] = {
    "cpu": (1_024, 512),
    "cuda": (12_288, 8_192, 6_144, 4_096, 3_072, 2_048),
}
PROMPTS_AGAIN = 0.2

# With less a GPU spends its time on launches: completions side by side, tokens of a micro-batch.
CRAWLING_ROWS = 48
CRAWLING_TOKENS = 2_048

# Models with fewer parameters are trained in fp32 everywhere, and whole on a CPU: they are small enough.
SMALL_MODEL = 100_000_000

# Smaller micro-batches are refused by the settings, and save nothing.
MIN_TOKENS = 64


@dataclass(frozen=True)
class Wishes:
    """A person's decisions; None leaves the choice to the plan."""

    lora: bool | None = None
    dtype: Dtype | None = None
    quantisation: Quantisation | None = None
    optimiser: OptimiserName | None = None
    gradient_checkpointing: bool | None = None
    micro_batch_tokens: int | None = None
    generation_batch: int | None = None
    lora_rank: int = 128
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    devices: int = 1
    sharded: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Plan(Setup):
    """How to train. `fits` says whether `memory.total` is within `budget` (bytes); `reasons` are sentences."""

    memory: Memory
    budget: int
    fits: bool
    reasons: tuple[str, ...]

    @property
    def kind(self) -> str:
        """As the label of a checkpoint names it."""
        return trained_part(self.lora)


def plan(
    geometry: Geometry,
    budget: int,
    workload: Workload,
    wishes: Wishes,
    device: Device,
    eight_bit: bool,
    *,
    four_bit: bool = False,
    fused: bool = False,
    dtype: Dtype = "bfloat16",
) -> Plan:
    """The best way to train that fits.

    Args:
        budget: bytes of memory of the device.
        eight_bit: whether 8-bit AdamW may be chosen. On a CPU it is slow, and used only where it is wished for.
        four_bit: the same of NF4.
        fused: whether a GPU has the kernels of `policy.kernels` for the models that `decoder` knows.
        dtype: of larger models, the one that the device multiplies fastest.

    Returns:
        A plan; if nothing fits, the smallest one, with `fits` False and a reason that says how much would do.

    Raises:
        UsageError: the model has no module of the LoRA targets.
    """
    on_gpu = device == "cuda"
    dense = _setups(geometry, workload, wishes, device, eight_bit and on_gpu, dtype)
    if fused and on_gpu and geometry.decoded:
        dense = [replace(way, fused=True) for way in dense]
    kinds: list[Quantisation] = ["none"]
    if wishes.quantisation is not None:
        kinds = [wishes.quantisation]
    elif four_bit and on_gpu and dense[-1].lora:
        kinds.append("nf4")
    for kind in kinds:
        ways = dense
        if kind == "nf4":
            ways = [replace(way, quantisation=kind) for way in dense if way.lora]
        needs = [(setup, estimate(geometry, workload, setup, device)) for setup in ways]
        chosen = next((index for index, (_, need) in enumerate(needs) if need.total <= budget), None)
        if chosen is None:  # then of what is left when there is no choice between full and LoRA any more
            last = [way for way in ways if way.lora == ways[-1].lora]
            setup = _shrunk(geometry, budget, workload, wishes, device, last)
        else:
            setup = ways[chosen]
        memory = estimate(geometry, workload, setup, device)
        if memory.total <= budget and not _crawls(setup, workload, geometry.packed):
            break
    notes = [*slow_parts(geometry)]
    if setup.lora:
        absent = geometry.without_meaning(setup.lora_targets)
        if absent:
            notes.append(f"The model has no module {' or '.join(absent)}: in lora_targets that means nothing.")
    return Plan(
        **vars(setup),
        memory=memory,
        budget=budget,
        fits=memory.total <= budget,
        reasons=tuple(_reasons(setup, memory, needs, chosen, wishes, budget, notes)),
    )


def _crawls(setup: Setup, workload: Workload, packed: bool) -> bool:
    rows = min(CRAWLING_ROWS, workload.group * workload.batch_groups)
    tokens = min(CRAWLING_TOKENS, workload.step_tokens(packed))
    return setup.generation_batch < rows or setup.micro_batch_tokens < tokens


def _setups(
    geometry: Geometry, workload: Workload, wishes: Wishes, device: Device, eight_bit: bool, dtype: Dtype
) -> list[Setup]:
    """Every way to train that the wishes allow, best first: at full size, and where it saves checkpointing smaller."""
    group = workload.group
    if geometry.parameters < SMALL_MODEL:
        dtype = "float32"
    step_tokens = workload.step_tokens(geometry.packed)
    most = max(MIN_TOKENS, workload.longest, min(MICRO_BATCH_TOKENS[device], step_tokens))
    most_rows = min(GENERATION_BATCH, max(CRAWLING_ROWS, group * workload.batch_groups))
    common = Setup(
        dtype=wishes.dtype or dtype,
        micro_batch_tokens=wishes.micro_batch_tokens or most,
        generation_batch=wishes.generation_batch or max(group, most_rows // group * group),
        lora_rank=wishes.lora_rank,
        lora_targets=wishes.lora_targets,
        devices=wishes.devices,
    )
    portions = []  # with checkpointing or without, and the size of micro-batches
    if wishes.gradient_checkpointing is None:
        portions.append((False, common.micro_batch_tokens))
        if wishes.micro_batch_tokens is None:
            portions += [(False, size) for size in _smaller(most, workload, geometry.packed, device)]
    portions.append((wishes.gradient_checkpointing is not False, common.micro_batch_tokens))

    asked = wishes.lora
    if wishes.quantisation == "nf4":
        asked = True
    elif wishes.sharded:
        asked = False
    able = geometry.takes(wishes.lora_targets)
    if asked is None and able and device == "cpu" and geometry.parameters >= SMALL_MODEL:
        asked = True
    kinds = []  # LoRA or not, sharded or not
    if not asked:
        kinds.append((False, bool(wishes.sharded)))
        if wishes.sharded is None and wishes.devices > 1 and wishes.optimiser != "adamw8bit":
            kinds.append((False, True))
    if asked or (asked is None and able):
        kinds.append((True, False))

    setups = []
    for lora, sharded in kinds:
        optimisers: list[OptimiserName] = [wishes.optimiser or "adamw"]
        if wishes.optimiser is None and eight_bit and not lora and not sharded:
            optimisers.append("adamw8bit")
        for optimiser in optimisers:
            way = replace(common, lora=lora, sharded=sharded, optimiser=optimiser)
            setups += [replace(way, gradient_checkpointing=on, micro_batch_tokens=size) for on, size in portions]
    return setups


def _smaller(most: int, workload: Workload, packed: bool, device: Device) -> list[int]:
    """Micro-batches below `most` tokens that cost less time than gradient checkpointing, largest first."""

    def work(size: int) -> float:  # tokens that are computed for each token of a completion
        prompts, completions = workload.split(size, packed)
        return (prompts + completions) / completions

    sizes = (size for size in SMALLER_MICRO_BATCHES[device] if workload.longest <= size < most)
    return [size for size in sizes if work(size) <= (1 + PROMPTS_AGAIN) * work(most)]


def _shrunk(
    geometry: Geometry, budget: int, workload: Workload, wishes: Wishes, device: Device, ways: list[Setup]
) -> Setup:
    """The first of `ways` that trains as it is and generates in smaller batches; else the last, both smaller.

    A size that was wished for stays. Where nothing is small enough it is the smallest.
    """

    def largest(sizes: list[Setup]) -> Setup | None:
        return next((size for size in sizes if estimate(geometry, workload, size, device).total <= budget), None)

    def generating(way: Setup) -> list[Setup]:
        if wishes.generation_batch is not None:
            return [way]
        return [replace(way, generation_batch=size) for size in range(way.generation_batch, 0, -workload.group)]

    def training(way: Setup) -> list[Setup]:
        sizes = [way.micro_batch_tokens]
        least = max(MIN_TOKENS, workload.longest)
        while wishes.micro_batch_tokens is None and sizes[-1] > least:
            sizes.append(max(least, sizes[-1] // 2))
        return [replace(way, micro_batch_tokens=size) for size in sizes]

    for way in ways:
        fitting = largest(generating(way))
        if fitting is not None:
            return fitting
    micro = training(generating(ways[-1])[-1])
    size = (largest(micro) or micro[-1]).micro_batch_tokens
    generation = [replace(way, micro_batch_tokens=size) for way in generating(ways[-1])]
    return largest(generation) or generation[-1]


def enough_gb(size: int) -> float:
    """So many GB, to two decimals, are no less than `size` bytes."""
    return math.ceil(100 * size / GB) / 100


def _reasons(
    setup: Setup,
    memory: Memory,
    needs: list[tuple[Setup, Memory]],
    chosen: int | None,
    wishes: Wishes,
    budget: int,
    notes: list[str],
) -> Iterator[str]:
    """One sentence each: why full or LoRA, what was tried, why checkpointing, what was made smaller, what would do.

    `notes`: sentences about the model. `needs` are the ways that were open and what they take, best first; `chosen` is
    the one taken, if one fits.
    """
    most = needs[0][0].micro_batch_tokens
    full_size = [(way, need) for way, need in needs if way.micro_batch_tokens == most]
    tried = [(way, need) for way, need in needs[:chosen] if way.micro_batch_tokens == most]
    if wishes.lora is not None:
        kind = replace(setup, optimiser="adamw", gradient_checkpointing=False)
        label = _label(kind)
        yield f"{label[0].upper()}{label[1:]}, as it was asked for or settled before."
    elif setup.quantisation == "nf4" and wishes.quantisation is not None:
        yield "LoRA on weights of four bits (NF4), as it was asked for or settled before."
    elif setup.quantisation == "nf4":
        yield (
            "LoRA on weights of four bits (NF4), because beside weights of two bytes there is no room for "
            f"{CRAWLING_ROWS} completions and {CRAWLING_TOKENS:,} tokens at a time."
        )
    elif setup.lora and needs[0][0].lora:
        yield (
            "LoRA, because without a GPU a step of all weights takes about half as long again, and each checkpoint has "
            "12 bytes a parameter; --full trains them all."
        )
    elif setup.lora:
        way, need = _smallest([pair for pair in full_size if not pair[0].lora])
        state = need.weights + need.master + need.gradients + need.optimiser
        yield (
            f"LoRA, because {_label(way)} needs {rounded(need.total)} and there are {rounded(budget)}: "
            f"{rounded(state)} are weights, gradients and optimiser state of every parameter."
        )
    elif setup.sharded and wishes.sharded is None:
        whole = [pair for pair in full_size if not pair[0].lora and not pair[0].sharded]
        way, need = _smallest(whole)
        yield (
            f"Full training in shards over {setup.devices} devices: it needs {rounded(memory.total)} in each, and "
            f"{_label(way)} without shards {rounded(need.total)}, where there are {rounded(budget)}."
        )
    else:
        yield f"Full training fits: it needs {rounded(memory.total)} of {rounded(budget)}."
    if setup.quantisation == "nf4":
        yield "Generating takes about 1.6 times as long as with weights of two bytes (1.5B on an H100)."
    if tried:
        yield f"Tried first, too large: {'; '.join(f'{_label(way)}, {rounded(need.total)}' for way, need in tried)}."
    plain = [(way, need) for way, need in needs if way.lora == setup.lora and not way.gradient_checkpointing]
    if setup.gradient_checkpointing and wishes.gradient_checkpointing is None:
        way, need = plain[-1]
        yield (
            f"Gradient checkpointing, because {way.micro_batch_tokens:,} tokens would keep "
            f"{rounded(need.activations)} of activations without it."
        )
    wanted = full_size[-1][0]
    if setup.micro_batch_tokens < most and not setup.gradient_checkpointing and wanted.gradient_checkpointing:
        yield (
            f"Micro-batches of {setup.micro_batch_tokens:,} tokens, because {most:,} would keep "
            f"{rounded(plain[0][1].activations)} of activations, and gradient checkpointing would take longer."
        )
    elif setup.micro_batch_tokens < most:
        yield (
            f"Micro-batches of {setup.micro_batch_tokens:,} tokens, because training on {most:,} needs "
            f"{rounded(full_size[-1][1].training)}; the step stays the same."
        )
    if setup.generation_batch < wanted.generation_batch:
        yield (
            f"{setup.generation_batch} completions at a time, because generating {wanted.generation_batch} needs "
            f"{rounded(full_size[-1][1].generating)}."
        )
    yield from notes
    if memory.total > budget:
        yield (
            f"Nothing that is allowed fits in {rounded(budget)}: the smallest needs {rounded(memory.training)} to "
            f"train and {rounded(memory.generating)} to generate, so {enough_gb(memory.total):g} GB would do."
        )


def _smallest(needs: list[tuple[Setup, Memory]]) -> tuple[Setup, Memory]:
    return min(needs, key=lambda pair: pair[1].total)


def slow_parts(geometry: Geometry) -> Iterator[str]:
    """What takes longer with this model than with others, why, and what it costs; a sentence each."""
    if not geometry.decoded:
        yield (
            "Transformers' modules generate, for the native decoder knows Llama, Mistral, Qwen2, Qwen3 and Gemma 3: "
            "30 to 50 ms a token on any GPU, predicted; engine=vllm does without."
        )
    if geometry.padded:
        yield (
            f"Sequences are padded in training, for {geometry.padded}: 2.2 to 3.9 times the compute of packed ones, "
            "by arithmetic for GSM8K."
        )


def _label(setup: Setup) -> str:
    """The way to train, in words that may stand within a sentence."""
    kind = "full training"
    if setup.quantisation == "nf4":
        kind = "NF4 with LoRA"
    elif setup.lora:
        kind = "LoRA"
    extras = []
    if setup.sharded:
        extras.append(f"its state in shards over {setup.devices} devices")
    if setup.optimiser == "adamw8bit":
        extras.append("8-bit AdamW")
    if setup.gradient_checkpointing:
        extras.append("gradient checkpointing")
    return " with ".join(filter(None, [kind, " and ".join(extras)]))
