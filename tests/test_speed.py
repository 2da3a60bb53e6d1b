"""What is set for a GPU's speed and memory; none is here, so that these tests show what would be asked of it."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from ftis_node.host.allocator import GROWING, NAMES, expand_segments
from ftis_node.policy import room
from ftis_node.policy.generate import cache
from ftis_node.policy.load import load_policy
from tests.support.small_models import arithmetic_settings


def test_segments_grow_in_every_process_but_under_wsl2_unless_the_owner_sets_the_allocator(tmp_path):
    known = {"HOME": "/"}
    expand_segments(known)
    assert known == {"HOME": "/", "PYTORCH_CUDA_ALLOC_CONF": GROWING}
    for name in NAMES:
        owners = {name: "backend:cudaMallocAsync"}
        expand_segments(owners)
        assert owners == {name: "backend:cudaMallocAsync"}
    for kernel, grows in (
        ("6.6.87.2-microsoft-standard-WSL2", False),
        ("6.12.48+deb13-amd64", True),
    ):
        (tmp_path / "osrelease").write_text(f"{kernel}\n")
        there = {}
        expand_segments(there, tmp_path / "osrelease")
        assert there == ({NAMES[1]: GROWING} if grows else {})
    code = "import os, sys, ftis_node; assert 'torch' not in sys.modules; print(os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": ""},
        timeout=100,
    )
    assert told.stdout.strip() == GROWING, told.stderr


@pytest.mark.parametrize(("free", "emptied"), [(1, 1), (11, 0)])
def test_a_nearly_full_gpu_gets_cached_blocks_back(free, emptied, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    room.make_way(torch.device("cpu"))
    assert not calls
    room.make_way(torch.device("cuda"))
    assert len(calls) == emptied


@pytest.mark.parametrize("widens", [True, False])
def test_scores_are_summed_in_fp32_also_where_torch_cannot_widen(widens, monkeypatch):
    """A stand-in for a tensor of a GPU shows which product is asked for."""
    asked = []
    monkeypatch.setattr(cache, "_WIDENS", widens)
    monkeypatch.setattr(torch, "bmm", lambda a, b, **options: asked.append((a, options)))

    class OnGpu(Tensor):
        is_cuda = True

    query = torch.ones(1, 2, 4, dtype=torch.bfloat16).as_subclass(OnGpu)
    cache._products(query, torch.ones(1, 3, 4, dtype=torch.bfloat16))
    ((first, options),) = asked
    assert (first.dtype, options) == ((torch.bfloat16, {"out_dtype": torch.float32}) if widens else (torch.float32, {}))


def test_cudnns_attention_is_not_taken(monkeypatch):
    told = []
    monkeypatch.setattr("ftis_node.policy.load.use_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", told.append)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)
    monkeypatch.setattr("ftis_node.policy.load.ready", lambda policy, texts: policy)
    load_policy(arithmetic_settings())
    assert told == [False]
