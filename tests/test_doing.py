"""What a process says of its work, and what people see of it."""

import io

import pytest
from rich.console import Console

from ftis_node.config.run import run_for
from ftis_node.host.doing import advance, doing, now
from ftis_node.observe import terminal
from ftis_node.observe.live import node_view
from ftis_node.policy.ready import ready
from ftis_node.step_report import Doing
from ftis_node.worker.engine import Engine
from tests.support.small_models import arithmetic_settings, batch_of, opened_engine
from tests.support.statuses import JOINING, answered


def test_work_within_other_work_counts_for_the_whole_and_leaves_nothing_behind():
    with doing("evaluating", 4, "questions"):
        with doing("generating", 2, "completions"):
            advance(read=12)
            reading = now()
            advance(1, tokens=30, begun=0.5)
        work = now()
    assert work.what == "evaluating"
    assert work.done == 1
    assert work.of == 4
    assert work.tokens == 30
    assert reading.what == "evaluating (12 prompts read)"
    assert work.left == pytest.approx(work.seconds * 2.5 / 1.5)
    assert now() is None


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (Doing("generating", 9, 48, "rows", 610, 10.0, 30.0), "9 of 48 rows, 61 tokens a second, about 30 s left"),
        (Doing("evaluating", 0, 16, "questions", 0, 1.0, 9.0), "0 of 16 questions"),
        (Doing("loading the weights", seconds=68.0), "1 min 8 s"),
    ],
)
def test_a_person_reads_how_far_it_is_and_how_long_yet(work, sentence):
    assert work.sentence() == f"{work.what.capitalize()}: {sentence}"
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(node_view(answered(**JOINING | {"doing": work})))
    assert sentence in console.export_text()


def test_where_nobody_sees_a_bar_lines_say_how_far_a_command_is(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "_QUIET_SECONDS_IN_A_FILE", 0.0)
    monkeypatch.setattr(terminal, "_LINE_SECONDS", 0.01)
    told = ""
    with terminal.shown_work(), doing("sampling", 4, "completions"):
        advance(1)
        while told.count("\n") < 3:
            told += capsys.readouterr().err
    assert "Sampling: 1 of 4 completions" in told.splitlines()[-1]


def test_each_long_work_of_an_engine_says_what_it_is_and_reaches_its_end(monkeypatch):
    seen = {}
    engine = opened_engine()

    def watched(*told, **more):
        advance(*told, **more)
        work = engine.watch().doing
        seen[work.what] = work

    for name in ("ftis_node.policy.generate.native.advance", "ftis_node.learner.learner.advance"):
        monkeypatch.setattr(name, watched)
    generated = engine.generate([0, 1])
    engine.step(batch_of([0, 1], generated.groups, uneven=True))
    engine.evaluate()
    completions = 2 * engine.run.group
    assert seen["generating"].done == completions
    assert seen["generating"].of == completions
    assert seen["training"].done == seen["training"].of == completions
    assert seen["evaluating"].done == seen["evaluating"].of > 0
    assert all(work.tokens > 0 for work in seen.values())
    assert now() is None


def test_loading_says_so(monkeypatch):
    seen = []
    engine = Engine()
    before = engine.watch()

    def checked(policy, texts):
        seen.append(engine.watch())
        return ready(policy, texts)

    monkeypatch.setattr("ftis_node.policy.load.ready", checked)
    loaded = engine.load(arithmetic_settings(), "arithmetic")
    (found,) = seen
    assert before.doing is None
    assert found.doing.what == "checking the fast paths"
    assert run_for(found.facts) == run_for(loaded.shared()), "known before it has loaded"
