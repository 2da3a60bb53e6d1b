"""Evaluation: of models, of checkpoints as the engine writes them, and of what is neither."""

import json
import shutil
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
from tests.support.small_models import arithmetic_settings, home_in, tiny_policy

TASK = load_evaluation("arithmetic")
CAP = Sampling(16, 1.0, (1,), greedy=True)


def run_eval(*args):
    """The object that `eval --json` prints, on one line."""
    [line] = printed("eval", *args, "--set", "device=cpu", "--json").splitlines()
    return json.loads(line)


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def right(rows):
    return sum(row["reward"] == 1 for row in rows)


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
    assert figures["model"] == "tiny-a"
    assert figures["task"] == "arithmetic"
    assert figures["prompts"] == 50
    for unknown in ("checkpoint", "step", "trained"):
        assert figures[unknown] is None
    assert figures["quantisation"] == "none"
    assert 0 <= figures["low"] <= figures["pass_at_1"] <= figures["high"] <= 1
    assert figures["pass_at_1"] == figures["correct"] / 50 <= min(figures["formatted"], figures["lenient"])
    assert figures["data"] == TASK.data
    assert figures.keys() >= {"finished", "mean_tokens", "seconds", "batch", "device", "dtype", "reward"}


def test_a_home_and_its_checkpoint_give_what_the_engine_gave(either):
    path, own = either
    figures = run_eval("--checkpoint", path, "--task", "arithmetic", "--prompts", "200")
    assert figures["model"] == "tiny-a"
    assert figures["step"] == 12
    assert figures["checkpoint"] == str(path / "checkpoints" / "step-00000012")
    for shared in ("pass_at_1", "formatted", "lenient", "prompts"):
        assert figures[shared] == own[shared]

    untrained = run_eval("--checkpoint", "tiny-a", "--task", "arithmetic", "--prompts", "200")
    assert untrained["pass_at_1"] != own["pass_at_1"]

    for name in (path / "checkpoints", path / "checkpoints" / "step-00000012"):
        assert checkpoint_of(name) == checkpoint_of(path)


def test_the_weights_come_back_exactly(either):
    found = checkpoint_of(either[0])
    settings, origins = settings_for(found, found.model, {"device": "cpu"}, "")

    policy = load_trained(settings, found)

    assert policy.native
    assert not policy.packed, "what training would take is not tried"
    saved = load_file(found.path / WEIGHTS)
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained.keys() == saved.keys()
    assert all(torch.equal(trained[name], saved[name]) for name in saved)
    assert settings.lora == (policy.kind == "lora") == found.lora
    assert origins["lora"] == "checkpoint"
    if found.lora:
        assert settings.lora_rank == settings.lora_alpha == 16
        assert origins["lora_rank"] == origins["lora_alpha"] == "checkpoint"


def test_alpha_is_told_by_a_person_or_by_the_checkpoint(home, tmp_path):
    found = checkpoint_of(home)
    settings, _ = settings_for(found, "tiny-a", {"lora_alpha": "5"}, "")
    assert settings.lora_alpha == 5

    checkpoints = Checkpoints(tmp_path)
    directory = checkpoints.begin(1)
    save_file(load_file(found.path / WEIGHTS), directory / WEIGHTS, metadata={"lora_alpha": "40"})
    checkpoints.commit(directory, {"model": "tiny-a (lora)"})
    other = checkpoint_of(tmp_path)
    assert other.task == ""
    assert other.step is None

    settings, origins = settings_for(other, "tiny-a", {}, "gsm8k")
    assert settings.lora_alpha == 40
    assert origins["lora_alpha"] == "checkpoint"
    assert settings.lora_rank == 16

    settings, _ = settings_for(other, "tiny-a", {"lora_alpha": "5"}, "")
    assert settings.lora_alpha == 5


def test_a_damaged_checkpoint_is_passed_over_and_stays(home, tmp_path):
    path = shutil.copytree(home, tmp_path / "home")
    newest, older = (path / "checkpoints" / f"step-{step:08d}" for step in (12, 3))
    with (newest / WEIGHTS).open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\xff" * 8)
    before = sorted(path.rglob("*"))

    found = checkpoint_of(path)
    assert found.step == 3
    assert found.skipped == (newest,)

    error = refused("eval", "--checkpoint", newest, "--task", "arithmetic")
    assert "damaged" in error.what
    assert "another checkpoint" in error.fix

    (older / "checkpoint.json").unlink()
    assert "Every checkpoint" in refused("eval", "--checkpoint", path, "--task", "arithmetic").what
    assert {*before} - {*path.rglob("*")} == {older / "checkpoint.json"}


def test_a_checkpoint_of_another_model(either):
    error = refused("eval", "--checkpoint", either[0], "--task", "arithmetic", "--model", "tiny-c")
    assert isinstance(error, UsageError)
    assert "does not fit tiny-c" in error.what
    assert "--model" in error.fix


def test_every_completion_is_written_down(tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ("--task", "arithmetic", "--prompts", "30", "--out", out, "--batch", "7")
    figures = run_eval("--checkpoint", "tiny-a", *flags)
    rows = rows_of(out)
    assert [row["question"] for row in rows] == [example.question for example in TASK.asked(30)]
    assert right(rows) == figures["correct"]
    assert rows[0].keys() == {
        "question",
        "gold",
        "completion",
        "tokens",
        "finished",
        "reward",
        "formatted",
        "lenient",
        "columns",
    }


def test_mathematics_is_evaluated_too(tmp_path):
    data = tmp_path / "m.jsonl"
    rows = [{"problem": f"{i}+1=", "answer": rf"\frac{{{i}}}{{7}}"} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--task", "math500", "--data", data, "--completion-tokens", "20")
    figures = run_eval("--checkpoint", "tiny-a", *flags)
    assert figures["task"] == "math500"
    assert figures["reward"] == "math"
    assert figures["prompts"] == 4


def test_a_daemon_does_not_train_on_a_test():
    with pytest.raises(UsageError, match="nothing to train on"):
        Engine().load(arithmetic_settings(), "math500")


# Beside the base model


def test_a_checkpoint_is_compared_with_its_base_model(home, tmp_path, monkeypatch):
    flags = ("--task", "arithmetic", "--prompts", "60")
    out = tmp_path / "out.jsonl"

    figures = run_eval("--checkpoint", home, *flags, "--compare", "--out", out)
    base = run_eval("--checkpoint", "tiny-a", *flags)

    assert "paired" not in base
    beside = figures["base"]
    assert beside["model"] == "tiny-a"
    assert beside["checkpoint"] is None
    for shared in ("pass_at_1", "low", "high", "correct", "prompts"):
        assert beside[shared] == base[shared]

    paired = figures["paired"]
    assert paired["difference"] == pytest.approx(figures["pass_at_1"] - base["pass_at_1"])
    assert paired["low"] <= paired["difference"] <= paired["high"]
    assert 0 <= paired["p"] <= 1
    assert paired["both"] + paired["only_checkpoint"] == figures["correct"]
    assert paired["both"] + paired["only_base"] == base["correct"]
    assert sum(paired[key] for key in ("both", "only_checkpoint", "only_base", "neither")) == 60

    rows = rows_of(out)
    assert len(rows) == 120
    for of, part, told in (
        ("checkpoint", rows[:60], figures),
        ("base", rows[60:], base),
    ):
        assert {row["of"] for row in part} == {of}
        assert right(part) == told["correct"]


def test_the_checkpoints_figures_are_told_while_its_base_model_is_asked(home, monkeypatch):
    measure = eval_cli._measure
    begun = []

    def watched(*asked):
        begun.append((now(), sys.stdout.buffer.getvalue()))  # click's
        return measure(*asked)

    monkeypatch.setattr(eval_cli, "_measure", watched)
    flags = ("--task", "arithmetic", "--prompts", "8", "--compare", "--set", "device=cpu")

    told = printed("eval", "--checkpoint", home, *flags)

    assert "beside it tiny-a" in told
    assert "McNemar" in told
    (first, nothing), (second, known) = begun
    assert first.what == "evaluating the checkpoint"
    assert not nothing
    assert second.what == "evaluating the base"
    assert b"pass@1" in known
    assert b"beside it" not in known


def test_a_model_by_its_name_has_no_base_model():
    line = ("eval", "--checkpoint", "tiny-a", "--task", "arithmetic", "--prompts", "8")
    assert "no base model" in refused(*line, "--compare").what
    assert "--prompts" in refused(*line, "--set", "eval_prompts=4").fix


def test_pairs_are_counted_and_tested():
    """Intervals worked out by Newcombe's formula (1998, method 10): one with discordance, one with a margin of zero."""
    for (both, one, other, neither), low, high in (
        ((1, 1, 7, 12), -0.507, -0.026),
        ((36, 12, 2, 0), 0.0569, 0.3404),
    ):
        figures = paired_figures(both, one, other, neither)
        assert (figures.low, figures.high) == pytest.approx((low, high), abs=6e-4)

        turned = paired_figures(both, other, one, neither)
        assert (turned.low, turned.high) == pytest.approx((-figures.high, -figures.low))

    assert paired_figures(36, 12, 2, 0).p == pytest.approx(2 * (1 + 14 + 91) / 2**14)
    assert paired_figures(5, 0, 0, 5).p == 1.0
    assert paired_figures(0, 0, 0, 0).difference == 0.0


# The parts


def test_wilson_s_interval():
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)  # Agresti and Coull 1998 and every table
    low, high = wilson(0, 20)
    assert low == 0.0 < high < 0.2
    assert wilson(0, 0) == (0.0, 1.0)


def questions(policy, count):
    examples = TASK.held_out[:count]
    return tokenised(policy, TASK, examples, 16), examples


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
    example = Example("1+2=", "3")
    for finished in (True, False):
        completion = Completion(ids, ids * 0.0, finished)
        with scoring("integer") as scorer:
            judged = judge(policy.tokenizer, completion, example, scorer)
        assert judged.score == Score(float(finished), formatted=finished, lenient=True)


def test_what_does_not_fit_is_halved(monkeypatch):
    from ftis_node.evaluate import playing
    from ftis_node.policy import room

    monkeypatch.setattr(room, "WAITS", ())
    policy = tiny_policy()
    whole = playing.generate
    sizes = []

    most = 4

    def small(policy, prompts, batch, **rest):
        sizes.append(min(batch, len(prompts)))
        if sizes[-1] > most:
            raise torch.OutOfMemoryError("no")
        return whole(policy, prompts, batch=batch, **rest)

    monkeypatch.setattr(playing, "generate", small)
    prompts, examples = questions(policy, 10)
    with scoring("integer") as scorer:
        outcome = evaluate(policy, prompts, examples, scorer, CAP, batch=100)
        assert sizes == [10, 5, 2]
        assert outcome.batch == 2
        most = 0
        with pytest.raises(FtisError, match="single prompt"):
            evaluate(policy, prompts, examples, scorer, CAP)
