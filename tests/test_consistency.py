"""Settings that cannot be together, and names that mean nothing, are told before a model is loaded."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from ftis_node.config.settings import OBJECTIVE_PARTS, Settings, collect
from ftis_node.errors import UsageError
from ftis_node.learner import choose_objective
from ftis_node.methods import NAMES
from ftis_node.methods.choices import PART_LIMITS


def settled(**flags):
    return collect(task="gsm8k", flags=flags, environment={})[0]


def refused(**flags):
    with pytest.raises(UsageError) as caught:
        settled(**flags)
    return caught.value


def test_every_part_of_the_objective_is_checked():
    assert {*NAMES, *PART_LIMITS} & Settings.model_fields.keys() == {"objective", *OBJECTIVE_PARTS}


@effort(max_examples=200)
@given(
    name=st.sampled_from(sorted(PART_LIMITS.keys() & Settings.model_fields)),
    value=st.sampled_from([-1, 0, 0.5, 1, 2, 1e9]) | st.floats(),
)
def test_a_number_is_refused_where_it_is_beyond_its_limits(name, value):
    if name == "inner_steps":
        if not math.isfinite(value) or value != int(value):
            assert f"{name!r} from flags" in refused(**{name: value}).what
            return
        value = int(value)
    if math.isfinite(value) and PART_LIMITS[name][1](value):
        settled(**{name: value})
    else:
        error = refused(**{name: value})
        assert name in error.what
        assert "(flags)" in error.what
        assert PART_LIMITS[name][0] in error.fix


@pytest.mark.parametrize("name", sorted(NAMES.keys() & Settings.model_fields))
def test_each_name_is_taken_and_a_misspelt_one_is_answered_with_the_nearest(name):
    for known in NAMES[name]:
        assert choose_objective(settled(**{name: known}), "gsm8k", completion_tokens=256)
    known = NAMES[name][-1]
    error = refused(**{name: known + "x"})
    assert f"{known + 'x'!r} (flags)" in error.what
    assert repr(known) in error.fix


SHARDED = {"device": "cpu,cpu", "sharded": True}
CONTRADICTIONS = {
    "two limits of memory": ({"vram_gb": 8, "vram_share": 0.5}, "vram_gb.*vram_share", "one of them"),
    "one port for two": ({"port": 4001, "http_port": 4001}, "cannot both have the port 4001", "0 for any"),
    "a device that is none": ({"device": "cudda"}, "'cudda' is no device", "'cuda'"),
    "a device without a number": ({"device": "cuda:"}, "is no device", "cuda:0"),
    "LoRA of nothing": ({"lora": True, "lora_targets": ""}, "lora_targets is empty", "q_proj"),
    "packets that the home cannot hold": ({"disk_gb": 1, "packet_quota_mb": 2000}, "2000 MB", "disk_gb"),
    "a host by name": ({"host": "localhost"}, "no IP address", "127.0.0.1"),
    "a page's host by address of the web": ({"http_host": "http://127.0.0.1"}, "neither an IP address", "127.0.0.1"),
    "a page's host with digits too many": ({"http_host": "127.0.0.0.1"}, "neither an IP address", "127.0.0.1"),
    "an address without listening": ({"announce": "/ip4/192.0.2.7/tcp/1", "listen": False}, "is false", "Leave out"),
    "learning by nothing of one's own": ({"objective": "gated", "own_share": 0}, "by own successes", "as ftis"),
    "learning from nobody": ({"objective": "grpo", "own_share": 0}, "own samples only", "own_share"),
    "a server for two devices": ({"engine": "vllm", "device": "cpu,cpu"}, "one device", "vLLM sample on the other"),
    **{
        f"shards with {other}": (SHARDED | other, "does not go with", "Leave out sharded")
        for other in ({"device": "cpu"}, {"lora": True}, {"quantisation": "nf4"}, {"optimiser": "adamw8bit"})
    },
    **{
        f"devices {them}": ({"device": them}, "cannot train together", "Name each GPU once")
        for them in ("cpu,cuda:0", "cuda:0,cuda:0", "auto,auto", "cuda,cuda:1", "cuda,cuda")
    },
}


@pytest.mark.parametrize("mistake", CONTRADICTIONS)
def test_what_contradicts_is_told_with_where_it_came_from(mistake):
    flags, what, fix = CONTRADICTIONS[mistake]
    error = refused(**flags)
    assert "(flags)" in error.what
    assert fix in error.fix
    assert re.search(what, error.what)


@pytest.mark.parametrize(
    "flags",
    [
        {"port": 4001, "http_port": 4001, "page": False},
        {"port": 0, "http_port": 0},
        {"own_share": 0},
        {"disk_gb": 0.5},
        {"disk_gb": 0.1},
        {"device": "cuda:11"},
        {"host": "::"},
        {"http_host": "trainer"},
        {"http_host": "gpu-1.example.org"},
        {"http_host": "::1"},
        {"device": "cpu,cpu"},
        {"device": "cpu,cpu,cpu"},
        {"device": "cuda:0,cuda:1"},
        {"vram_share": 1},
        {"lora": False, "lora_targets": ""},
        {"device": "cpu", "optimiser": "adamw8bit"},
    ],
)
def test_what_only_looks_like_a_contradiction_is_allowed(flags):
    settled(**flags)


BOUNDS = [
    ("nice", 0, 19),
    ("vram_share", 0.01, 1),
    ("own_data_share", 0.01, 0.9),
    ("http_port", 0, 65535),
]


@pytest.mark.parametrize(("name", "least", "most"), [*BOUNDS, ("min_peers", 0, 64)])
def test_limits_have_bounds(name, least, most):
    for value in (least, most):
        assert getattr(settled(**{name: value}), name) == value
    for value in (least - 1, most + 1):
        assert f"{name!r} from flags" in refused(**{name: value}).what


def test_a_choice_that_is_none_is_answered_with_the_nearest():
    assert "'json'" in refused(log_format="jason").fix
    assert "'likelihood'" in refused(defences="claims,likelyhood").fix


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disk_gb", 1e300),
        ("vram_gb", 1e300),
        ("learning_rate", 1e300),
        ("packet_quota_mb", 10**23),
        ("eval_every", 10**23),
        ("lora_alpha", 10**23),
        ("generation_batch", 10**23),
    ],
)
def test_a_number_that_nothing_can_hold_is_refused_before_anything_computes_with_it(name, value):
    error = refused(**{name: value})
    assert f"The {name} cannot be {value} (flags)" in error.what
    assert "smaller" in error.fix


def test_to_wait_without_end_and_the_largest_seed_are_allowed():
    assert settled(wait=float("inf"), seed=2**63 - 1).wait == float("inf")
