"""The compute side on a real card: `make gpu` runs these, and so does `make test` where there is one.

GPU_TESTS_ON=cpu pytest -m gpu tests/test_on_a_gpu.py     # the same on the CPU, which tries the tests themselves
"""

import os

import pytest
import torch

from ftis_node.host.allocator import GROWING, NAMES
from ftis_node.policy.generate import cache
from ftis_node.policy.nf4 import NF4Linear
from ftis_node.policy.room import make_way
from ftis_node.preflight.smoke import smoke
from tests.support.small_models import batch_of, opened_engine

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
ON_CARD = DEVICE != "cpu"
ROWS = [1, 2, 3]
KINDS = {
    "full": {"dtype": "float32"},
    "full in bf16": {"dtype": "bfloat16"},
    "lora in bf16, checkpointing": {"dtype": "bfloat16", "lora": True, "gradient_checkpointing": True},
}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ON_CARD and not torch.cuda.is_available(), reason="needs a GPU")]


def opened(device, **settings):
    return opened_engine(device=device, **settings)


def alike(one, other):
    """The tensors of a state that differ from another's; their names must be the same."""
    assert one.keys() == other.keys()
    differ = []
    for file, tensors in one.items():
        theirs = other[file]
        assert tensors.keys() == theirs.keys()
        for name, tensor in tensors.items():
            if not torch.equal(tensor.cpu(), theirs[name].cpu()):
                differ.append(f"{file}: {name}")
    return differ


def steps(engine, groups):
    return engine.step(batch_of(ROWS, groups, uneven=True))


@pytest.mark.parametrize("kind", KINDS)
def test_it_generates_trains_evaluates_and_goes_on_from_what_was_saved(kind, tmp_path):
    engine = opened(DEVICE, **KINDS[kind])
    assert engine.policy.device.type == torch.device(DEVICE).type

    report = steps(engine, engine.generate(ROWS).groups)
    assert report.skipped is None
    assert 0 <= engine.evaluate().pass_at_1 <= 1

    engine.save(str(tmp_path))
    other = opened(DEVICE, **KINDS[kind])
    other.restore(str(tmp_path), 1)
    assert alike(engine.checkpointer.state(live=True), other.checkpointer.state(live=True)) == []
    assert len(other.generate(ROWS).groups) == len(ROWS)


@pytest.mark.parametrize("kind", ["full", "full in bf16"])
def test_a_snapshot_is_the_state_bit_for_bit(kind):
    engine = opened(DEVICE, **KINDS[kind])
    steps(engine, engine.generate(ROWS).groups)

    copies = engine.checkpointer.state()

    assert copies["trainable.safetensors"]
    assert alike(engine.checkpointer.state(live=True), copies) == []
    for tensors in copies.values():
        assert all(tensor.device.type == "cpu" for tensor in tensors.values())


def test_a_step_says_what_the_cpu_says():
    here = opened("cpu", dtype="float32")
    there = opened(DEVICE, dtype="float32")
    groups = here.generate(ROWS).groups

    one = steps(here, groups)
    other = steps(there, groups)

    assert other.loss == pytest.approx(one.loss, rel=1e-3, abs=1e-5)
    assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-2)


def test_scores_of_bf16_are_summed_in_fp32():
    torch.manual_seed(0)
    query, keys = (torch.randn(4, 8, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    scores = cache._products(query, keys)

    wanted = torch.bmm(query.double().cpu(), keys.double().cpu().transpose(1, 2))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double().cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_the_small_computation_of_the_doctor_agrees():
    assert smoke(DEVICE)["wrong"] == []


@pytest.mark.parametrize("rows", [1, 12, 48, 96, 288])
def test_decoding_on_four_bits_has_the_products_that_train(rows):
    linear = torch.nn.Linear(512, 1408, bias=False).bfloat16()
    module = NF4Linear(linear, torch.device(DEVICE))
    x = torch.randn(rows, 512).to(DEVICE, torch.bfloat16)
    with torch.inference_mode():
        trained = torch.nn.functional.linear(x, module.dense()).float()
        decoded = module.product(x).float()
        assert (decoded - trained).std() < 0.01 * trained.std()


@pytest.mark.skipif(not ON_CARD, reason="of a card's allocator")
def test_segments_of_memory_grow_and_caches_can_be_emptied():
    block = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
    grows = GROWING in os.environ.get(NAMES[1], "")  # not under WSL2
    expandable = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    assert expandable == grows

    del block
    make_way(torch.device(DEVICE))
    opened(DEVICE)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
