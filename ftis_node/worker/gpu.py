"""Measures the GPU for display. A failed measurement must never disturb the training."""

from contextlib import suppress

import torch

from ftis_node.step_report import GpuFigures


def gpu_figures(device: torch.device, graphs: bool = False) -> GpuFigures | None:
    """The figures of a GPU, with `utilization` None without pynvml. None on a CPU, and if a measurement fails."""
    if device.type != "cuda":
        return None
    utilization = None
    with suppress(Exception):  # pynvml is no dependency, and some devices do not support it
        utilization = torch.cuda.utilization(device) / 100
    try:
        free, total = torch.cuda.mem_get_info(device)
        return GpuFigures(
            name=torch.cuda.get_device_name(device),
            total_bytes=total,
            used_bytes=total - free,
            allocated_bytes=torch.cuda.memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
            utilization=utilization,
            graphs=graphs,
        )
    except Exception:  # drivers may raise anything
        return None
