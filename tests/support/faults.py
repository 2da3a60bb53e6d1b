"""Faults that the guard of the fast paths must see: what a decoder or a packed layout could get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from ftis_node.policy import packing, score
from ftis_node.policy.generate.cache import SharedCache
from ftis_node.policy.packing import LaidOut

FAULTS = ("positions off by one", "positions off by three", "scaling by 1.1", "a layer without attention")
_SHIFT = {FAULTS[0]: 1, FAULTS[1]: 3}
_LAYER = 1  # without attention


@contextmanager
def in_decoder(fault: str, *, static_only: bool = False) -> Iterator[None]:
    """The native decoder has the fault within; static_only: where it works by CUDA graphs alone."""
    positions = SharedCache.positions
    attend = SharedCache.attend

    def wrong_positions(self: SharedCache) -> Any:
        shift = 0 if static_only and not self.static else _SHIFT.get(fault, 0)
        return (positions(self) + shift).clamp(max=self.size.width + self.size.tokens - 1)

    def wrong_attend(self: SharedCache, layer: int, query: Any, scaling: float, bias: Any) -> Any:
        wrong = self.static or not static_only
        found = attend(self, layer, query, scaling * 1.1 if wrong and fault == FAULTS[2] else scaling, bias)
        return torch.zeros_like(found) if wrong and fault == FAULTS[3] and layer == _LAYER else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedCache, "positions", wrong_positions)
        patch.setattr(SharedCache, "attend", wrong_attend)
        yield


@contextmanager
def in_packing(fault: str) -> Iterator[None]:
    """Packed sequences have the fault within, by either attention."""
    pack = packing.pack

    def shifted(*args: Any) -> LaidOut:
        laid_out = pack(*args)
        places = laid_out.inputs["position_ids"].clone()
        places[:, int(laid_out.inputs["packing"].prompts.sum()) :] += _SHIFT.get(fault, 0)
        return laid_out._replace(inputs={**laid_out.inputs, "position_ids": places})

    def wrong(way: Callable[..., Any]) -> Callable[..., Any]:
        def attention(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            scaled = query * 1.1 if fault == FAULTS[2] else query
            found, _ = packing._attention(way, module, scaled, *args, **kwargs)
            return found * (fault != FAULTS[3] or module.layer_idx != _LAYER), None

        return attention

    right = {name: AttentionInterface._global_mapping[name] for name in packing.ATTENTIONS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "pack", shifted)
        for name, way in packing.ATTENTIONS.items():
            AttentionInterface.register(name, wrong(way))
        try:
            yield
        finally:
            for name, registered in right.items():
                AttentionInterface.register(name, registered)
