"""The memory that training and generating take. Pure arithmetic: no model, no files, no device.

Weights, gradients and optimiser follow from counts of parameters. The activations that a layer keeps for its backward
pass were read off PyTorch (tensors saved and bytes alive, on the CPU, transformers' Qwen2 and Llama;
`tests/test_plan.py` repeats it).
Let an element have b bytes, hidden be H, intermediate I, and Q = heads · head_dim. With prompts of P and completions of
C tokens, a layer keeps of every token, in bytes:

    norms      4N + 8                   the input in fp32, N elements, and 1/rms. N is 2H, with norms on both sides of
                                        attention and MLP 4H, and Q and k's width more where these have norms too
               + 2bN if full            normed, for the norm's gradient, and scaled, for the next matrix's
    MLP        3bI, 4bI if full         gate, silu(gate), up; their product for the down matrix's gradient
    attention  4bQ + 4 heads            q, k, v and output; log-sum-exp in fp32
               + 2bQ P/C                of completion tokens: each row's copy of its prompt's k and v
               + bQ if full             the output laid out by tokens, for the o matrix's gradient
    LoRA       b rank + b inputs        of each targeted matrix: an input that nothing else keeps, once for all
                                        matrices it enters

With gradient checkpointing a layer keeps bH, and one layer at a time has the above. In the backward pass one layer
holds gradients of 2bI + bH besides (LoRA without targets in the MLP 3bI), or 4bQ (P + C)/C in attention. The formula
holds for dense decoders with gated MLPs (others keep less); it takes prompts and completions at their caps. Where a
model is not packed, each completion is computed with its prompt: P counts for each, no k or v is copied, and there is
no mask. liger-kernel's kernels keep the norms' input in b bytes, of a full model's norms the scaled output only, and no
silu(gate); beside them in bf16 FlashAttention has no mask, and k and v of the key heads.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from ftis_node.fit.geometry import Geometry, Linear

Dtype = Literal["float32", "bfloat16", "float16"]
Quantisation = Literal["none", "nf4"]
OptimiserName = Literal["adamw", "adamw8bit"]
Device = Literal["cpu", "cuda"]

# A block of fp32 logits of `score`: what a cache holds, of so many tokens at most; on a GPU larger, for its launches.
# How many of them scoring holds at a time, and how many bytes it may keep instead of computing them twice.
BLOCK_BYTES: dict[str, int] = {"cpu": 4 << 20, "cuda": 32 << 20}
BLOCK_TOKENS: dict[str, int] = {"cpu": 512, "cuda": 2048}
LOGIT_BUFFERS = 3
CHUNK_BYTES = 128 << 20

# Rows of keys and values that attention may hold for each token of a micro-batch's budget. Completions of unlike
# lengths are padded in attention, and short ones have a copy of a long prompt's.
SPREAD = 3

# Fp32 matrices [rows, vocabulary], of so many rows that they have `CHUNK_BYTES`, while tokens are drawn.
DRAWN = 2

# Prompt tokens that `generate` reads at a time, ahead of those whose completions are under way: few on a CPU, where
# that takes seconds and people see how far it is. With graphs, places for prompts have a multiple of so many tokens.
PREFILL_TOKENS: dict[str, int] = {"cpu": 512, "cuda": 2_048}
PROMPT_WIDTHS = 64

# Elements whose fp32 gradients exist at a time while master weights are updated.
UPDATE_ELEMENTS = 1 << 26

# Bytes a parameter of AdamW's two moments; those of 8 bits have one fp32 scale a block of 256.
MOMENT_BYTES: dict[OptimiserName, float] = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256)}

# Weights that share a scale in NF4; bytes a weight: four bits, 8 bits of scale a block, 32 bits each 256 scales.
NF4_BLOCK = 64
NF4_BYTES = 0.5 + (1 + 4 / 256) / NF4_BLOCK

# These are assumed for a GPU, not measured: the CUDA context with kernels and workspaces; memory that the allocator
# cannot use; and the cache's growth where transformers' modules generate. That cache grows by
# concatenation (1 + 1/(2 · layers) of it are alive at a time). On the CPU the two processes count; one with PyTorch
# loaded has 0.4 GB.
CONTEXT_BYTES: dict[Device, int] = {"cuda": 768 << 20, "cpu": 1 << 30}
FRAGMENTATION = 0.05
CACHE_GROWTH: dict[Device, float] = {"cuda": 1.5, "cpu": 1.1}

# What stays free on a GPU: so much of all, and at least so many bytes.
RESERVE = 0.02
LEAST_RESERVE = 300 << 20


@dataclass(frozen=True)
class Workload:
    """Caps in tokens, completions a prompt, and groups a step."""

    prompt_tokens: int
    completion_tokens: int
    group: int
    batch_groups: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.completion_tokens

    def step_tokens(self, packed: bool) -> int:
        """Tokens that a step computes."""
        prompts = 1 if packed else self.group
        return self.batch_groups * (prompts * self.prompt_tokens + self.group * self.completion_tokens)

    def split(self, tokens: int, packed: bool) -> tuple[int, int]:
        """Prompt and completion tokens of a micro-batch of `tokens`: whole groups, then part of one; without packing
        completions, each with its prompt.

        A sequence cannot be cut, so there is at least one; and no more than `SPREAD` allows.
        """
        if not packed:
            rows = max(1, tokens // self.longest)
            return rows * self.prompt_tokens, rows * self.completion_tokens
        whole, rest = divmod(tokens, self.prompt_tokens + self.group * self.completion_tokens)
        part = max(0, rest - self.prompt_tokens) // self.completion_tokens
        completions = max(1, min(whole * self.group + part, SPREAD * tokens // self.longest))
        return math.ceil(completions / self.group) * self.prompt_tokens, completions * self.completion_tokens


def trained_part(lora: bool) -> str:
    """How labels of checkpoints and manifests of the lab name the part of a model that is trained."""
    return "lora" if lora else "full"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the weights are trained, and in which portions. quantisation: of frozen weights within layers. fused: by the
    kernels of `policy.kernels`. sharded: each of `devices` keeps a part, see `learner.fsdp`."""

    lora: bool = False
    dtype: Dtype
    quantisation: Quantisation = "none"
    optimiser: OptimiserName = "adamw"
    gradient_checkpointing: bool = False
    fused: bool = False
    micro_batch_tokens: int
    generation_batch: int
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    devices: int = 1
    sharded: bool = False

    @property
    def width(self) -> int:
        """Bytes of an element of weights, activations and cache."""
        return 4 if self.dtype == "float32" else 2

    @property
    def parts(self) -> int:
        """Into how many parts layers, masters and moments are cut."""
        return self.devices if self.sharded else 1


@dataclass(frozen=True)
class Memory:
    """Memory in bytes. Weights, master (their fp32 copy), optimiser (its state) and overhead are always there.

    gradients    while training
    activations  while training: what all layers keep for the backward pass
    one_layer    what one layer adds in the backward pass: temporary gradients, and what it recomputes
    logits       what scoring holds beside the activations, before the backward pass reaches the layers
    update       temporary memory of AdamW, after the backward pass
    kv_cache     while generating
    sampling     while generating: the largest of drawing a token, attention, and the pass over the prompts; and the
                 weights that other devices keep otherwise
    overhead     the device's context, what the allocator cannot use, and a reserve on a GPU
    """

    weights: int
    master: int
    gradients: int
    optimiser: int
    activations: int
    one_layer: int
    logits: int
    update: int
    kv_cache: int
    sampling: int
    overhead: int

    @property
    def training(self) -> int:
        """Bytes at the peak of a step."""
        layers = self.activations + max(self.one_layer, self.logits)
        return self._always + self.gradients + max(layers, self.update)

    @property
    def generating(self) -> int:
        """Bytes at the peak of generation."""
        return self._always + self.kv_cache + self.sampling

    @property
    def total(self) -> int:
        """The larger of the two phases."""
        return max(self.training, self.generating)

    @property
    def _always(self) -> int:
        return self.weights + self.master + self.optimiser + self.overhead


def estimate(geometry: Geometry, workload: Workload, setup: Setup, device: Device) -> Memory:
    """The memory that `setup` needs at most, with prompts and completions at their caps.

    Raises:
        UsageError: the model has no module of the LoRA targets.
    """
    width = setup.width
    adapters = 0
    trained = geometry.parameters
    gradient_elements = geometry.parameters + geometry.vocabulary * geometry.hidden
    # The head's gradient is made whole before it is added to what is there, and waits for the embedding's if tied.
    if setup.lora:
        adapters = trained = gradient_elements = geometry.lora_parameters(setup.lora_rank, setup.lora_targets)
    linear = sum(m.inputs * m.outputs * m.count for m in geometry.within_layers)
    away = linear * (setup.parts - 1) // setup.parts
    updated = -(-trained // setup.parts)
    kept, one_layer = activations(geometry, workload, setup)
    cache, sampling = _generating(geometry, workload, setup, device)
    # A layer in shards is whole for its pass, the next one while it is fetched, and a layer's gradient.
    there = 3 * width * away // geometry.layers
    weights = width * (geometry.parameters + adapters - away)
    if setup.quantisation == "nf4":
        weights -= round((width - NF4_BYTES) * linear)
    bare = Memory(
        weights=weights,
        master=4 * updated if width < 4 else 0,
        gradients=width * (gradient_elements - away),
        optimiser=round(MOMENT_BYTES[setup.optimiser] * updated),
        activations=kept,
        one_layer=one_layer + there,
        logits=_logits(geometry, workload, setup, device),
        update=_update(geometry, updated, setup, device),
        kv_cache=cache,
        sampling=sampling + width * away,
        overhead=0,
    )
    overhead = CONTEXT_BYTES[device] + round(FRAGMENTATION * bare.total)
    if device == "cuda":
        overhead += max(LEAST_RESERVE, round(RESERVE * (bare.total + overhead)))
    return replace(bare, overhead=overhead)


def _dense(geometry: Geometry, setup: Setup) -> int:
    """Bytes of the largest matrix while it is dequantised, with its scales in fp32."""
    if setup.quantisation == "none":
        return 0
    return round((setup.width + 4 / NF4_BLOCK) * max(m.inputs * m.outputs for m in geometry.within_layers))


def activations(geometry: Geometry, workload: Workload, setup: Setup) -> tuple[int, int]:
    """Bytes that the layers keep of one micro-batch, and bytes that one layer adds in the backward pass."""
    g = geometry
    width = setup.width
    prompts, completions = workload.split(setup.micro_batch_tokens, g.packed)
    tokens = prompts + completions
    held = tokens  # rows of keys and values
    heads = g.kv_heads
    mask = 0
    if g.packed:
        held = prompts + completions * workload.longest // workload.completion_tokens
        flash = setup.fused and setup.dtype == "bfloat16"  # which is chosen from Ampere on
        if not flash:
            if g.kv_heads > 1:  # with a mask heads are repeated; one head is seen by all without a copy
                heads = g.heads
            mask = width * completions * workload.longest
    attention = width * heads * g.head_dim
    mlp = width * g.intermediate

    kept = tokens * _kept_by_token(g, setup) + 2 * attention * held
    gradients = 2
    if setup.lora and not any(g.intermediate in (t.inputs, t.outputs) for t in _targeted(g, setup)):
        gradients = 3
    of_mlp = tokens * (gradients * mlp + width * g.hidden)
    of_attention = 4 * attention * held - 3 * tokens * mlp  # the MLP is done before attention
    passing = max(of_mlp, of_attention) + _dense(g, setup)

    around = tokens * (2 * width * g.head_dim + 64) + mask  # rotary tables, indices
    if setup.gradient_checkpointing:
        return g.layers * tokens * width * g.hidden + around, kept + passing
    return g.layers * kept + around, passing


def _kept_by_token(g: Geometry, setup: Setup) -> int:
    """Bytes that a layer keeps of each token, but for keys, values and the mask."""
    width = setup.width
    heads = width * g.heads * g.head_dim
    norm_width = 4
    in_mlp = 3
    of_full_norms = 2
    if setup.fused:
        norm_width = width
        in_mlp = 2
        of_full_norms = 1
    frozen = norm_width * g.normed + 8 + in_mlp * width * g.intermediate + 2 * heads + 4 * g.heads
    if not setup.lora:
        return frozen + of_full_norms * width * g.normed + width * g.intermediate + heads
    targets = _targeted(g, setup)
    ranks = sum(setup.lora_rank * t.count for t in targets)
    inputs = {(t.path.rpartition(".")[0], t.inputs, t.path.endswith("o_proj")): t.inputs * t.count for t in targets}
    return frozen + width * (ranks + sum(inputs.values())) // g.layers


def _targeted(g: Geometry, setup: Setup) -> list[Linear]:
    """The targeted modules within the layers."""
    return [linear for linear in g.targeted(setup.lora_targets) if linear in g.within_layers]


def _logits(g: Geometry, workload: Workload, setup: Setup, device: Device) -> int:
    """A block of logits, in fp32 and in the weights' dtype; all that may be kept; the final norm and hidden states."""
    prompts, completions = workload.split(setup.micro_batch_tokens, g.packed)
    rows = min(completions, BLOCK_TOKENS[device])
    whole = 4 * completions * g.vocabulary
    block = min(BLOCK_BYTES[device], 4 * rows * g.vocabulary)
    states = (prompts + completions) * (4 + 3 * setup.width) * g.hidden + rows * (4 + 2 * setup.width) * g.hidden
    size = LOGIT_BUFFERS * block + states
    if setup.width < 4:
        size += block // 2
    if whole <= CHUNK_BYTES and block == 4 * rows * g.vocabulary:
        size += whole
    return size


def _update(g: Geometry, trained: int, setup: Setup, device: Device) -> int:
    """Fp32 gradients for masters, some at a time; AdamW's square roots, on a GPU of all that it is given at once.

    On a CPU bitsandbytes turns the moments of one parameter at a time into fp32, with three passing copies beside them.
    """
    largest = min(g.largest // setup.parts, trained)
    together = trained
    size = 0
    if setup.width < 4:  # there are masters
        together = min(UPDATE_ELEMENTS, trained)
        if not setup.lora:
            together = max(together, largest)
        size = 4 * together
    if device == "cpu":
        size += (8 if setup.optimiser == "adamw" else 20) * largest
    elif setup.optimiser == "adamw":
        size += 4 * together
    return size


def _generating(g: Geometry, workload: Workload, setup: Setup, device: Device) -> tuple[int, int]:
    """The cache, full; and the rest, which is the most of what there is at different times.

    As evaluation makes it, with a prompt of its own for each row; the decoder has a prompt once for its whole group.
    The rest is logits and what drawing takes, some rows at a time, or one layer's scores, or the pass over prompts:
    some at a time, for the decoder beside the cache.
    """
    rows = max(workload.group, setup.generation_batch // workload.group * workload.group)
    row_bytes = 2 * g.layers * g.kv_heads * g.head_dim * setup.width
    prompts = rows * workload.prompt_tokens
    drawing = rows * g.vocabulary * setup.width + DRAWN * min(CHUNK_BYTES, 4 * rows * g.vocabulary)
    together = min(prompts, max(PREFILL_TOKENS[device], workload.prompt_tokens))
    token = setup.width * (3 * g.intermediate + 4 * g.hidden + 2 * g.head_dim) + workload.prompt_tokens
    reading = together * token
    scores = rows * g.heads * workload.longest * (3 * 4 + 2 * setup.width)
    wide = workload.prompt_tokens
    if g.decoded and device == "cuda":  # of CUDA graphs' pool, and of a shape's first token, which has no graph
        wide = -(-wide // PROMPT_WIDTHS) * PROMPT_WIDTHS
        drawing *= 2
        scores *= 2
    cache = rows * (wide + workload.completion_tokens) * row_bytes
    ahead = 0
    if g.decoded:
        # Rows that wait have no place yet; and what all prompts begin with is read once.
        ahead = (together + workload.prompt_tokens) * row_bytes
    else:
        cache = round(CACHE_GROWTH[device] * cache)
        reading += prompts * row_bytes - cache
    dense = _dense(g, setup)
    return cache, ahead + max(drawing, scores, reading + dense, dense)
