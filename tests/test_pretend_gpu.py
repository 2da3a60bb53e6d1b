"""The compute side on a device that behaves like a GPU: nothing mixes devices, and no wait of the host is new."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PINNED = "2.13.0"
SHORT = 9
LONG = 17
# Waits of the host by where they are. Another one slows every card down: take it away, or give a reason here.
ONCE = {  # a call of generate, and each time that rows take places
    "policy/generate/cache.py:_hide_padding": 2,
    "policy/generate/cache.py:_keep": 1,
    "policy/generate/cache.py:settle": 1,
    "policy/generate/prefill.py:__post_init__": 1,
    "policy/generate/native.py:_enter": 1,
    "policy/generate/native.py:_table": 2,
    "policy/generate/native.py:_change": 1,
    "policy/generate/prefill.py:_logits": 4,
}
EIGHTH = "policy/generate/native.py:look"  # every eighth token: who is done?
STEP = {
    "learner/learner.py:<listcomp>": 1,
    "learner/learner.py:_backward": 6,
    "learner/learner.py:_column": 3,
    "learner/optimiser.py:_norm": 1,
    "objective/columns.py:add": 4,
    "objective/diagnostics.py:_evidence": 2,
    "objective/diagnostics.py:_rows": 1,
    "objective/diagnostics.py:add": 7,
    "objective/objective.py:_divergence": 3,
    "objective/packed.py:owners": 1,
    "policy/packing.py:_placed": 2,
}

pytestmark = [
    pytest.mark.skipif(torch.__version__.split("+")[0] != PINNED, reason=f"the device needs torch {PINNED}"),
    pytest.mark.timeout(900),
]


CASES = {"full": slice(1, 3), "lora": slice(3, 4)}


@pytest.fixture(scope="module")
def phases() -> list[Any]:
    """What is refused, and what the phases counted: full training with one layer and with two, LoRA in bf16."""
    command = [sys.executable, "-m", "tests.pretend.drive", "1", "2", "1 --lora --bf16 --checkpointing"]
    ended = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module", params=CASES)
def told(request, phases) -> list[dict[str, Any]]:
    return phases[CASES[request.param]]


def test_nothing_mixes_devices_from_loading_to_restoring(told):
    for one in told:
        assert one["faults"] == []
        assert one["same after restoring"]


def test_in_two_bytes_sequences_go_to_flash_attention_as_they_lie(told):
    assert all(("packed, by FlashAttention" in one["way"]) == (len(told) == 1) for one in told)


def test_decoding_waits_for_the_host_once_in_eight_tokens(told):
    for one in told:
        short = one[f"{SHORT} tokens"]["waits"]
        long = one[f"{LONG} tokens"]["waits"]
        assert {**short, EIGHTH: 0} == {**long, EIGHTH: 0} == ONCE | {EIGHTH: 0}
        assert long[EIGHTH] - short[EIGHTH] == (LONG - SHORT) // 8


def test_a_shape_is_captured_once_in_a_process_and_graphs_stay_while_training(told):
    for one in told:
        assert one["generate"]["captures"] > 0
        assert one[f"{LONG} tokens again"]["captures"] == one["after a step"]["captures"] == 0


def test_the_named_device_is_the_current_one_before_anything_is_done_there(told):
    for one in told:
        assert one["load"]["current"][0] == ["pretend:0", 0]


def test_a_steps_waits_are_known_and_do_not_grow_with_the_model(told):
    for one in told:
        assert one["step"]["waits"] == STEP


def test_a_token_has_a_few_kernels_and_more_for_each_layer_all_launched_at_once(told):
    token = [_of_a_token(one, "kernels", "tokens") for one in told]
    if len(token) == 2:
        assert 0 < token[1] - token[0] <= 30  # a layer
    assert token[0] <= (81 if len(token) == 1 else 65)
    assert all(_of_a_token(one, "launches", "tokens") < 7 for one in told)
    apart = [_of_a_token(one, "launches", "tokens launched one by one") for one in told]
    assert all(0 < without <= kernels + 6 for without, kernels in zip(apart, token, strict=True))


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this CPU's kernels sum in another order by their rows"
)
def test_replayed_tokens_are_those_launched_one_by_one(told):
    for one in told:
        assert one["same without graphs"]


def _of_a_token(told, counted, phase):
    return (told[f"{LONG} {phase}"][counted] - told[f"{SHORT} {phase}"][counted]) / (LONG - SHORT)


def test_scoring_another_nodes_group_needs_no_device(told):
    nothing = {
        "launches": 0,
        "kernels": 0,
        "waits": {},
        "captures": 0,
        "current": [],
    }
    assert all(one["score"] == nothing for one in told)


def test_the_device_refuses_what_a_gpu_refuses(phases):
    """Otherwise the tests above could not fail."""
    assert phases[0] == [True, True, True, True, False]
