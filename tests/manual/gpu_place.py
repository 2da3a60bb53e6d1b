"""Where the parts of `make gpu` run, and what is predicted of it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ftis_node.config.settings import Settings, collect
from ftis_node.fit.geometry import Geometry
from ftis_node.fit.plan import Plan
from ftis_node.lab.bench.model import Size
from ftis_node.lab.step_seconds import Card, Work
from ftis_node.policy.load import fastest_dtype
from tests.manual.part import ROOT

tell = partial(print, "   ", file=sys.stderr, flush=True)


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
    def cuda(self) -> bool:
        return self.on.type == "cuda"

    @property
    def half(self) -> torch.dtype:
        """The numbers of two bytes that the device is fastest with."""
        if self.cuda:
            return getattr(torch, fastest_dtype(self.on))
        return torch.bfloat16

    def settings(self, model: str, **wished: Any) -> Settings:
        """Settings of a model; in the tiny form of the smallest one."""
        chosen = {"model": "tiny-a" if self.small else model, "device": self.device, **wished}
        return collect(task="", flags=chosen, environment={})[0]

    def size(self, groups: int) -> Size:
        """Prompts of 60 tokens, each with 12 completions of 256."""
        if self.small:
            return Size(2, 2, 8, 8)
        return Size(groups, 12, 60, 256)

    def seconds(self, phase: Callable[..., float], shape: Geometry, chosen: Plan, size: Size) -> float | None:
        """Predicted; None before the card's rates are known."""
        if self.card is None:
            return None
        work = Work(size.groups, size.group, size.prompt_tokens, size.completion_tokens, size.completion_tokens)
        return phase(shape, chosen, work, self.card)

    def rate(self, phase: Callable[..., float], shape: Geometry, chosen: Plan, size: Size) -> float | None:
        """Predicted completion tokens a second."""
        seconds = self.seconds(phase, shape, chosen, size)
        if seconds is None:
            return None
        return size.tokens / seconds
