"""A lack of memory: how it is recognised, that a passing one costs little, and that sizes grow again after it."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from ftis_node.errors import FtisError
from ftis_node.node.compute import ComputeProcess
from ftis_node.node.options import JoinOptions
from ftis_node.packet import Completion
from ftis_node.policy import room
from ftis_node.policy.room import GROW_AFTER, Room, out_of_memory
from ftis_node.store.home import Home
from ftis_node.worker.engine import Engine
from tests.support.learners import OWN, assert_same, learner, vertical, weights_of
from tests.support.small_models import arithmetic_run, arithmetic_settings, opened_engine
from tests.support.steps import step_report, taken_step

SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.9 GiB total capacity)"),
    RuntimeError("Native API failed. Native API returns: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES) out of memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.94 GB, other allocations: 13.70 MB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
]
OTHERS = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("CUDA error: an illegal memory access was encountered; then out of memory"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("out of memory"),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: f"{type(error).__name__}: {str(error)[:60]}")
def test_a_lack_of_memory_is_recognised_whoever_tells_it(error):
    assert out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: f"{type(error).__name__}: {str(error)[:60]}")
def test_what_breaks_the_device_or_is_a_mistake_is_no_lack_of_memory(error):
    assert not out_of_memory(error)


@pytest.fixture
def no_waiting(monkeypatch) -> list[float]:
    """The attempts follow one another at once; what they would have waited."""
    waited = []
    monkeypatch.setattr(room, "time", SimpleNamespace(sleep=waited.append))
    return waited


def failing(subject, times):
    """The model's next forward passes lack memory so many times, as when another process has taken it."""
    left = [times]

    def refuse(*_):
        if left[0] > 0:
            left[0] -= 1
            raise torch.AcceleratorError("CUDA error: out of memory")

    subject.policy.causal_lm.register_forward_pre_hook(refuse)
    subject.policy.causal_lm.get_decoder().register_forward_pre_hook(refuse)


def long_batch():
    """Of some 20,000 tokens, the longest sample has 103."""
    ids = torch.arange(100).remainder(26).numpy().astype("uint32")
    claims = (0.0 * ids - 3).astype("float32")
    completions = [Completion(ids, claims, False) for _ in range(48)]
    return [vertical("own", [3, 4, 5], completions, [0, 1] * 24) for _ in range(4)]


def proven():
    subject = learner(micro_batch_tokens=16_384)
    subject.step(OWN)
    return subject


@pytest.mark.usefixtures("no_waiting")
def test_a_passing_shortage_costs_no_micro_batch():
    subject = proven()
    failing(subject, 3)
    report = subject.step(OWN)
    assert report.skipped is None
    assert report.memory_retries == 3
    assert subject.room.size == report.micro_batch_tokens == 16_384


def test_one_shortage_of_memory_does_not_cripple_a_node_for_good(no_waiting):
    subject = proven()
    batch = long_batch()
    failing(subject, 8)
    first = subject.step(batch)
    assert first.skipped is None
    assert first.micro_batch_tokens == 512
    assert no_waiting == [1.0, 5.0, 15.0], "then in smaller pieces"
    for _ in range(5 * GROW_AFTER):
        assert subject.step(OWN).memory_retries == 0
    assert subject.room.size == 16_384, "what fits again grows back, up to the plan"


@pytest.mark.usefixtures("no_waiting")
def test_nothing_is_cut_below_the_longest_sample_for_that_saves_nothing():
    subject = proven()
    before = weights_of(subject)
    failing(subject, 10**9)
    with pytest.raises(FtisError, match="single completion"):
        subject.step(long_batch())
    assert subject.room.size == 103
    assert_same(weights_of(subject), before)
    assert all(parameter.grad is None for parameter in subject.trainable.values())


def test_what_is_too_much_each_time_is_tried_ever_more_rarely(no_waiting):
    room = Room(1000)
    tried = 0
    for _ in range(2000):
        while room.size > 300:
            tried += 1
            assert room.short(1000, 1)
        room.fine()
    assert room.size == 250
    assert tried < 20
    assert len(no_waiting) == 1, "a size that has never fitted is waited for once, one that was grown to not at all"


@pytest.mark.usefixtures("no_waiting")
def test_a_shortage_in_evaluation_or_generation_is_its_own():
    engine = opened_engine(generation_batch=64, eval_prompts=40)
    failing(engine, 3)
    engine.evaluate()
    assert engine.evaluations.room.size < 64
    assert engine._generating.size == 64
    tokens = engine.learner.room.size
    failing(engine, 3)
    answer = engine.generate(list(range(8)))
    assert answer.generation_batch < 64
    assert [len(group.rewards) for group in answer.groups] == [8] * 8
    assert engine.generate([1]).generation_batch == answer.generation_batch, "what was learned is kept"
    assert engine.learner.room.size == tokens


def test_what_was_learned_is_where_a_start_begins_and_not_where_it_ends():
    engine = Engine()
    kept = {"micro_batch_tokens": 33, "generation_batch": 16}
    facts = engine.load(arithmetic_settings(), "arithmetic", remembered=kept)
    engine.open(arithmetic_run(facts))
    room = engine.learner.room
    assert room.size == max(64, engine.run.prompt_tokens + engine.run.completion_tokens), "33 tokens saved nothing"
    assert room.most == facts.plan.micro_batch_tokens > room.size
    assert engine._generating.size == 16
    assert engine._generating.most == facts.plan.generation_batch
    for _ in range(10 * GROW_AFTER):
        room.fine()
    assert room.size == room.most


def test_what_has_grown_again_is_forgotten(tmp_path):
    home = Home(tmp_path)
    process = ComputeProcess(JoinOptions(home))
    facts = Engine().load(arithmetic_settings(), "arithmetic")
    process.loaded = msgspec.structs.replace(
        facts, plan=replace(facts.plan, micro_batch_tokens=512, generation_batch=64)
    )

    def stepped(micro_batch_tokens, generation_batch):
        process.stepped(taken_step(report=step_report(micro_batch_tokens=micro_batch_tokens)), generation_batch)

    stepped(128, 32)
    assert process._learned == {"micro_batch_tokens": 128, "generation_batch": 32}
    stepped(256, 64)
    assert process._learned == {"micro_batch_tokens": 256}
    stepped(512, 64)
    assert process._learned == {}
