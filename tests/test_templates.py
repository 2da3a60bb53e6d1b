"""Templates by name: which form earns is in the rule's name, and a template by its name cannot ask for another."""

import json
import shutil
from functools import partial

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
from ftis_node.tasks.templates import IN_CHAT, TEMPLATES, as_trained, known_as, rule_in
from ftis_node.text import GB
from ftis_node.worker.engine import Engine
from tests.support.cli import Cli
from tests.support.small_models import arithmetic_settings, saved_by
from tests.support.swarm import make_run

BOXED = TEMPLATES["boxed"]["integer-boxed"]
INTEGERS = ("integer", "integer-boxed")
SUMS = [(f"What is {n} + 1?", n + 1) for n in range(40)]


@pytest.fixture
def rows(tmp_path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": asked, "answer": str(gold)}) + "\n" for asked, gold in SUMS))
    return str(file)


# --- rules: a form each -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", INTEGERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_rule_rewards_its_own_form_and_no_other(rule, form):
    verdict = score(rule, FORMS[form].format("1,234"), "1234")
    own = form == form_of(rule)
    assert (verdict.reward, verdict.formatted) == (float(own), own) and verdict.lenient
    assert score(rule, FORMS[form].format("13"), "1234").reward == 0.0


@pytest.mark.parametrize(
    ("rule", "text", "reward", "formatted"),
    [
        ("integer-boxed", r"First \boxed{7}, so it is $\boxed{ +12 }$ dollars, 3 a day.", 1, True),
        ("integer-boxed", r"It is \boxed{12}, or \boxed{13}.", 0, True),
        ("integer-boxed", r"\boxed{12.0}", 0, False),
        ("integer-boxed", r"\boxed{12", 0, False),
        ("integer-boxed", r"\boxed{}", 0, False),
    ],
)
def test_the_last_answer_of_the_form_counts(rule, text, reward, formatted):
    verdict = score(rule, text, "12")
    assert (verdict.reward, verdict.formatted) == (reward, formatted) and verdict.lenient >= reward


def test_mathematics_has_a_form_in_its_rule_too():
    with Judge("math-boxed", seconds=30.0) as judge:  # patient: a machine may be busy
        assert judge(r"So it is \boxed{\frac{1}{2}}.", "0.5").reward == 1
        tagged = judge("<think></think> <answer>1/2</answer>", "0.5")
        assert (tagged.reward, tagged.formatted, tagged.lenient) == (0, False, True)


@pytest.mark.parametrize("unit", ["\\boxed{", "{", "}", "9", "\\"])
def test_hostile_text_in_a_box_raises_nothing(unit):
    for text in (unit * 200_000, r"\boxed{" + unit * 200_000):
        assert score("integer-boxed", text, "12").reward == 0


# --- templates --------------------------------------------------------------------------------------------------------


def test_a_text_has_the_question_once_one_name_and_nothing_to_copy():
    assert {rule for texts in TEMPLATES.values() for rule in texts} == {*RULES}
    for name, texts in TEMPLATES.items():
        for rule, text in texts.items():
            assert text.count("{question}") == 1 and known_as(text) == name
            verdict = score("integer-boxed" if "boxed" in name else rule, text, "7") if "integer" in rule else None
            assert name == "paper" or " here <" not in text
            assert verdict is None or name.endswith("-example") or not verdict.formatted


@pytest.mark.parametrize(
    ("template", "reward", "rule"),
    [
        ("boxed", None, "integer-boxed"),
        ("boxed-example", "math-boxed", "math-boxed"),
        ("tags-example", None, "integer"),
        ("paper", "exact", "exact"),
        ("boxed", "math-boxed", "math-boxed"),
        ("paper", "integer", "integer"),
        (None, "integer-boxed", "integer-boxed"),
        ("Say it.\n{question}", "integer-boxed", "integer-boxed"),
        (None, None, "integer"),
    ],
)
def test_a_named_template_goes_with_its_rule(rows, template, reward, rule):
    task = load_task(rows, template=template, reward=reward)
    assert task.reward == rule
    assert known_as(task.template) == (template if template in TEMPLATES else None) or template is None
    if template is None:
        assert known_as(task.template) == ("boxed" if "boxed" in rule else "paper")


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
    with pytest.raises(UsageError) as refused:
        load_task(rows, template=template, reward=reward)
    assert what in refused.value.what and fix in refused.value.fix


def test_a_function_s_task_takes_the_name_that_goes_with_its_rule():
    assert known_as(make_task(SUMS, reward="integer-boxed", template="boxed").template) == "boxed"
    with pytest.raises(UsageError, match="rewards <think>"):
        make_task(SUMS, template="boxed")
    with pytest.raises(UsageError, match="does not go with"):
        make_task(SUMS, reward=partial(score, "integer"), template="boxed")


@pytest.mark.parametrize(
    ("of_run", "asked", "named", "expected"),
    [
        (("boxed", "integer-boxed"), ("rows", None), {}, ("boxed", "integer-boxed")),
        (("boxed", "integer-boxed"), ("rows", "math"), {}, ("boxed", "math-boxed")),
        (("boxed", "integer-boxed"), ("rows", "exact"), {"reward": "exact"}, ("paper", "exact")),
        (("boxed", "integer-boxed"), ("rows", None), {"template": "paper"}, ("paper", "integer")),
        (("boxed", "integer-boxed"), ("rows", "integer"), {"reward": "integer"}, ("paper", "integer")),
        (("boxed", "integer-boxed"), ("arithmetic", None), {}, (None, "integer")),
        (("Say it.\n{question}", "integer-boxed"), ("rows", None), {}, ("Say it.\n{question}", "integer-boxed")),
        (("Say it.\n{question}", "integer-boxed"), ("rows", "math"), {}, ("paper", "math")),
        ((None, None), ("rows", None), {}, ("paper", "integer")),
    ],
)
def test_a_trained_model_is_asked_in_its_run_s_words_where_they_go_with_the_task(
    rows,
    of_run,
    asked,
    named,
    expected,
):
    words, rule = of_run
    name, of_task = asked
    task = load_evaluation(rows if name == "rows" else name, reward=of_task, template=named.get("template"))
    run = None
    if words is not None and rule is not None:
        text = TEMPLATES[words][rule] if words in TEMPLATES else words
        run = make_run(template=text, reward=rule)
    found = as_trained(task, run, named.get("reward"), named.get("template"))
    assert (known_as(found.template) or (found.template if expected[0] else None), found.reward) == expected


def test_eval_ask_and_check_ask_a_home_as_its_run_did(rows, cli, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    engine = Engine()
    settings = arithmetic_settings(model="tiny-bpe", lora=False, eval_prompts=4)
    facts = engine.load(settings, rows, template="boxed-example", caps={"completion_tokens": 8})
    run = run_for(facts.shared(), group=4, completion_tokens=8)
    engine.open(run)
    (home / "run.toml").write_text(dump_run_file(RunFile(run=run)))
    saved_by(engine, home, 1, "tiny-bpe")
    line = ("eval", "--checkpoint", str(home), "--task", rows)
    told = json.loads(cli(*line, "--json")[1])
    assert (told["reward"], known_as(told["template"])) == ("integer-boxed", "boxed-example")
    own = engine.evaluate()
    assert (told["prompts"], told["mean_tokens"], told["finished"]) == (own.prompts, own.mean_tokens, own.finished)
    assert r"\boxed{…}" in cli(*line)[1]
    sampled = ("--model", str(home), "--rows", "1", "--samples", "2", "--completion-tokens", "8", "--json")
    assert json.loads(cli("task", "check", rows, *sampled)[1])["reward"] == "integer-boxed"
    asked = cli("ask", "--checkpoint", str(home), "--task", rows, "--json")
    assert asked[0] == 0 and json.loads(asked[1])["rewards"].keys() == {"checkpoint"}
    plain = ("ask", "--checkpoint", str(home), "12+30=", "--json")
    assert cli(*plain)[1] == cli(*plain, "--completion-tokens", "8")[1]
    told = json.loads(cli(*line, "--template", "paper", "--json")[1])
    assert (told["reward"], known_as(told["template"])) == ("integer", "paper")


@pytest.mark.parametrize(
    ("reward", "template", "in_chat"),
    [
        (None, None, (IN_CHAT, None)),
        (None, "paper", ("paper", "integer")),
        (
            "integer",
            None,
            ("paper" if "boxed" in IN_CHAT else IN_CHAT, "integer"),
        ),  # a rule that is named keeps its form
        ("exact", None, ("paper", "exact")),  # no other template goes with it
        (None, "Say it.\n{question}", (None, "integer")),
    ],
)
def test_only_what_nobody_chose_is_asked_otherwise_in_a_chat(rows, reward, template, in_chat):
    found = load_task(rows, reward=reward, template=template).in_chat()
    words, rule = in_chat
    assert (known_as(found.template), found.reward) == (words, rule or rule_in(IN_CHAT, "integer"))
    assert make_task(SUMS, template=TEMPLATES["paper"]["integer"]).in_chat().reward == "integer"
    assert found.completion_tokens == (512 if words == "boxed" else 256), "steps need room"
    assert make_task(SUMS, completion_tokens=256).in_chat().completion_tokens == 256, "somebody chose it"
    assert load_task(rows, template="boxed").in_chat().completion_tokens == 512
    assert load_task("arithmetic").in_chat() == load_task("arithmetic")


def test_a_new_run_asks_instruct_models_in_the_words_that_were_measured(rows, cli, tmp_path):
    folder = tmp_path / "instruct"
    file = tmp_path / "run.toml"
    shutil.copytree(resolve("tiny-bpe"), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}A:"
    tokenizer.save_pretrained(folder)
    assert cli("run", "new", "--task", rows, "--model", "tiny-bpe", "-o", str(file))[0] == 0
    run = load_run_file(file).run
    assert (run.chat, known_as(run.template), run.completion_tokens) == ("", "paper", 256), "a base model"
    assert cli("run", "new", "--task", rows, "--model", str(folder), "-o", str(file), "--overwrite")[0] == 0
    run = load_run_file(file).run
    assert (known_as(run.template), run.reward, run.completion_tokens) == ("boxed", "integer-boxed", 512) and run.chat
    engine = Engine()
    settings = arithmetic_settings(model=str(folder), lora=False)
    begun = engine.load(settings, rows)
    assert (begun.template, begun.reward, begun.completion_tokens) == (run.template, run.reward, 512), (
        "as join begins one"
    )
    old = engine.load(settings, rows, reward="integer", caps={"completion_tokens": 8})
    assert (known_as(old.template), old.reward) == ("paper", "integer"), "a run that exists stays as it is"
    dry = ("join", "--dry-run", "--device", "cpu", "--full", "--model", str(folder), "--home", str(tmp_path / "home"))
    told = json.loads(cli(*dry, "--task", rows, "--json")[1])["run"]
    assert (told["template"], told["reward"], told["completion_tokens"]) == ("boxed", "integer-boxed", 512)
    with opened(load_task(rows), [0], str(folder), None, None, None) as checked:
        assert checked.sampling.max_new_tokens == 512, "and so `task check` asks"

    def least(cap):
        work = Workload(512, cap, 12, settings.batch_groups)
        return plan(geometry(str(folder)), 1, work, Wishes(lora=False), "cpu", eight_bit=False).memory.total / GB

    little = (least(256) + least(512)) / 2
    crowded = engine.load(settings.model_copy(update={"vram_gb": little}), rows)
    assert (known_as(crowded.template), crowded.completion_tokens) == ("boxed", 256) and crowded.plan.fits
    why = "Answers may have 256 tokens, for there is no room for 512"
    assert why in crowded.plan.reasons[-2]
    out = cli(*dry, "--task", rows, "--vram", str(little), "--set", f"batch_groups={settings.batch_groups}")[1]
    assert why in out and "12 completions of 256 tokens" in out and "it fits" in out


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dry(monkeypatch, cli) -> Cli:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return partial(cli, "join", "--dry-run", "--device", "cpu", "--model", "tiny-bpe")


def test_a_run_holds_text_and_rule_and_others_see_the_name(rows, cli, dry, tmp_path):
    file = tmp_path / "run.toml"
    home = ("--home", str(tmp_path / "home"))
    line = ("run", "new", "--task", rows, "--model", "tiny-bpe", "--template", "boxed", "-o", str(file))
    assert cli(*line)[0] == 0
    run = load_run_file(file).run
    assert (run.reward, run.template) == ("integer-boxed", BOXED)
    code, out, err = dry(*home, "--run", str(file), "--task", rows)
    assert code == 0, err
    assert "template  boxed; judged by integer-boxed" in out
    report = json.loads(dry(*home, "--run", str(file), "--task", rows, "--json")[1])
    assert (report["run"]["template"], report["run"]["reward"]) == ("boxed", "integer-boxed")
    code, _, err = dry(*home, "--run", str(file), "--task", rows, "--template", "{question} Box it.")
    assert code == 2 and "The run asks by the template boxed, not by '{question} Box it.'." in err
    code, out, _ = dry(*home, "--task", rows, "--template", "boxed-example")
    assert code == 0 and "template  boxed-example; judged by integer-boxed" in out


def test_a_stranger_s_template_is_shown_escaped_and_refused_if_nothing_could_earn(rows, cli, dry, tmp_path):
    file = tmp_path / "run.toml"
    home = ("--home", str(tmp_path / "home"))
    assert cli("run", "new", "--task", rows, "--model", "tiny-bpe", "-o", str(file))[0] == 0
    run = load_run_file(file).run
    strange = run.model_copy(update={"template": "\x1b[2J\n{question} Say \u202e it."})
    file.write_text(dump_run_file(RunFile(run=strange)))
    out = dry(*home, "--run", str(file), "--task", rows)[1]
    assert "template  '\\x1b[2J\\n{question} Say \\u202e it.'; judged by integer" in out and "\x1b" not in out
    lost = run.model_copy(update={"template": BOXED})
    file.write_text(dump_run_file(RunFile(run=lost)))
    code, _, err = dry(*home, "--run", str(file), "--task", rows)
    assert code == 2 and "The template boxed asks for \\boxed{…}, and the rule integer rewards <think>" in err


def test_tasks_of_the_package_take_the_form_of_a_run():
    task = load_task("arithmetic", reward="integer-boxed")
    assert task.reward == "integer-boxed" and task.template == "{question}"
    assert make_run(reward="integer-boxed").id != make_run(reward="integer").id


# --- what a model could learn -----------------------------------------------------------------------------------------


def test_rows_are_checked_and_filtered_by_the_form(rows, cli, monkeypatch):
    monkeypatch.setenv("FTIS_MODEL", "tiny-bpe")
    code, out, _ = cli("task", "check", rows, "--template", "boxed", "--json")
    told = json.loads(out)
    assert (code, told["reward"], told["accepted"], told["refused"]) == (0, "integer-boxed", 40, 0)
