"""The parts of `make real` that try the guard of the fast paths: four faults in each path, on real weights.

`guard` is on the CPU: packing and the native decoder, in the dtype that is asked for, over NF4 weights too. `device` is
on the pretend GPU in bf16: sequences packed by FlashAttention (varlen), the decoder, and the decoder with CUDA graphs
alone wrong. A fault must end its own path, and no other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from ftis_node.config.settings import Settings
from ftis_node.policy.load import load_policy
from ftis_node.policy.policy import Policy
from ftis_node.policy.ready import ready
from tests.manual.real_parts import DATA, Check
from tests.support.faults import FAULTS, in_decoder, in_packing

ROWS = 4  # questions that the guard is tried on
KINDS: dict[str, dict[str, Any]] = {"whole": {}, "NF4": {"lora": True, "quantisation": "nf4"}}
_DISTANCE = re.compile(r"differ by \S+ \S+ is allowed")


def guard(source: str, dtype: str, *, full: bool) -> Iterator[Check]:
    """The fast paths on the CPU, of the weights as they are and in four bits."""
    for kind, chosen in KINDS.items():
        yield from tried(f"{kind}, {dtype}", Settings(model=source, device="cpu", dtype=dtype, **chosen))


def on_device(source: str, dtype: str, *, full: bool) -> Iterator[Check]:
    """The fast paths of a GPU on the pretend one, which `real.measured` has set up."""
    from tests.pretend import device

    with device.pretending():
        yield from tried("bf16 on a GPU", Settings(model=source, device=f"{device.NAME}:0", dtype="bfloat16"))


def tried(kind: str, settings: Settings) -> Iterator[Check]:
    """Load the model without a fault, then make it ready with each of them."""
    lines = (DATA / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()[:ROWS]
    texts = [json.loads(line)["question"] for line in lines]
    sound = load_policy(settings, texts)
    kernel = sound.causal_lm.config._attn_implementation
    yield Check(f"{kind}: no fault", sound.packed, sound.way)

    def again(fault: AbstractContextManager[None]) -> Policy:
        sound.causal_lm.set_attn_implementation("sdpa")
        with fault:
            return ready(replace(sound, packed=False, native=False), texts)

    ways = {"packing": (in_packing, lambda policy: not policy.packed and policy.native == sound.native)}
    if sound.native:
        ways["decoder"] = (in_decoder, lambda policy: policy.packed and not policy.native)
    if sound.native and sound.graphs:
        only = partial(in_decoder, static_only=True)
        ways["graphs"] = (only, lambda policy: policy.packed and policy.native and not policy.graphs)
    for way, (broken, ended) in ways.items():
        for fault in FAULTS:
            policy = again(broken(fault))
            distances = ", ".join(_DISTANCE.findall(policy.way))
            yield Check(f"{kind}: {way}, {fault}", ended(policy), distances or policy.way)
    sound.causal_lm.set_attn_implementation(kernel)


GUARD_PARTS = {"guard": guard, "device": on_device}
