"""What is set for a GPU's speed and memory; none is here, so that these tests show what would be asked of it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ftis_node.host.allocator import GROWING, NAMES, expand_segments
from ftis_node.learner import copies
from ftis_node.learner.copies import copied, through
from ftis_node.policy import room
from ftis_node.policy.generate import cache
from ftis_node.policy.load import load_policy
from tests.support.small_models import arithmetic_settings


def test_segments_grow_in_every_process_but_under_wsl2_unless_the_owner_sets_the_allocator(tmp_path: Path) -> None:
    known = {"HOME": "/"}
    expand_segments(known)
    assert known == {"HOME": "/", "PYTORCH_CUDA_ALLOC_CONF": GROWING}
    for name in NAMES:
        owners = {name: "backend:cudaMallocAsync"}
        expand_segments(owners)
        assert owners == {name: "backend:cudaMallocAsync"}
    for kernel, grows in (("6.6.87.2-microsoft-standard-WSL2", False), ("6.12.48+deb13-amd64", True)):
        (tmp_path / "osrelease").write_text(f"{kernel}\n")
        there: dict[str, str] = {}
        expand_segments(there, tmp_path / "osrelease")
        assert there == ({NAMES[1]: GROWING} if grows else {})
    code = "import os, sys, ftis_node; assert 'torch' not in sys.modules; print(os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": ""}, timeout=100)
    assert told.stdout.strip() == GROWING, told.stderr


def test_copies_are_contiguous_and_their_own() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    made = copied({"turned": matrix.T, "same": matrix, "none": torch.empty(0)})
    assert torch.equal(made["turned"], matrix.T) and made["turned"].is_contiguous()
    made["same"] += 1
    assert matrix[0, 0] == 0


class Late:
    """Buffers into which a copy has arrived only when its event was waited for."""

    def __init__(self, count: int, size: int) -> None:
        self.buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        self.made = self.waited = 0

    def mark(self) -> Any:
        buffer = self.buffers[self.made % len(self.buffers)]
        self.made += 1
        sent = buffer.clone()
        buffer.fill_(255)

        def synchronize() -> None:
            self.waited += 1
            buffer.copy_(sent)

        return SimpleNamespace(synchronize=synchronize)


def test_a_copy_through_buffers_is_whole_and_reads_none_before_it_has_arrived() -> None:
    late = Late(2, 64)
    sources: list[Tensor] = [
        torch.arange(100, dtype=torch.float32),
        torch.tensor(3.0),
        torch.empty(0),
        torch.arange(33).to(torch.bfloat16).reshape(3, 11),
        torch.tensor([True, False]),
        torch.arange(64, dtype=torch.uint8),
    ]
    pairs = [(source, torch.empty_like(source)) for source in sources]
    through(late.buffers, pairs, late.mark)
    assert all(torch.equal(source, copy) for source, copy in pairs)
    assert late.made == late.waited == 7 + 1 + 0 + 2 + 1 + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has pinned memory")
def test_without_pinned_memory_there_are_no_buffers() -> None:
    assert copies._pinned() == []


@pytest.mark.parametrize(("free", "emptied"), [(1, 1), (11, 0)])
def test_a_nearly_full_gpu_gets_cached_blocks_back(free: int, emptied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    room.make_way(torch.device("cpu"))
    assert not calls
    room.make_way(torch.device("cuda"))
    assert len(calls) == emptied


@pytest.mark.parametrize("widens", [True, False])
def test_scores_are_summed_in_fp32_also_where_torch_cannot_widen(widens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a tensor of a GPU shows which product is asked for."""
    asked: list[Any] = []
    monkeypatch.setattr(cache, "_WIDENS", widens)
    monkeypatch.setattr(torch, "bmm", lambda a, b, **options: asked.append((a, options)))

    class OnGpu(Tensor):
        is_cuda = True  # type: ignore[assignment]

    query = torch.ones(1, 2, 4, dtype=torch.bfloat16).as_subclass(OnGpu)
    cache._products(query, torch.ones(1, 3, 4, dtype=torch.bfloat16))
    ((first, options),) = asked
    assert (first.dtype, options) == ((torch.bfloat16, {"out_dtype": torch.float32}) if widens else (torch.float32, {}))


def test_cudnns_attention_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr("ftis_node.policy.load.use_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", told.append)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)
    monkeypatch.setattr("ftis_node.policy.load.ready", lambda policy, texts: policy)
    load_policy(arithmetic_settings())
    assert told == [False]
