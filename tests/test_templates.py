"""Templates by name: which form earns is in the rule's name, and a template by its name cannot ask for another."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from ftis_node.cli.task import opened
from ftis_node.config.run import RunFile, dump_run_file, load_run_file, run_for
from ftis_node.errors import UsageError
from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import Wishes, plan
from ftis_node.policy.measure import geometry
from ftis_node.policy.names import resolve
from ftis_node.tasks import load_evaluation, load_task, make_task, score
from ftis_node.tasks.judge import Judge
from ftis_node.tasks.rewards import FORMS, RULES, form_of
from ftis_node.tasks.templates import TEMPLATES, as_trained, known_as
from ftis_node.text import GB
from ftis_node.worker.engine import Engine
from tests.support.cli import answer, printed, refused
from tests.support.small_models import arithmetic_settings, saved_by
from tests.support.swarm import make_run

BOXED = TEMPLATES["boxed"]["integer-boxed"]
PAPER = TEMPLATES["paper"]["integer"]
INTEGERS = ("integer", "integer-boxed")
SUMS = [(f"What is {n} + 1?", n + 1) for n in range(40)]


@pytest.fixture
def rows(tmp_path) -> str:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"question": asked, "answer": str(gold)}) for asked, gold in SUMS]
    file.write_text("\n".join(lines))
    return str(file)


@pytest.fixture
def file(tmp_path) -> Path:
    """A run's."""
    return tmp_path / "run.toml"


def new_run(file, rows, *more, model="tiny-bpe"):
    """The run that a command makes."""
    printed("run", "new", "--task", rows, "--model", model, "-o", file, "--overwrite", *more)
    return load_run_file(file).run


@pytest.fixture
def dry(monkeypatch, tmp_path) -> tuple[str, ...]:
    """A command without its model, which asks no hub."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return "join", "--dry-run", "--device", "cpu", "--home", str(tmp_path / "home"), "--model"


# --- rules: a form each -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", INTEGERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_rule_rewards_its_own_form_and_no_other(rule, form):
    verdict = score(rule, FORMS[form].format("1,234"), "1234")
    own = form == form_of(rule)
    assert verdict.reward == float(own)
    assert verdict.formatted == own
    assert verdict.lenient is True
    assert score(rule, FORMS[form].format("13"), "1234").reward == 0.0


@pytest.mark.parametrize(
    ("text", "reward", "formatted"),
    [
        (r"First \boxed{7}, so it is $\boxed{ +12 }$ dollars, 3 a day.", 1, True),
        (r"It is \boxed{12}, or \boxed{13}.", 0, True),
        (r"\boxed{12.0}", 0, False),
        (r"\boxed{12", 0, False),
        (r"\boxed{}", 0, False),
    ],
)
def test_the_last_answer_of_the_form_counts(text, reward, formatted):
    verdict = score("integer-boxed", text, "12")
    assert verdict.reward == reward
    assert verdict.formatted == formatted
    assert verdict.lenient >= reward


def test_mathematics_has_a_form_in_its_rule_too():
    with Judge("math-boxed", seconds=30.0) as judge:  # patient: a machine may be busy
        assert judge(r"So it is \boxed{\frac{1}{2}}.", "0.5").reward == 1
        tagged = judge("<think></think> <answer>1/2</answer>", "0.5")
        assert tagged.reward == 0
        assert tagged.formatted is False
        assert tagged.lenient is True


@pytest.mark.parametrize("unit", ["\\boxed{", "{", "}", "9", "\\"])
def test_hostile_text_in_a_box_raises_nothing(unit):
    for text in (unit * 200_000, r"\boxed{" + unit * 200_000):
        assert score("integer-boxed", text, "12").reward == 0


# --- templates --------------------------------------------------------------------------------------------------------


def test_a_text_has_the_question_once_one_name_and_nothing_to_copy():
    assert {rule for texts in TEMPLATES.values() for rule in texts} == {*RULES}
    for name, texts in TEMPLATES.items():
        for rule, text in texts.items():
            assert text.count("{question}") == 1
            assert known_as(text) == name
            assert name == "paper" or " here <" not in text
            if "integer" in rule and not name.endswith("-example"):
                assert not score(rule, text, "7").formatted


@pytest.mark.parametrize(
    ("template", "reward", "name", "rule"),
    [
        ("boxed", None, "boxed", "integer-boxed"),
        ("boxed-example", "math-boxed", "boxed-example", "math-boxed"),
        ("tags-example", None, "tags-example", "integer"),
        ("paper", "exact", "paper", "exact"),
        (None, "integer-boxed", "boxed", "integer-boxed"),
        ("Say it.\n{question}", "integer-boxed", None, "integer-boxed"),
        (None, None, "paper", "integer"),
    ],
)
def test_a_named_template_goes_with_its_rule(rows, template, reward, name, rule):
    task = load_task(rows, template=template, reward=reward)
    assert known_as(task.template) == name
    assert task.reward == rule


@pytest.mark.parametrize(
    ("template", "reward", "what", "fix"),
    [
        ("boxt", None, "no template 'boxt'", "Did you mean 'boxed'"),
        ("no question", None, "no template 'no question'", "{question} in it, once"),
        ("{question}{question}", None, "no template", "{question} in it, once"),
        ("boxed", "integer", "asks for \\boxed{…}, and the rule integer rewards <think>", "Leave out --reward"),
        ("tags-example", "math-boxed", "and the rule math-boxed rewards \\boxed{…}", "Leave out --reward"),
        ("boxed", "exact", "does not go with the rule 'exact'", "another template"),
        (BOXED, "integer", "asks for \\boxed{…}, and the rule integer", "Leave out --reward"),
        (None, "integer-box", "no reward rule 'integer-box'", "Did you mean 'integer-boxed'"),
    ],
)
def test_what_cannot_go_together_is_refused(rows, template, reward, what, fix):
    with pytest.raises(UsageError) as caught:
        load_task(rows, template=template, reward=reward)
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_function_s_task_takes_the_name_that_goes_with_its_rule():
    assert known_as(make_task(SUMS, reward="integer-boxed", template="boxed").template) == "boxed"
    with pytest.raises(UsageError, match="rewards <think>"):
        make_task(SUMS, template="boxed")
    with pytest.raises(UsageError, match="does not go with"):
        make_task(SUMS, reward=partial(score, "integer"), template="boxed")


SAID = "Say it.\n{question}"
IN_BOXES = make_run(template=BOXED, reward="integer-boxed")
IN_WORDS = make_run(template=SAID, reward="integer-boxed")


@pytest.mark.parametrize(
    ("run", "of_task", "named", "template", "rule"),
    [
        (IN_BOXES, None, {}, BOXED, "integer-boxed"),
        (IN_BOXES, "math", {}, TEMPLATES["boxed"]["math-boxed"], "math-boxed"),
        (IN_BOXES, "exact", {"reward": "exact"}, TEMPLATES["paper"]["exact"], "exact"),
        (IN_BOXES, None, {"template": "paper"}, PAPER, "integer"),
        (IN_BOXES, "integer", {"reward": "integer"}, PAPER, "integer"),
        (IN_WORDS, None, {}, SAID, "integer-boxed"),
        (IN_WORDS, "math", {}, TEMPLATES["paper"]["math"], "math"),
        (None, None, {}, PAPER, "integer"),
    ],
)
def test_a_trained_model_is_asked_in_its_run_s_words_where_they_go_with_the_task(
    rows, run, of_task, named, template, rule
):
    task = load_evaluation(rows, reward=of_task, template=named.get("template"))
    found = as_trained(task, run, named.get("reward"), named.get("template"))
    assert found.template == template
    assert found.reward == rule


def test_eval_ask_and_check_ask_a_home_as_its_run_did(rows, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    engine = Engine()
    settings = arithmetic_settings(model="tiny-bpe", lora=False, eval_prompts=4)
    facts = engine.load(settings, rows, template="boxed-example", caps={"completion_tokens": 8})
    run = run_for(facts.shared(), group=4, completion_tokens=8)
    engine.open(run)
    (home / "run.toml").write_text(dump_run_file(RunFile(run=run)))
    saved_by(engine, home, 1, "tiny-bpe")
    line = ("eval", "--checkpoint", home, "--task", rows)
    told = answer(*line)
    assert told["reward"] == "integer-boxed"
    assert known_as(told["template"]) == "boxed-example"
    own = engine.evaluate()
    assert told["prompts"] == own.prompts
    assert told["mean_tokens"] == own.mean_tokens
    assert told["finished"] == own.finished
    assert r"\boxed{…}" in printed(*line)
    sampled = ("--model", home, "--rows", "1", "--samples", "2", "--completion-tokens", "8")
    assert answer("task", "check", rows, *sampled)["reward"] == "integer-boxed"
    assert answer("ask", "--checkpoint", home, "--task", rows)["rewards"].keys() == {"checkpoint"}
    plain = ("ask", "--checkpoint", home, "12+30=")
    assert answer(*plain) == answer(*plain, "--completion-tokens", "8")
    told = answer(*line, "--template", "paper")
    assert told["reward"] == "integer"
    assert known_as(told["template"]) == "paper"


@pytest.mark.parametrize(
    ("reward", "template", "name", "rule", "tokens"),
    [
        (None, None, "boxed", "integer-boxed", 512),  # steps need room
        (None, "boxed", "boxed", "integer-boxed", 512),
        (None, "paper", "paper", "integer", 256),
        ("integer", None, "paper", "integer", 256),  # a rule that is named keeps its form
        ("exact", None, "paper", "exact", 256),  # no other template goes with it
        (None, SAID, None, "integer", 256),
    ],
)
def test_only_what_nobody_chose_is_asked_otherwise_in_a_chat(rows, reward, template, name, rule, tokens):
    found = load_task(rows, reward=reward, template=template).in_chat()
    assert known_as(found.template) == name
    assert found.reward == rule
    assert found.completion_tokens == tokens


def test_what_a_function_or_the_package_chose_stays_in_a_chat():
    assert make_task(SUMS, template=PAPER).in_chat().reward == "integer"
    assert make_task(SUMS, completion_tokens=256).in_chat().completion_tokens == 256
    assert load_task("arithmetic").in_chat() == load_task("arithmetic")


def test_a_new_run_asks_instruct_models_in_the_words_that_were_measured(rows, file, dry, tmp_path):
    folder = str(tmp_path / "instruct")
    shutil.copytree(resolve("tiny-bpe"), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}A:"
    tokenizer.save_pretrained(folder)
    run = new_run(file, rows)
    assert (run.chat, known_as(run.template), run.completion_tokens) == ("", "paper", 256), "a base model"
    run = new_run(file, rows, model=folder)
    assert run.chat
    assert known_as(run.template) == "boxed"
    assert run.reward == "integer-boxed"
    assert run.completion_tokens == 512
    engine = Engine()
    settings = arithmetic_settings(model=folder, lora=False)
    begun = engine.load(settings, rows)
    found = (begun.template, begun.reward, begun.completion_tokens)
    assert found == (run.template, run.reward, 512), "as join begins one"
    old = engine.load(settings, rows, reward="integer", caps={"completion_tokens": 8})
    assert (known_as(old.template), old.reward) == ("paper", "integer"), "a run that exists stays as it is"
    line = (*dry, folder, "--full", "--task", rows)
    told = answer(*line)["run"]
    assert told["template"] == "boxed"
    assert told["reward"] == "integer-boxed"
    assert told["completion_tokens"] == 512
    with opened(load_task(rows), [0], folder, None, None, None) as checked:
        assert checked.sampling.max_new_tokens == 512, "and so `task check` asks"

    def least(cap):
        work = Workload(512, cap, 12, settings.batch_groups)
        return plan(geometry(folder), 1, work, Wishes(lora=False), "cpu", eight_bit=False).memory.total / GB

    little = (least(256) + least(512)) / 2
    crowded = engine.load(settings.model_copy(update={"vram_gb": little}), rows)
    assert crowded.plan.fits
    assert known_as(crowded.template) == "boxed"
    assert crowded.completion_tokens == 256
    why = "Answers may have 256 tokens, for there is no room for 512"
    assert why in crowded.plan.reasons[-2]
    out = printed(*line, "--vram", little, "--set", f"batch_groups={settings.batch_groups}")
    for words in (why, "12 completions of 256 tokens", "it fits"):
        assert words in out


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_holds_text_and_rule_and_others_see_the_name(rows, dry, file):
    run = new_run(file, rows, "--template", "boxed")
    assert run.reward == "integer-boxed"
    assert run.template == BOXED
    line = (*dry, "tiny-bpe", "--task", rows)
    assert "template  boxed; judged by integer-boxed" in printed(*line, "--run", file)
    told = answer(*line, "--run", file)["run"]
    assert told["template"] == "boxed"
    assert told["reward"] == "integer-boxed"
    error = refused(*line, "--run", file, "--template", "{question} Box it.")
    assert error.exit_code == 2
    assert "The run asks by the template boxed, not by '{question} Box it.'." in error.what
    out = printed(*line, "--template", "boxed-example")
    assert "template  boxed-example; judged by integer-boxed" in out


def test_a_stranger_s_template_is_shown_escaped_and_refused_if_nothing_could_earn(rows, dry, file):
    run = new_run(file, rows)
    line = (*dry, "tiny-bpe", "--task", rows, "--run", file)
    strange = run.model_copy(update={"template": "\x1b[2J\n{question} Say \u202e it."})
    file.write_text(dump_run_file(RunFile(run=strange)))
    out = printed(*line)
    assert "template  '\\x1b[2J\\n{question} Say \\u202e it.'; judged by integer" in out
    assert "\x1b" not in out
    lost = run.model_copy(update={"template": BOXED})
    file.write_text(dump_run_file(RunFile(run=lost)))
    error = refused(*line)
    assert error.exit_code == 2
    assert "The template boxed asks for \\boxed{…}, and the rule integer rewards <think>" in error.what


def test_tasks_of_the_package_take_the_form_of_a_run_but_not_its_words():
    task = load_task("arithmetic", reward="integer-boxed")
    assert task.reward == "integer-boxed"
    assert task.template == "{question}"
    trained = as_trained(load_evaluation("arithmetic"), IN_BOXES, None, None)
    assert trained.reward == "integer"
    assert trained.template == "{question}"
    assert make_run(reward="integer-boxed").id != make_run(reward="integer").id


# --- what a model could learn -----------------------------------------------------------------------------------------


def test_rows_are_checked_by_the_form(rows, monkeypatch):
    monkeypatch.setenv("FTIS_MODEL", "tiny-bpe")
    told = answer("task", "check", rows, "--template", "boxed")
    assert told["reward"] == "integer-boxed"
    assert told["accepted"] == 40
    assert told["refused"] == 0
