"""How long a sequence may be: a model's context, where its rotary frequencies change, and what a run's rows need."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BloomConfig, GPT2Config, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ftis_node.errors import UsageError
from ftis_node.fit.context import context_of
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.score import completion_logprobs
from ftis_node.worker.engine import Engine
from tests.support.cli import refused
from tests.support.daemons import STILL, run_cli
from tests.support.small_models import arithmetic_run, arithmetic_settings, tiny_config, tiny_policy, tiny_tokenizer

SHORT = 32
LONG = 64
HALF = 4  # of a head's dimensions
BEFORE = {"original_max_position_embeddings": SHORT}
ROPES = {
    "default": ({}, LONG),
    "linear": ({"factor": 2.0}, LONG),
    "dynamic": ({"factor": 4.0}, LONG),
    "yarn": ({"factor": 2.0} | BEFORE, LONG),
    "llama3": ({"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | BEFORE, LONG),
    "longrope": ({"factor": 2.0, "short_factor": [1.0] * HALF, "long_factor": [3.0] * HALF} | BEFORE, SHORT),
    "proportional": ({"partial_rotary_factor": 0.5}, LONG),
}
"""Each kind of rotary embedding, and how many tokens a model with one may have."""


def policy_with(rope):
    parameters = {"rope_type": rope, "rope_theta": 10_000.0, **ROPES[rope][0]}
    return tiny_policy(max_position_embeddings=LONG, rope_parameters=parameters)


def sequence(tokens, seed):
    ids = np.random.default_rng(seed).integers(2, 26, tokens)
    return Prefixed(ids[:5].tolist(), [ids[5:]])


@torch.no_grad()
def with_neighbour(policy, tokens, *, packed):
    """Log-probs of a short sample alone, and beside one of so many tokens."""
    policy.causal_lm.set_attn_implementation("ftis_tables" if packed else "sdpa")
    policy = replace(policy, packed=packed)
    sample = sequence(15, 0)
    alone = completion_logprobs(policy, [sample], 1.0)[0]
    return alone, completion_logprobs(policy, [sample, sequence(tokens, 1)], 1.0)[0][: len(alone)]


def test_every_rotary_embedding_that_transformers_knows_is_tried():
    assert ROPES.keys() == {"default", *ROPE_INIT_FUNCTIONS}


LAYOUTS = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


@LAYOUTS
@pytest.mark.parametrize("rope", ROPES)
def test_within_its_context_a_models_log_probs_do_not_depend_on_neighbours(rope, packed):
    policy = policy_with(rope)
    limit = context_of(policy.causal_lm.config).tokens
    assert policy.packed
    assert limit == ROPES[rope][1]
    alone, beside = with_neighbour(policy, int(limit), packed=packed)
    torch.testing.assert_close(beside, alone, atol=2e-5, rtol=1e-5)


@LAYOUTS
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_beyond_it_they_do_and_padding_does_not_help(rope, packed):
    """One long sample changes the frequencies of all that are computed with it. So none may be longer."""
    alone, beside = with_neighbour(policy_with(rope), ROPES[rope][1] + 20, packed=packed)
    assert float((alone - beside).abs().max()) > 0.1


def test_a_context_is_known_by_whatever_name_the_architecture_gives_it():
    assert context_of(GPT2Config(n_positions=77)).tokens == 77
    assert context_of(BloomConfig()).tokens == float("inf")
    assert context_of(tiny_config()).tokens == 128


def test_a_longrope_within_one_kind_of_layer_limits_the_model():
    layers = {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 40}, "other": None}
    found = context_of(PretrainedConfig(max_position_embeddings=100, rope_parameters=layers))
    assert found.tokens == 40
    assert "longrope" in found.why


# --- what a run's rows need -----------------------------------------------------------------------------------------


def model_in(folder, **changes):
    tiny_policy(**changes).causal_lm.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def short(tmp_path) -> str:
    """The folder of a model with room for 20 tokens."""
    return model_in(tmp_path / "short", max_position_embeddings=20)


def rows_in(path, questions):
    path.write_text("".join(json.dumps({"prompt": text, "answer": 1}) + "\n" for text in questions))
    return str(path)


SUMS = [f"{a}+{b}=" for a in range(5) for b in range(5)]


def loaded(task, eval_data=None, **flags):
    engine = Engine()
    return engine, engine.load(arithmetic_settings(**flags), task, eval_data=eval_data)


@pytest.mark.parametrize("kind", ["training", "held-out"])
def test_a_row_longer_than_the_runs_cap_is_named_with_its_length(kind, tmp_path):
    long = "1+2+3+4+5+6+7+8+9="
    longer = rows_in(tmp_path / "longer.jsonl", [*SUMS, long])
    if kind == "held-out":
        engine, facts = loaded(rows_in(tmp_path / "sums.jsonl", SUMS), longer)
    else:
        engine, facts = loaded(longer)
    place = rf"Line 26 of longer.jsonl \(the {kind} data\)"
    with pytest.raises(UsageError, match=rf"{place} is a prompt of 18 tokens, and the run allows 17") as told:
        engine.open(arithmetic_run(facts, prompt_tokens=17))
    assert long in told.value.what
    assert "prompt_tokens" in told.value.fix
    engine.open(arithmetic_run(facts, prompt_tokens=18))


def test_a_run_longer_than_the_models_context_is_refused_with_the_row_that_is(short):
    """Its rows must be the same for everybody: none is cut or left out."""
    engine, facts = loaded("arithmetic", model=short)
    with pytest.raises(UsageError, match=r"prompt of 6 tokens and a completion may have 15, .* room for 20") as told:
        engine.open(arithmetic_run(facts, completion_tokens=15))
    assert "longer context" in told.value.fix
    engine.open(arithmetic_run(facts, completion_tokens=14))
    assert engine.generate([0]).groups
    assert engine.evaluate().prompts == 40


def test_a_model_whose_frequencies_change_is_held_to_the_length_before_that(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        **ROPES["longrope"][0],
        "original_max_position_embeddings": 21,
    }
    name = model_in(tmp_path / "changing", max_position_embeddings=LONG, rope_parameters=rope)
    engine, facts = loaded("arithmetic", model=name)
    with pytest.raises(UsageError, match=r"a completion may have 16, but .* beyond 21 tokens \(longrope\)"):
        engine.open(arithmetic_run(facts))


def test_a_strangers_run_that_no_prompt_could_fit_is_refused_before_the_weights_are_loaded(short):
    Path(short, "model.safetensors").unlink()
    caps = {"prompt_tokens": 16, "completion_tokens": 20, "group": 8}
    with pytest.raises(UsageError, match=r"completions .* up to 20 tokens, but .* has room for 20"):
        Engine().load(arithmetic_settings(model=short), "arithmetic", caps=caps)


def test_another_set_to_evaluate_on_is_held_to_the_same(short):
    engine, facts = loaded("arithmetic", model=short)
    engine.open(arithmetic_run(facts, completion_tokens=14))
    with pytest.raises(UsageError, match=r"Row 1 of harder is a prompt of 8 tokens and a completion may have 16"):
        engine.add_evaluation("harder", "arithmetic-4", None, None)


def test_a_home_belongs_to_no_run_that_its_model_has_no_room_for(short, tmp_path):
    home = tmp_path / "home"
    line = ("join", "--home", home, "--model", short, "--host", "127.0.0.1", "--device", "cpu", *STILL)
    ended = run_cli(*line)
    assert ended.returncode == 2, ended.stderr
    assert "has room for 20" in ended.stderr
    assert not (home / "run.toml").exists()
    last = (home / "node.log").read_text().splitlines()[-1]
    assert " ERROR " in last
    assert "has room for 20" in last


def test_fit_foresees_it(tmp_path):
    name = model_in(tmp_path / "short", max_position_embeddings=16)
    error = refused("fit", "--model", name, "--vram", "8", "--task", "arithmetic")
    assert re.search("up to 16 tokens, but .* room for 16", error.what)
