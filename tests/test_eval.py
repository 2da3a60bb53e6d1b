"""Evaluation: of models, of checkpoints as the engine writes them, and of what is neither."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import asdict
from safetensors.torch import load_file, save_file

from ftis_node.cli import eval as eval_cli
from ftis_node.errors import FtisError, UsageError
from ftis_node.evaluate.greedy import evaluate, tokenised
from ftis_node.evaluate.intervals import paired_figures, wilson
from ftis_node.evaluate.judging import judge
from ftis_node.host.doing import now
from ftis_node.packet import Completion
from ftis_node.policy.generate.stream import Sampling
from ftis_node.store.checkpoints import Checkpoints
from ftis_node.tasks import Example, Score, load_evaluation, scoring
from ftis_node.worker.engine import Engine
from ftis_node.worker.restore import WEIGHTS, load_trained, settings_for
from tests.support.begun import checkpoint_of
from tests.support.cli import printed, refused
from tests.support.daemons import ENVIRONMENT, PATIENCE, command, until
from tests.support.small_models import arithmetic_settings, home_in, tiny_policy

TASK = load_evaluation("arithmetic")
CAP = Sampling(16, 1.0, (1,), greedy=True)


def run_eval(*args):
    """The object that `eval --json` prints, on one line."""
    [line] = printed("eval", *args, "--set", "device=cpu", "--json").splitlines()
    return json.loads(line)


Made = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module", params=["full", "lora"])
def either(request, tmp_path_factory) -> Made:
    """A home with the checkpoint of an engine whose weights were changed; and that engine's own evaluation."""
    path = tmp_path_factory.mktemp(request.param)
    engine = home_in(path, 3, 12, lora=request.param == "lora", eval_prompts=200)
    return path, asdict(engine.evaluate())


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Such a home, of LoRA layers."""
    path = tmp_path_factory.mktemp("home")
    home_in(path, 3, 12)
    return path


def test_a_model_by_its_name():
    figures = run_eval("--checkpoint", "tiny-a", "--task", "arithmetic", "--prompts", "50")
    assert (figures["model"], figures["task"], figures["prompts"]) == ("tiny-a", "arithmetic", 50)
    assert figures["checkpoint"] is figures["step"] is figures["trained"] is None and figures["quantisation"] == "none"
    assert 0 <= figures["low"] <= figures["pass_at_1"] <= figures["high"] <= 1
    assert figures["pass_at_1"] == figures["correct"] / 50 <= min(figures["formatted"], figures["lenient"])
    assert figures["data"] == TASK.data
    assert figures.keys() >= {"finished", "mean_tokens", "seconds", "batch", "device", "dtype", "reward"}


def test_a_home_and_its_checkpoint_give_what_the_engine_gave(either):
    path, own = either
    figures = run_eval("--checkpoint", str(path), "--task", "arithmetic", "--prompts", "200")
    assert (figures["model"], figures["step"]) == ("tiny-a", 12)
    assert figures["checkpoint"] == str(path / "checkpoints" / "step-00000012")
    shared = ("pass_at_1", "formatted", "lenient", "prompts")
    assert {key: figures[key] for key in shared} == {key: own[key] for key in shared}
    untrained = run_eval("--checkpoint", "tiny-a", "--task", "arithmetic", "--prompts", "200")
    assert untrained["pass_at_1"] != own["pass_at_1"]
    for name in (path / "checkpoints", path / "checkpoints" / "step-00000012"):
        assert checkpoint_of(name) == checkpoint_of(path)


def test_the_weights_come_back_exactly(either):
    found = checkpoint_of(either[0])
    settings, origins = settings_for(found, found.model, {"device": "cpu"}, "")
    policy = load_trained(settings, found)
    assert policy.native and not policy.packed, "what training would take is not tried"
    saved = load_file(found.path / WEIGHTS)
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained.keys() == saved.keys()
    assert all(torch.equal(trained[name], saved[name]) for name in saved)
    assert settings.lora == (policy.kind == "lora") == found.lora and origins["lora"] == "checkpoint"
    if found.lora:
        assert (settings.lora_rank, settings.lora_alpha, origins["lora_rank"]) == (16, 16, "checkpoint")
        assert origins["lora_alpha"] == "checkpoint"


def test_alpha_is_told_by_a_person_or_by_the_checkpoint(home, tmp_path):
    found = checkpoint_of(home)
    assert settings_for(found, "tiny-a", {"lora_alpha": "5"}, "")[0].lora_alpha == 5
    checkpoints = Checkpoints(tmp_path)
    directory = checkpoints.begin(1)
    save_file(load_file(found.path / WEIGHTS), directory / WEIGHTS, metadata={"lora_alpha": "40"})
    checkpoints.commit(directory, {"model": "tiny-a (lora)"})
    other = checkpoint_of(tmp_path)
    assert other.task == "" and other.step is None
    settings, origins = settings_for(other, "tiny-a", {}, "gsm8k")
    assert (settings.lora_alpha, origins["lora_alpha"], settings.lora_rank) == (40, "checkpoint", 16)
    assert settings_for(other, "tiny-a", {"lora_alpha": "5"}, "")[0].lora_alpha == 5


def test_a_damaged_checkpoint_is_passed_over_and_stays(home, tmp_path):
    path = shutil.copytree(home, tmp_path / "home")
    newest, older = (path / "checkpoints" / f"step-{step:08d}" for step in (12, 3))
    with (newest / WEIGHTS).open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\xff" * 8)
    before = sorted(path.rglob("*"))
    found = checkpoint_of(path)
    assert (found.step, found.skipped) == (3, (newest,))
    error = refused("eval", "--checkpoint", str(newest), "--task", "arithmetic")
    assert "damaged" in error.what and "another checkpoint" in error.fix
    (older / "checkpoint.json").unlink()
    assert "Every checkpoint" in refused("eval", "--checkpoint", str(path), "--task", "arithmetic").what
    assert {*before} - {*path.rglob("*")} == {older / "checkpoint.json"}


def test_a_checkpoint_of_another_model(either):
    error = refused("eval", "--checkpoint", str(either[0]), "--task", "arithmetic", "--model", "tiny-c")
    assert isinstance(error, UsageError)
    assert "does not fit tiny-c" in error.what and "--model" in error.fix


def test_every_completion_is_written_down(tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ("--task", "arithmetic", "--prompts", "30", "--out", str(out), "--batch", "7")
    figures = run_eval("--checkpoint", "tiny-a", *flags)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["question"] for row in rows] == [example.question for example in TASK.asked(30)]
    assert sum(row["reward"] for row in rows) == figures["correct"]
    told = {"question", "gold", "completion", "tokens", "finished", "reward", "formatted", "lenient", "columns"}
    assert rows[0].keys() == told


def test_mathematics_is_evaluated_too(tmp_path):
    data = tmp_path / "m.jsonl"
    rows = [{"problem": f"{i}+1=", "answer": rf"\frac{{{i}}}{{7}}"} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--task", "math500", "--data", str(data), "--completion-tokens", "20")
    figures = run_eval("--checkpoint", "tiny-a", *flags)
    assert (figures["task"], figures["reward"], figures["prompts"]) == ("math500", "math", 4)


def test_a_daemon_does_not_train_on_a_test():
    with pytest.raises(UsageError, match="nothing to train on"):
        Engine().load(arithmetic_settings(), "math500")


@pytest.mark.slow
def test_ctrl_c_ends_it_with_130(tmp_path):
    flags = ("--checkpoint", "tiny-a", "--task", "arithmetic", "--batch", "1", "--out", str(tmp_path / "o.jsonl"))
    with subprocess.Popen(
        command("eval", *flags, "--set", "device=cpu"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
    ) as process:
        out = tmp_path / "o.jsonl"
        until(lambda: out.exists() and out.stat().st_size, "an answer is written down", process)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert output == "" and "Traceback" not in errors


# Beside the base model


def test_a_checkpoint_is_compared_with_its_base_model(home, tmp_path, monkeypatch):
    flags = ("--task", "arithmetic", "--prompts", "60")
    out = tmp_path / "out.jsonl"
    figures = run_eval("--checkpoint", home, *flags, "--compare", "--out", out)
    base = run_eval("--checkpoint", "tiny-a", *flags)
    assert "paired" not in base
    assert (figures["base"]["model"], figures["base"]["checkpoint"]) == ("tiny-a", None)
    shared = ("pass_at_1", "low", "high", "correct", "prompts")
    assert {key: figures["base"][key] for key in shared} == {key: base[key] for key in shared}
    paired = figures["paired"]
    assert paired["difference"] == pytest.approx(figures["pass_at_1"] - base["pass_at_1"])
    assert paired["low"] <= paired["difference"] <= paired["high"] and 0 <= paired["p"] <= 1
    assert paired["both"] + paired["only_checkpoint"] == figures["correct"]
    assert paired["both"] + paired["only_base"] == base["correct"]
    assert sum(paired[key] for key in ("both", "only_checkpoint", "only_base", "neither")) == 60
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["of"] for row in rows] == ["checkpoint"] * 60 + ["base"] * 60
    right = [sum(row["reward"] == 1 for row in rows if row["of"] == of) for of in ("checkpoint", "base")]
    assert right == [figures["correct"], base["correct"]]
    measure, begun = eval_cli._measure, []

    def watched(*asked):
        begun.append((now(), sys.stdout.buffer.getvalue()))  # click's
        return measure(*asked)

    monkeypatch.setattr(eval_cli, "_measure", watched)
    told = printed("eval", "--checkpoint", home, *flags, "--compare", "--set", "device=cpu")
    assert "beside it tiny-a" in told and "McNemar" in told
    (first, nothing), (second, known) = begun
    assert (first.what, second.what) == ("evaluating the checkpoint", "evaluating the base")
    assert not nothing and b"pass@1" in known and b"beside it" not in known, (
        "the first is told while the other is asked"
    )


def test_a_model_by_its_name_has_no_base_model():
    line = ("eval", "--checkpoint", "tiny-a", "--task", "arithmetic", "--prompts", "8")
    assert "no base model" in refused(*line, "--compare").what
    assert "--prompts" in refused(*line, "--set", "eval_prompts=4").fix


def test_pairs_are_counted_and_tested():
    """Intervals worked out by Newcombe's formula (1998, method 10): one with discordance, one with a margin of zero."""
    for cells, low, high in (((1, 1, 7, 12), -0.507, -0.026), ((36, 12, 2, 0), 0.0569, 0.3404)):
        figures = paired_figures(*cells)
        other = paired_figures(cells[0], cells[2], cells[1], cells[3])
        assert (figures.low, figures.high) == (pytest.approx(low, abs=6e-4), pytest.approx(high, abs=6e-4))
        assert (other.low, other.high) == (pytest.approx(-figures.high), pytest.approx(-figures.low))
    assert paired_figures(36, 12, 2, 0).p == pytest.approx(2 * (1 + 14 + 91) / 2**14)
    assert paired_figures(5, 0, 0, 5).p == 1.0
    assert paired_figures(0, 0, 0, 0).difference == 0.0


# The parts


def test_wilson_s_interval():
    low, high = wilson(8, 10)  # Agresti and Coull 1998 and every table
    assert (low, high) == (pytest.approx(0.4901625, abs=1e-6), pytest.approx(0.9433178, abs=1e-6))
    assert wilson(0, 20)[0] == 0.0 and 0 < wilson(0, 20)[1] < 0.2
    assert wilson(0, 0) == (0.0, 1.0)


def questions(policy, count):
    return tokenised(policy, TASK, TASK.held_out[:count], 16), TASK.held_out[:count]


def test_what_is_told_adds_up_and_does_not_hang_on_the_batch():
    policy = tiny_policy()
    prompts, examples = questions(policy, 20)
    told = []
    with scoring("integer") as scorer:
        one = evaluate(policy, prompts, examples, scorer, CAP, batch=3, tell=told.extend)
        other = evaluate(policy, prompts, examples, scorer, CAP)
    assert [judged.example for judged in told] == list(examples)
    assert one.judged == told == other.judged
    assert evaluate(policy, [], [], scorer, CAP).figures().pass_at_1 == 0.0


def test_an_unfinished_completion_is_wrong_but_may_be_lenient():
    policy = tiny_policy()
    ids = torch.tensor(policy.tokenizer.encode("<think></think><answer>3</answer>")).numpy()
    for finished in (True, False):
        completion = Completion(ids, ids * 0.0, finished)
        with scoring("integer") as scorer:
            verdict = judge(policy.tokenizer, completion, Example("1+2=", "3"), scorer).score
        assert verdict == Score(float(finished), formatted=finished, lenient=True)


def test_what_does_not_fit_is_halved(monkeypatch):
    from ftis_node.evaluate import playing
    from ftis_node.policy import room

    monkeypatch.setattr(room, "WAITS", ())
    policy = tiny_policy()
    whole = playing.generate
    sizes = []

    def small(policy, prompts, batch, **rest):
        sizes.append(min(batch, len(prompts)))
        if sizes[-1] > 4:
            raise torch.OutOfMemoryError("no")
        return whole(policy, prompts, batch=batch, **rest)

    monkeypatch.setattr(playing, "generate", small)
    prompts, examples = questions(policy, 10)
    with scoring("integer") as scorer:
        outcome = evaluate(policy, prompts, examples, scorer, CAP, batch=100)
        assert sizes == [10, 5, 2] and outcome.batch == 2
        monkeypatch.setattr(playing, "generate", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        with pytest.raises(FtisError, match="single prompt"):
            evaluate(policy, prompts, examples, scorer, CAP)
