"""Two different models with the real Qwen2.5 tokenizer learn real GSM8K questions from each other."""

import json
import math
from pathlib import Path

import pytest

from ftis_node.observe.metrics import read_events
from tests.support.daemons import Daemon, Join, run_cli
from tests.support.models import DATA, GPT2_TOKENIZER, QWEN_TOKENIZER, random_llama, taught, taught_qwen


def small_answers(path: Path) -> list[str]:
    """Writes the real rows whose answer has one digit, which a model can guess; returns their questions."""
    rows = [json.loads(line) for line in (DATA / "gsm8k_train.jsonl").read_text().splitlines()]
    chosen = [row for row in rows if row["answer"].rsplit("####", 1)[1].strip() in "23456789"][:400]
    path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return [row["question"] for row in chosen]


@pytest.mark.slow
@pytest.mark.skipif(not QWEN_TOKENIZER.exists(), reason="the real tokenizer and data are not beside the project")
@pytest.mark.parametrize("instruct", [False, True])
def test_two_nodes_exchange_packets_and_take_finite_steps(tmp_path: Path, join: Join, *, instruct: bool) -> None:
    questions = small_answers(tmp_path / "rows.jsonl")
    small = taught_qwen(tmp_path / "small", questions, hidden=24, layers=2, seed=1, instruct=instruct)
    large = taught_qwen(tmp_path / "large", questions, hidden=32, layers=3, seed=2, instruct=instruct)
    run_file = shared(tmp_path, join, small, large, "--model", str(small), "--completion-tokens", "16")
    assert ("chat = " in run_file.read_text()) is instruct


def shared(path: Path, join: Join, one: Path, other: Path, *flags: str, chunked: bool = False) -> Path:
    """Daemons with these two models learn from each other in a run that these flags make; its file."""
    run_file, task = path / "run.toml", ("--task", "gsm8k", "--data", str(path / "rows.jsonl"))
    made = run_cli("run", "new", *task, *flags, "-o", str(run_file), "--json")
    assert made.returncode == 0, made.stderr
    common = (*task, "--set", "batch_groups=6", "--set", "eval_prompts=8")
    first = join("first", "--model", str(one), "--run", str(run_file), *common)
    second = join("second", "--model", str(other), "--peers", first.address(), *common)
    for daemon in (first, second):
        daemon.wait(lambda s: sum(s.get("foreign_groups_used", {}).values()) >= 2, "it trains on the other's groups")
    assert not chunked or first.status()["tokenizer"] != second.status()["tokenizer"]
    check_shared(first, second, run=json.loads(made.stdout)["id"], chunked=chunked)
    return run_file


def check_shared(*daemons: Daemon, run: str, chunked: bool = False) -> None:
    """Each took finite steps on the other's groups, over chunks where `chunked`, and refused nothing."""
    for daemon in daemons:
        assert daemon.status()["run"] == run
        assert daemon.status()["refused_packets"] == {}
        assert daemon.stop() == 0
        steps = read_events(daemon.home.metrics, "step")
        shared = [step for step in steps if step["foreign_groups"] and not step["skipped"]]
        assert shared, "a step was taken on foreign groups"
        for step in shared:
            foreign = step["diagnostics"]["foreign"]
            assert math.isfinite(step["loss"]) and step["gradient_norm"] > 0
            assert foreign["loss_weight"] > 0
            assert (foreign.get("chunked", 0) > 0) is chunked


@pytest.mark.slow
@pytest.mark.skipif(not GPT2_TOKENIZER.exists(), reason="the real tokenizers and data are not beside the project")
def test_qwens_and_gpt2s_tokenizers_share_a_run_of_text(tmp_path: Path, join: Join) -> None:
    questions = small_answers(tmp_path / "rows.jsonl")
    qwen = taught_qwen(tmp_path / "qwen", questions, hidden=24, layers=2, seed=1)
    llama = taught(random_llama(tmp_path / "llama", hidden=32, layers=3, seed=2), questions, seed=2)
    shared(tmp_path, join, qwen, llama, "--any-tokenizer", "--completion-tokens", "24", chunked=True)
