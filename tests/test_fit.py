"""`ftis-node fit` says what fits before anything is downloaded, in words and as JSON."""

import json
import shlex
from functools import partial

import pytest
from huggingface_hub import constants
from transformers import Starcoder2Config

from ftis_node.cli.common import parse_pairs
from ftis_node.cli.pace import card_named
from ftis_node.config.settings import collect
from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import Wishes, plan
from ftis_node.policy.measure import geometry_of
from ftis_node.text import GB
from tests.support.cli import Cli
from tests.support.small_models import tiny_config

KEYS = {
    "model",
    "parameters",
    "budget_gb",
    "fits",
    "lora",
    "dtype",
    "quantisation",
    "optimiser",
    "devices",
    "sharded",
    "gradient_checkpointing",
    "micro_batch_tokens",
    "generation_batch",
    "memory",
    "reasons",
    "command",
    "checkpoint_gb",
    "checkpoint_minutes",
    "checkpoints_gb_a_day",
    "seconds",
}


@pytest.fixture
def fit(monkeypatch, cli) -> Cli:
    """The command in this process, with no hub to ask: exit code, stdout and stderr."""
    monkeypatch.setattr("ftis_node.policy.measure.where_to_look", lambda source: {"local_files_only": True})
    return partial(cli, "fit")


def answer_of(fit, *flags, code=0):
    ended, out, err = fit(*flags, "--json")
    assert ended == code, err
    answer = json.loads(out)
    return answer


def test_a_configuration_is_enough_and_no_hub_needed(tmp_path, cli, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    tiny_config(vocab_size=40).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    answer = answer_of(partial(cli, "fit"), "--model", tmp_path, "--vram", "4", "--completion-tokens", "64")
    assert answer.keys() == KEYS
    assert answer["parameters"] == 18_208
    assert answer["fits"] is True
    assert answer["lora"] is False
    assert answer["dtype"] == "float32"
    assert answer["budget_gb"] == 4
    assert answer["memory"]["total"] == max(answer["memory"]["training"], answer["memory"]["generating"])


def test_a_short_name_needs_no_hub_either_and_the_command_is_one_that_join_understands(fit):
    ended, out, err = fit("--model", "qwen2.5-coder-3b-instruct", "--vram", "24", "--json")
    assert ended == 0
    assert err.startswith("Reading the configuration of qwen2.5-coder-3b-instruct.\n")
    assert "0:00" not in err
    answer = json.loads(out)
    assert answer["parameters"] == 3_085_938_688
    assert answer["lora"] is True
    assert answer["fits"] is True
    assert answer["reasons"][0].startswith("LoRA, because full training")
    assert "are weights, gradients and optimiser state of every parameter" in answer["reasons"][0]
    words = shlex.split(answer["command"])
    assert words[:4] == ["ftis-node", "join", "--model", "qwen2.5-coder-3b-instruct"]
    assert "--lora" in words
    pairs = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    settings, _ = collect(task="gsm8k", flags=parse_pairs(pairs), environment={})
    for key in ("dtype", "optimiser", "gradient_checkpointing", "micro_batch_tokens", "generation_batch"):
        assert getattr(settings, key) == answer[key]


def test_flags_are_wishes_and_what_does_not_fit_fails(fit):
    pairs = ("dtype=float32", "gradient_checkpointing=false", "micro_batch_tokens=768")
    flags = ("--full", *(word for pair in pairs for word in ("--set", pair)))
    answer = answer_of(fit, "--model", "qwen2.5-3b", "--vram", "24", *flags, code=1)
    assert answer["lora"] is False
    assert answer["dtype"] == "float32"
    assert answer["fits"] is False
    assert answer["gradient_checkpointing"] is False
    assert answer["micro_batch_tokens"] == 768
    assert "would do" in answer["reasons"][-1]


def test_people_get_a_table_reasons_and_the_command(fit):
    code, out, _ = fit("--model", "qwen2.5-0.5b", "--vram", "24")
    assert code == 0
    told = (
        "494,032,768 parameters",
        "KV cache",
        "It fits on a GPU.",
        "- Full training fits",
        "ftis-node join --model",
        "context, fragmentation, reserve",
        "- Kept free: 2% and at least 300 MB",
        "- A step takes about",
    )
    assert all(part in out for part in told), out


def test_caps_can_be_given_instead_of_a_task(fit):
    machine = ("--model", "qwen2.5-0.5b", "--vram", "24")
    short = answer_of(fit, *machine, "--prompt-tokens", "32", "--completion-tokens", "32")
    long = answer_of(fit, *machine, "--completions", "16")
    assert short["memory"]["kv_cache"] < long["memory"]["kv_cache"]
    assert long["generation_batch"] % 16 == 0
    usual, box, given = (
        answer_of(fit, "--model", f"qwen2.5-0.5b{rest[0]}", "--vram", "24", *rest[1:])["memory"]["kv_cache"]
        for rest in ([""], ["-instruct"], ["-instruct", "--completion-tokens", "256"])
    )
    assert usual == given < box, "an instruct model is asked for a box, and that takes room"


def test_the_time_of_a_step_follows_from_a_data_sheet_or_from_what_this_machine_computes(fit):
    model = ("--model", "qwen2.5-0.5b", "--lora")
    caps = ("--completion-tokens", "32")
    fast, slow, long = (
        answer_of(fit, *model, "--vram", vram, *more)["seconds"]
        for vram, more in (("80", caps), ("8", caps), ("8", ()))
    )
    for part in ("step_seconds", "first_evaluation_seconds"):
        assert 0 < fast[part] < slow[part] < long[part]
    assert "by arithmetic for the card H100 80 GB, so" in fit(*model, "--vram", "80")[1]
    assert answer_of(fit, *model, "--vram", "7")["seconds"] is None, "no card of that size is known"
    here = answer_of(fit, *model, "--device", "cpu", *caps)["seconds"]
    assert here["step_seconds"] > fast["step_seconds"]


def test_a_card_is_known_by_the_name_of_its_driver_and_its_relatives_are_not():
    known = {
        "NVIDIA GeForce RTX 3060": 12,
        "Tesla T4": 16,
        "NVIDIA GeForce RTX 4090": 24,
        "NVIDIA H100 80GB HBM3": 80,
    }
    assert {name: getattr(card_named(name), "vram", None) for name in known} == known
    relatives = ("RTX 3060 Ti", "RTX 4090 D", "RTX 4060 Laptop GPU", "RTX 3090")
    for name in (*(f"NVIDIA GeForce {one}" for one in relatives), "NVIDIA L4", "NVIDIA H200", "NVIDIA H100 PCIe"):
        assert card_named(name) is None, name


def test_a_chosen_lora_target_that_means_nothing_there_is_told():
    shape = geometry_of(Starcoder2Config(hidden_size=64, intermediate_size=96, num_hidden_layers=2), "m")
    workload = Workload(prompt_tokens=64, completion_tokens=64, group=4, batch_groups=4)
    chosen = ("q_proj", "o_proj", "gate_proj")
    usual = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for targets in (chosen, chosen[:2], ("q_proj", "v_proj"), usual):
        wishes = Wishes(lora=True, lora_targets=targets)
        reasons = " ".join(plan(shape, 8 * GB, workload, wishes, "cuda", eight_bit=False).reasons)
        assert ("no module gate_proj:" in reasons) == ("no module" in reasons) == (targets == chosen)
