"""What the GPU is at, for people to look at. Not knowing it must never cost a training anything."""

from __future__ import annotations

from typing import Any

import torch


def gpu_figures(device: torch.device) -> dict[str, Any] | None:
    """Name; bytes that all processes use of its total, that this one's tensors take (allocated) and that torch holds
    for them (reserved); utilization from 0 to 1, None without pynvml. None on a CPU, and where nothing can be known."""
    if device.type != "cuda":
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
        return {
            "name": torch.cuda.get_device_name(device),
            "total_bytes": total,
            "used_bytes": total - free,
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
            "utilization": _utilization(device),
        }
    except Exception:  # whatever a driver does not know
        return None


def _utilization(device: torch.device) -> float | None:
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # pynvml is no dependency, and some devices tell it nothing
        return None
