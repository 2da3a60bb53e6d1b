"""Geometries of Qwen2.5, and workloads, that plans of memory are made for."""

from collections.abc import Sequence
from typing import Any

from ftis_node.fit.geometry import Geometry
from ftis_node.fit.memory import Device, Dtype, Workload
from ftis_node.fit.plan import Plan, Wishes, plan
from ftis_node.policy.measure import geometry_of, known_config
from ftis_node.text import GB

GSM8K = Workload(prompt_tokens=512, completion_tokens=256, group=12, batch_groups=24)
SHORT = Workload(prompt_tokens=64, completion_tokens=64, group=4, batch_groups=4)


def qwen(size: str) -> Geometry:
    config = known_config(f"qwen2.5-{size}")
    assert config is not None
    return geometry_of(config, f"qwen2.5-{size}")


THREE = qwen("3b")
HALF = qwen("0.5b")
MIDDLE = qwen("1.5b")


def planned(
    shape: Geometry,
    gb: float,
    workload: Workload = GSM8K,
    device: Device = "cuda",
    *,
    may: Sequence[str] = (),
    fastest: Dtype = "bfloat16",
    **wishes: Any,
) -> Plan:
    """A plan; may: what it may choose besides, `eight_bit` or `four_bit`. fastest: the dtype of the device."""
    choices = {"eight_bit": "optimiser" in wishes} | dict.fromkeys(may, True)
    return plan(shape, int(gb * GB), workload, Wishes(**wishes), device, **choices, dtype=fastest)
