"""Extra columns of a verdict reach the page and metrics.jsonl, and nothing that a stranger writes makes them large."""

import json
import sys

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftis_node.tasks import Score, load_task, scoring
from ftis_node.tasks.score_columns import CHARACTERS, COLUMNS, ScoreColumns, bounded
from ftis_node.worker.messages import GroupText, ReadableGroup
from tests.support.small_models import opened_engine

JUDGE = """
from ftis_node.tasks import Score, make_task

def judge(text, answer):
    if text == "huge":
        return Score(0.0, True, False, {f"{n}" * 500: "\\U0001f600" * 10**4 for n in range(1000)})
    if text == "odd":
        return Score(0.0, True, False, {"inf": float("inf"), "none": None, 3: "x", "half": "\\ud800", "big": 10**999})
    return Score(float(answer in text), True, False, {"read": text[:3], "length": len(text)})

def build():
    return make_task([(f"{i}+{i}=", str(2 * i)) for i in range(20)], reward=judge, template="{question}",
                     completion_tokens=16, prompt_tokens=16)
"""
SCALARS = st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.binary())


@pytest.fixture
def named(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "columned.py").write_text(JUDGE)
    monkeypatch.delitem(sys.modules, "columned", raising=False)
    return "columned:build"


def small(columns):
    texts = [value for value in columns.values() if isinstance(value, str)]
    return len(columns) <= COLUMNS and all(len(one) <= CHARACTERS for one in (*columns, *texts))


def test_what_a_stranger_makes_of_columns_is_cut_in_the_functions_process(named):
    task = load_task(named, code=True)
    with scoring(task.reward, task.scorer) as rate:
        assert rate("so 4", "4") == Score(1.0, True, False, {"read": "so ", "length": 4.0})
        huge = rate("huge", "4")
        assert small(dict(huge.columns))
        assert len(huge.columns) == COLUMNS
        assert rate("odd", "4").columns == {"half": "?"}
        assert rate("so", "4").columns["length"] == 2.0
        assert rate("so", "4").reward == 0.0


@example({"": sys.float_info.max}, b"")
@given(st.one_of(SCALARS, st.dictionaries(st.one_of(st.text(), st.integers()), SCALARS)), st.binary())
def test_columns_are_small_and_can_be_written_whatever_they_are_made_of(columns, packet):
    kept = bounded(columns)
    assert small(kept)
    assert bounded(kept) == kept
    seen = ScoreColumns()
    for number in range(20):
        seen.add(packet, [kept, bounded({f"name {number}": "x"}), {}])
    assert len(seen.of(packet)) in (0, 3)
    told = seen.taken()
    assert small(told)
    assert seen.taken() == {}
    assert msgspec.json.decode(msgspec.json.encode(told)) == told == json.loads(json.dumps(told, allow_nan=False))


def test_groups_whose_columns_are_kept_are_few():
    seen = ScoreColumns()
    for number in range(1000):
        seen.add(str(number).encode(), [{"text": str(number), "number": 1e308}])
    assert seen.of(b"999") == [{"text": "999", "number": 1e308}]
    assert seen.of(b"0") == []
    assert seen.taken() == {"text": "0", "number": pytest.approx(1e308)}


def test_an_engine_shows_the_columns_of_a_group_and_reports_those_of_a_step(named):
    engine = opened_engine(named, load={"code": True}, run={"prompt_tokens": 1000, "group": 2}, eval_prompts=2)
    made = engine.generate([0, 1]).groups
    (shown,) = engine.texts([ReadableGroup(0, made[0].packet, 2)])
    assert [one["length"] for one in shown.columns] == [len(text) for text in shown.completions]
    assert [one["read"] for one in shown.columns] == [text[:3] for text in shown.completions]
    (other,) = engine.texts([ReadableGroup(0, made[0].packet, 1)])
    assert isinstance(other, GroupText)
    assert len(other.columns) == 1
    assert set(engine._columns.taken()) == {"read", "length"}
    engine.close()
