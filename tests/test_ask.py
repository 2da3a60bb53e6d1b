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
from tests.support.cli import answer, misused
from tests.support.small_models import home_in, opened_engine


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A home with a checkpoint of changed weights."""
    path = tmp_path_factory.mktemp("home")
    home_in(path, 3)
    return path


def test_the_trained_model_answers_beside_its_base(home, cli, monkeypatch):
    monkeypatch.setattr(terminal, "_QUIET_SECONDS_IN_A_FILE", 0.001)
    monkeypatch.setattr(terminal, "_LINE_SECONDS", 0.001)
    question = ("--completion-tokens", "12", "12+30=", "--json")
    code, out, err = cli("ask", "--checkpoint", home, "--trained", "--compare", *question)
    assert code == 0
    assert {"Loading the model", "Answering"} <= {told.partition(":")[0] for told in err.splitlines()}
    both = json.loads(out)["answers"]
    assert both["checkpoint"] != both["base"]
    alone = answer("ask", "--checkpoint", "tiny-a", *question[:-1])["answers"]
    assert alone.keys() == {"checkpoint"}
    policy = opened_engine().policy
    ids = policy.tokenizer("12+30=", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        ((expected,),) = generate(policy, [ids], group=1, sampling=Sampling(12, 1.0, (1,), greedy=True))
    text = policy.tokenizer.decode(expected.token_ids.tolist(), skip_special_tokens=True)
    assert both["base"].removesuffix(" …") == text.strip()


def test_a_row_of_a_task_is_judged_and_lines_are_read(home, cli, monkeypatch):
    told = answer("ask", "--checkpoint", "tiny-a", "--task", "arithmetic", "--row", "1")
    assert told["rewards"]["checkpoint"] in (0.0, 1.0)
    assert told["gold"]
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n\n2+2=\n"))
    lines = cli("ask", "--checkpoint", home, "--json")[1].splitlines()
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
    assert code == 1
    assert "has no checkpoint yet" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--compare 1+1=", "has no base model"),
        ("--task arithmetic 1+1=", "contradict one another"),
        ("--task arithmetic --row 99999", "held-out rows, from 0"),
        ("--trained 1+1=", "No run is known here"),
    ],
)
def test_mistakes_are_said(words, told):
    assert told in misused("ask", "--checkpoint", "tiny-a", *words.split()).what
