"""Seconds of a step on a GPU, by arithmetic: no measurement, and to be read with errors of a third either way.

Rates follow from a card's data sheet and a share of them that kernels of this kind reach elsewhere:

    a token of all rows   the slower of reading the weights (80 % of the bandwidth) and of multiplying with them, 2
                          operations a weight and row (60 % of the matrix rate); beyond the rows of bitsandbytes'
                          fused kernel weights of four bits are written and read again in 16
                        + keys and values, read in small products: a quarter of the bandwidth
                        + drawing a token: `_DRAWING` passes over fp32 [rows, vocabulary]
                        + `_LAUNCHES` kernels a layer, replayed as a graph, `_KERNEL_SECONDS` each
    training              6 operations a weight and token, 4 with LoRA; 2 more with gradient checkpointing; a prompt
                          once for its group, but with each completion where sequences are padded; 35 % of the rate
"""

from dataclasses import dataclass
from typing import NamedTuple

from ftis_node.fit.geometry import Geometry
from ftis_node.fit.memory import Device
from ftis_node.fit.plan import Plan

READING = 0.8
MULTIPLYING = 0.6
_SMALL_PRODUCTS = 0.25
_TRAINING = 0.35
_DRAWING = 6
DEQUANTISED = 4  # bytes a weight: 16 bits, written and read
_LAUNCHES = 21
_KERNEL_SECONDS = 4e-6


@dataclass(frozen=True)
class Card:
    """vram: GB, of which nodes without a limit of their own share what is left; tflops: dense 16-bit products with fp32
    sums; bandwidth: GB/s; fused: rows up to which a product with weights of four bits is one kernel. By default an RTX
    4090.
    """

    device: Device = "cuda"
    vram: float = 24.0
    tflops: float = 165.0
    bandwidth: float = 1008.0
    fused: int = 256

    def product(self, read: float, weights: float, rows: float) -> float:
        """Seconds of products of these rows with so many weights, for which `read` bytes are read."""
        reading = read / (self.bandwidth * 1e9 * READING)
        multiplying = 2 * weights * rows / (self.tflops * 1e12 * MULTIPLYING)
        return max(reading, multiplying)


CARDS = {
    "RTX 4060 8 GB": Card(vram=8, tflops=30, bandwidth=272),
    "RTX 3060 12 GB": Card(vram=12, tflops=25.5, bandwidth=360, fused=128),
    "T4 16 GB": Card(vram=16, tflops=65, bandwidth=320, fused=64),
    "RTX 4090 24 GB": Card(),
    "H100 80 GB": Card(vram=80, tflops=989, bandwidth=3350, fused=64),
}


class Work(NamedTuple):
    """A step: groups, completions of each (`group`), and mean tokens of a prompt and of a completion; cap: of a
    completion, which few reach."""

    groups: int
    group: int
    prompt: float
    completion: float
    cap: int

    @property
    def rows(self) -> int:
        """Completions of all groups; 0 for a node that generates nothing."""
        return self.groups * self.group


def generating(shape: Geometry, chosen: Plan, work: Work, card: Card) -> float:
    """Seconds to sample all completions; a row that ends gives its place to the next one."""
    if not work.rows:
        return 0.0
    places = min(chosen.generation_batch, work.rows)
    tokens = work.rows * work.completion / places + work.cap - work.completion  # the last ones end one by one
    rows = work.rows * work.completion / tokens
    rate = card.bandwidth * 1e9
    again = 0  # bytes of weights that are read once more
    if chosen.quantisation == "nf4" and places > card.fused:
        for one in shape.within_layers:
            again += DEQUANTISED * one.inputs * one.outputs * one.count
    weights = card.product(chosen.memory.weights + again, shape.parameters, rows)
    kept = 2 * shape.layers * shape.kv_heads * shape.head_dim * chosen.width  # bytes of a token
    past = work.completion / 2 + work.prompt / work.group  # tokens of a row
    keys = kept * rows * past / (rate * _SMALL_PRODUCTS)
    drawing = _DRAWING * 4 * rows * shape.vocabulary / (rate * READING)
    launches = _LAUNCHES * shape.layers * _KERNEL_SECONDS
    return tokens * (weights + keys + drawing + launches)


def training(shape: Geometry, chosen: Plan, work: Work, card: Card) -> float:
    """Seconds to train once on all completions, own and foreign: forward and backward, without the optimiser."""
    operations = 6
    if chosen.lora:
        operations = 4
    if chosen.gradient_checkpointing:
        operations += 2
    prompts = work.rows
    if shape.packed:
        prompts = work.groups
    tokens = prompts * work.prompt + work.rows * work.completion
    return operations * shape.parameters * tokens / (card.tflops * 1e12 * _TRAINING)
