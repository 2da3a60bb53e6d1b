"""A trained model answers a person, beside its base model, and never with a character that moves a terminal."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from ftis_node.observe import terminal
from ftis_node.policy.generate.sampling import Sampling
from ftis_node.policy.generate.stream import generate
from tests.support.small_models import engine_in, home_in


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A home with a checkpoint of changed weights."""
    path = tmp_path_factory.mktemp("home")
    home_in(path, 3)
    return path


def test_the_trained_model_answers_beside_its_base(home, cli, monkeypatch):
    monkeypatch.setattr(terminal, "_QUIET_SECONDS_IN_A_FILE", 0.001)
    monkeypatch.setattr(terminal, "_LINE_SECONDS", 0.001)
    line = ("ask", "--checkpoint", str(home), "--trained", "--completion-tokens", "12", "--json")
    code, out, err = cli(*line, "--compare", "12+30=")
    assert code == 0 and {"Loading the model", "Answering"} <= {told.partition(":")[0] for told in err.splitlines()}
    both = json.loads(out)["answers"]
    alone = json.loads(cli("ask", "--checkpoint", "tiny-a", "--completion-tokens", "12", "12+30=", "--json")[1])
    assert both["checkpoint"] != both["base"] and alone["answers"].keys() == {"checkpoint"}
    engine, _ = engine_in(home.parent / "plain", lora=True, eval_prompts=4)
    ids = engine.policy.tokenizer("12+30=", add_special_tokens=False)["input_ids"]
    sampling = Sampling(12, 1.0, engine.run.eos, greedy=True)
    with torch.no_grad():
        ((expected,),) = generate(engine.policy, [ids], group=1, sampling=sampling)
    text = engine.policy.tokenizer.decode(expected.token_ids.tolist(), skip_special_tokens=True)
    assert both["base"].removesuffix(" …") == text.strip()


def test_a_row_of_a_task_is_judged_and_lines_are_read(home, cli, monkeypatch):
    code, out, _ = cli("ask", "--checkpoint", "tiny-a", "--task", "arithmetic", "--row", "1", "--json")
    told = json.loads(out)
    assert code == 0 and told["rewards"]["checkpoint"] in (0.0, 1.0) and told["gold"]
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n\n2+2=\n"))
    lines = cli("ask", "--checkpoint", str(home), "--json")[1].splitlines()
    assert [json.loads(one)["question"] for one in lines] == ["1+1=", "2+2="]


@pytest.mark.parametrize(
    "line", ["ask Who?", "export --to x", "eval --task arithmetic", "ask --checkpoint ~/.ftis-node"]
)
def test_a_home_without_a_checkpoint_is_refused_before_torch_is_imported(line, cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ftis-node").mkdir()
    (tmp_path / ".ftis-node" / "run.toml").touch()
    monkeypatch.setitem(sys.modules, "ftis_node.worker.restore", None)
    code, _, err = cli(*line.split())
    assert code == 1 and "has no checkpoint yet" in err


def test_mistakes_are_said(home, cli):
    for words, told in (
        (("tiny-a", "--compare", "1+1="), "has no base model"),
        (("tiny-a", "--task", "arithmetic", "1+1="), "contradict one another"),
        (("tiny-a", "--task", "arithmetic", "--row", "99999"), "held-out rows, from 0"),
        (("tiny-a", "--trained", "1+1="), "No run is known here"),
    ):
        code, _, err = cli("ask", "--checkpoint", *words)
        assert code == 2 and told in err
