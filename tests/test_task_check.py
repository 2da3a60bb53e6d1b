"""`task check` tries every row with the real rule, and says what a person should do before a run is made of them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftis_node.evaluate import learnable, playing
from ftis_node.tasks.jail import can_lock_in
from tests.support.cli import answer, printed, refused

SUMS = [(f"What is {n} + 1?", str(n + 1)) for n in range(30)]


@pytest.fixture(autouse=True)
def words(monkeypatch):
    """A model that comes with the package, and writes every text."""
    monkeypatch.setenv("FTIS_MODEL", "tiny-bpe")


def file_of(folder, *rows, blank=""):
    lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows]
    file = folder / "rows.jsonl"
    file.write_text(blank.join(lines))
    return str(file)


@pytest.fixture
def sums(tmp_path) -> str:
    return file_of(tmp_path, *SUMS)


def checked(*line):
    """What a task that a run can be made of is said to be."""
    return answer("task", "check", *line)


def troubles(cli, *line):
    """The same of one with errors, and their words."""
    code, out, _ = cli("task", "check", *line, "--json")
    assert code == 1
    told = json.loads(out)
    return told, [trouble["what"] for trouble in told["troubles"]]


@pytest.mark.parametrize("rule", ["integer", "exact", "math"])
def test_every_gold_answer_is_put_to_the_rule(rule, sums):
    told = checked(sums, "--reward", rule)
    assert told["accepted"] == 30
    assert told["refused"] == 0
    assert told["undecided"] == 0
    assert told["reward"] == rule
    assert told["rows"] + told["held_out"] == 30
    assert told["troubles"] == told["unchecked"] == []
    assert 0 < told["longest"] <= told["prompt_tokens"]


def test_doubles_empty_rows_and_long_prompts_are_told_with_their_lines(cli, tmp_path):
    file = file_of(tmp_path, *SUMS, SUMS[0], (SUMS[1][0], "77"), ("x" * 5000, "1"), blank="\n")
    told, words = troubles(cli, file)
    assert told["duplicates"] == 2
    assert told["contradictions"] == 1
    assert told["empty"] == 32
    said = "\n".join(words)
    assert re.search("with different answers: Line 3 of rows.jsonl '.*; Line 63 ", said)
    assert "of more than 512 tokens: Line 65 of rows.jsonl" in said
    code, out, _ = cli("task", "check", file)
    assert code == 1
    assert "error: 1 question with different answers" in out
    assert "Keep one answer of each." in out


def test_a_rule_that_refuses_gold_answers_is_told(cli, tmp_path, monkeypatch):
    file = file_of(tmp_path, *SUMS, ("Which is it?", r"12 \text{ or } \boxed{13} or"))
    told, words = troubles(cli, file, "--reward", "math")
    assert told["refused"] == 1
    assert "refuses the gold answer of 1 row: Line 31" in words[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "checked_task.py").write_text(
        "from ftis_node.tasks import Score, make_task\n"
        "def judge(text, gold): return Score(float(text == gold and gold != '3'), True, True)\n"
        "def made(): return make_task([(f'q{n}', n) for n in range(30)], reward=judge)\n"
    )
    told, words = troubles(cli, "checked_task:made")
    assert told["accepted"] == 29
    assert told["refused"] == 1
    assert "Row 4 of the task 'q3'" in words[0]


@pytest.mark.skipif(not can_lock_in(), reason="nothing can lock code in here (landlock, seccomp, x86-64)")
def test_what_cannot_be_checked_is_told_and_a_rule_that_pays_for_nothing_is_refused(cli, tmp_path):
    told = checked(
        file_of(tmp_path, *((f"Write f{n}.", f"assert f{n}(1) == {n}") for n in range(20))), "--reward", "tests"
    )
    assert told["undecided"] == 20
    assert "20 rows: the gold answer is no answer itself" in told["unchecked"][0]
    everything = file_of(tmp_path, *((f"Say {n}.", f".*|{n}") for n in range(20)))
    _, words = troubles(cli, everything, "--reward", "regex")
    assert ">nan</answer>' on 16 of 16 rows" in words[0]


def test_a_model_that_is_absent_or_lacks_letters_is_told(cli, sums, monkeypatch):
    monkeypatch.delenv("FTIS_MODEL")
    assert checked(sums, "--model", "tiny-bpe", "--rows", "1")["model"] == "tiny-bpe"
    told = checked(sums)
    assert told["model"] == "tiny-a"
    assert told["troubles"] == []
    assert "name yours in FTIS_MODEL" in told["unchecked"][0]
    monkeypatch.setenv("FTIS_MODEL", "tiny-a")
    told, words = troubles(cli, sums)
    assert "tiny-a has no token for letters of 30 prompts: Line 1 " in words[0]
    assert '"9+5="' in told["troubles"][0]["fix"]
    out = cli("task", "check", sums)[1]
    assert "1 question held out, too few" in out
    assert "--eval-data" in out
    monkeypatch.setenv("FTIS_MODEL", "somebody/nothing-of-that-name")
    told = checked("arithmetic")
    assert told["longest"] is None
    assert told["unchecked"] == ["prompts: somebody/nothing-of-that-name is not here"]


def test_files_that_are_no_tasks_are_told_with_each_line(tmp_path):
    (tmp_path / "two.jsonl").write_text('{"question": "q"}\n[]\n')
    error = refused("task", "check", tmp_path / "two.jsonl")
    assert error.what.endswith("\nline 1 has no `answer`,\nline 2 is not a JSON object.")
    (tmp_path / "no.csv").write_text("text,gold\n1,2\n")
    error = refused("task", "check", tmp_path / "no.csv")
    assert "line 1, is no header with `answer`" in error.what
    assert error.exit_code == 2


def test_what_a_model_could_learn_is_sampled_and_said_with_advice():
    told = checked("arithmetic", "--model", "tiny-a", "--rows", "4")["learnable"]
    assert told["rows"] == 4
    assert told["samples"] == 32
    assert told["advice"] == []
    assert told["groups_with_signal"] > 0
    out = printed("task", "check", "arithmetic", "--model", "tiny-bpe", "--completion-tokens", "2")
    for words in (
        "100% cut off",
        "0 of 8 groups had rewards that differ",
        "advice: Many answers are cut off",
        "advice: Take rows that it solves at times",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("a_row", "together"),
    [
        (25.0, [1, 2, 1, 1]),
        (0.01, [1, 7]),
        (500.0, [1]),
    ],
)
def test_a_check_begins_as_many_rows_as_are_done_in_time(a_row, together, monkeypatch):
    """Two minutes, at most one of them at a time."""
    calls = []
    plain = playing.generate

    def generate(policy, prompts, **kwargs):
        calls.append(len(prompts))
        return plain(policy, prompts, **kwargs)

    monkeypatch.setattr(playing, "generate", generate)
    monkeypatch.setattr(learnable, "time", SimpleNamespace(monotonic=lambda: a_row * sum(calls)))
    assert checked("arithmetic", "--model", "tiny-a", "--samples", "2")["learnable"]["rows"] == sum(together)
    assert calls == together


@pytest.fixture
def kept(tmp_path) -> Path:
    """Where a filter writes the rows that teach."""
    return tmp_path / "kept.jsonl"


FILTER = ("task", "filter", "arithmetic", "--model", "tiny-a")
ALL = ("--low", "0", "--high", "1")


def test_ctrl_c_keeps_what_was_sampled_until_then(cli, kept, monkeypatch):
    plain = playing.generate

    def generate(policy, prompts, **kwargs):
        if len(prompts) > 1:
            raise KeyboardInterrupt
        return plain(policy, prompts, **kwargs)

    monkeypatch.setattr(playing, "generate", generate)
    said = cli("task", "check", "arithmetic", "--model", "tiny-a")[1]
    assert "8 completions of 1 of 8 rows" in said
    said = printed(*FILTER, "-o", kept, "--rows", "9", *ALL)
    assert "1 of 1 row;" in said
    assert "8 rows are not tried yet" in said
    assert len(lines(kept)) == 1
    assert held_out(kept).exists()


def lines(file):
    return file.read_text().splitlines()


def held_out(kept):
    return kept.with_name("kept.heldout.jsonl")


def test_a_wording_of_ones_own_is_kept_beside_the_rows(kept):
    few = ("-o", kept, "--samples", "2", "--rows", "2", "--completion-tokens", "9")
    out = printed(*FILTER, *few, *ALL, "--template", "0+{question}")
    assert out.splitlines()[-1].startswith(f"ftis-node run new --task {kept} --eval-data ")
    assert out.endswith(" --template '0+{question}' --model tiny-a --completion-tokens 9 -o run.toml\n")
    assert json.loads(lines(kept)[0]).keys() == {"question", "answer"}


def test_rows_that_teach_are_kept_also_by_a_command_that_goes_on(kept):
    tried = kept.with_name("kept.jsonl.tried")
    line = (*FILTER, "-o", kept, "--samples", "4", "--rows", "12")
    first = answer(*line)
    assert first["tried"] == 12
    assert first["rows"] + first["below"] + first["above"] == 12
    assert len(lines(kept)) == first["rows"]
    assert all(json.loads(row).keys() == {"prompt", "answer"} for row in lines(kept))
    assert len(lines(held_out(kept))) == checked("arithmetic")["held_out"]

    whole = tried.read_bytes()
    odd = whole.replace(b'"samples": 4, "right"', b'"samples": "x", "right"', 1)  # by a person
    assert odd != whole
    tried.write_bytes(odd[:-9])  # killed within a line
    assert answer(*line)["tried"] == 12
    assert tried.read_bytes().startswith(odd[:-9] + b"\n")
    assert len(tried.read_bytes().splitlines()) == 15
    assert answer(*line, *ALL)["rows"] == 12
    assert len(tried.read_bytes().splitlines()) == 15, "other bounds need no new samples"
    assert checked(kept)["rows"] > 0, "it is a task"


def test_a_filter_refuses_what_it_cannot_do_and_overwrites_nothing(kept):
    few = ("-o", kept, "--rows", "2", "--samples", "2")

    def no_filter(*more):
        error = refused(*FILTER, *few, *more)
        assert error.exit_code == 2
        assert not held_out(kept).exists()
        return f"{error.what} {error.fix}"

    assert "no pass rate" in no_filter("--low", "0.5", "--high", "0.4").lower()
    assert "Let it end in .jsonl" in no_filter("-o", kept.with_suffix(".txt"))
    tried = kept.with_name("kept.jsonl.tried")
    tried.write_text('{"task": "another"}\n')
    assert "another task, model, template or number of samples" in no_filter()
    tried.write_text("")  # begun by whoever was killed at once
    kept.write_text("mine")
    assert "did not make it" in no_filter()
    assert kept.read_text() == "mine"
    kept.unlink()
    assert "Take other bounds" in no_filter("--low", "0.99", "--high", "0.99")
    error = refused("task", "filter", "reasoning-gym:chain_sum", *few, "--model", "tiny-a")
    assert "judged by code of its own" in error.what
