"""`task check` tries every row with the real rule, and says what a person should do before a run is made of them."""

import json
from types import SimpleNamespace

import pytest

from ftis_node.evaluate import learnable, playing
from ftis_node.tasks.jail import can_lock_in

SUMS = [(f"What is {n} + 1?", str(n + 1)) for n in range(30)]


@pytest.fixture(autouse=True)
def words(monkeypatch):
    """A model that comes with the package, and writes every text."""
    monkeypatch.setenv("FTIS_MODEL", "tiny-bpe")


def file_of(folder, *rows, name="rows.jsonl", blank=""):
    lines = (json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows)
    (folder / name).write_text(blank.join(lines))
    return str(folder / name)


def found(cli, *line, code=0):
    ended, out, _ = cli("task", "check", *line, "--json")
    assert ended == code, out
    answer = json.loads(out)
    return answer


@pytest.mark.parametrize("rule", ["integer", "exact", "math"])
def test_every_gold_answer_is_put_to_the_rule(rule, cli, tmp_path):
    told = found(cli, file_of(tmp_path, *SUMS), "--reward", rule)
    assert (told["accepted"], told["refused"], told["undecided"]) == (30, 0, 0) and told["reward"] == rule
    assert told["rows"] + told["held_out"] == 30 and told["troubles"] == told["unchecked"] == []
    assert 0 < told["longest"] <= told["prompt_tokens"]


def test_doubles_empty_rows_and_long_prompts_are_told_with_their_lines(cli, tmp_path):
    file = file_of(tmp_path, *SUMS, SUMS[0], (SUMS[1][0], "77"), ("x" * 5000, "1"), blank="\n")
    told = found(cli, file, code=1)
    assert (told["duplicates"], told["contradictions"], told["empty"]) == (2, 1, 32)
    words = [one["what"] for one in told["troubles"]]
    assert any("with different answers: Line 3 of rows.jsonl '" in one and "; Line 63 " in one for one in words)
    assert any("of more than 512 tokens: Line 65 of rows.jsonl" in one for one in words)
    code, out, _ = cli("task", "check", file)
    assert code == 1 and "error: 1 question with different answers" in out and "Keep one answer of each." in out


def test_a_rule_that_refuses_gold_answers_is_told(cli, tmp_path, monkeypatch):
    file = file_of(tmp_path, *SUMS, ("Which is it?", r"12 \text{ or } \boxed{13} or"))
    told = found(cli, file, "--reward", "math", code=1)
    assert told["refused"] == 1 and "refuses the gold answer of 1 row: Line 31" in told["troubles"][0]["what"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "checked_task.py").write_text(
        "from ftis_node.tasks import Score, make_task\n"
        "def judge(text, gold): return Score(float(text == gold and gold != '3'), True, True)\n"
        "def made(): return make_task([(f'q{n}', n) for n in range(30)], reward=judge)\n"
    )
    told = found(cli, "checked_task:made", code=1)
    assert (told["accepted"], told["refused"]) == (29, 1) and "Row 4 of the task 'q3'" in told["troubles"][0]["what"]


@pytest.mark.skipif(not can_lock_in(), reason="nothing can lock code in here (landlock, seccomp, x86-64)")
def test_what_cannot_be_checked_is_told_and_a_rule_that_pays_for_nothing_is_refused(cli, tmp_path):
    golds = [(f"Write f{n}.", f"assert f{n}(1) == {n}") for n in range(20)]
    told = found(cli, file_of(tmp_path, *golds), "--reward", "tests")
    assert told["undecided"] == 20 and "20 rows: the gold answer is no answer itself" in told["unchecked"][0]
    told = found(cli, file_of(tmp_path, *((f"Say {n}.", f".*|{n}") for n in range(20))), "--reward", "regex", code=1)
    assert ">nan</answer>' on 16 of 16 rows" in told["troubles"][0]["what"]


def test_an_absent_model_and_no_task_are_told(cli, tmp_path, monkeypatch):
    monkeypatch.delenv("FTIS_MODEL")
    assert found(cli, file_of(tmp_path, *SUMS), "--model", "tiny-bpe", "--rows", "1")["model"] == "tiny-bpe"
    told = found(cli, file_of(tmp_path, *SUMS))
    assert told["model"] == "tiny-a" and "name yours in FTIS_MODEL" in told["unchecked"][0] and not told["troubles"]
    monkeypatch.setenv("FTIS_MODEL", "tiny-a")
    trouble = found(cli, file_of(tmp_path, *SUMS), code=1)["troubles"][0]
    assert "tiny-a has no token for letters of 30 prompts: Line 1 " in trouble["what"] and '"9+5="' in trouble["fix"]
    code, out, _ = cli("task", "check", file_of(tmp_path, *SUMS))
    assert code == 1 and "1 question held out, too few" in out and "--eval-data" in out
    monkeypatch.setenv("FTIS_MODEL", "somebody/nothing-of-that-name")
    told = found(cli, "arithmetic")
    assert told["longest"] is None and told["unchecked"] == ["prompts: somebody/nothing-of-that-name is not here"]
    (tmp_path / "two.jsonl").write_text('{"question": "q"}\n[]\n')
    _, _, err = cli("task", "check", str(tmp_path / "two.jsonl"))
    assert err.splitlines()[-3:-1] == ["         line 1 has no `answer`,", "         line 2 is not a JSON object."]
    (tmp_path / "no.csv").write_text("text,gold\n1,2\n")
    code, out, err = cli("task", "check", str(tmp_path / "no.csv"))
    assert code == 2 and out == "" and "line 1, is no header with `answer`" in err


def test_what_a_model_could_learn_is_sampled_and_said_with_advice(cli):
    told = found(cli, "arithmetic", "--model", "tiny-a", "--rows", "4")["learnable"]
    assert (told["rows"], told["samples"]) == (4, 32) and told["groups_with_signal"] > 0 and told["advice"] == []
    code, out, _ = cli("task", "check", "arithmetic", "--model", "tiny-bpe", "--completion-tokens", "2")
    assert code == 0 and "100% cut off" in out and "0 of 8 groups had rewards that differ" in out
    assert "advice: Many answers are cut off" in out and "advice: Take rows that it solves at times" in out


@pytest.mark.parametrize(("a_row", "together"), [(25.0, [1, 2, 1, 1]), (0.01, [1, 7]), (500.0, [1])])
def test_a_check_begins_as_many_rows_as_are_done_in_time(a_row, together, cli, monkeypatch):
    """Two minutes, at most one of them at a time."""
    calls = []
    plain = playing.generate

    def generate(policy, prompts, **kwargs):
        calls.append(len(prompts))
        return plain(policy, prompts, **kwargs)

    monkeypatch.setattr(playing, "generate", generate)
    monkeypatch.setattr(learnable, "time", SimpleNamespace(monotonic=lambda: a_row * sum(calls)))
    assert found(cli, "arithmetic", "--model", "tiny-a", "--samples", "2")["learnable"]["rows"] == sum(together)
    assert calls == together


def test_ctrl_c_keeps_what_was_sampled_until_then(cli, tmp_path, monkeypatch):
    plain = playing.generate

    def generate(policy, prompts, **kwargs):
        if len(prompts) > 1:
            raise KeyboardInterrupt
        return plain(policy, prompts, **kwargs)

    monkeypatch.setattr(playing, "generate", generate)
    said = cli("task", "check", "arithmetic", "--model", "tiny-a")[1]
    assert "8 completions of 1 of 8 rows" in said
    line = ("task", "filter", "arithmetic", "--model", "tiny-a", "-o", str(tmp_path / "kept.jsonl"), "--rows", "9")
    code, said, _ = cli(*line, "--low", "0", "--high", "1")
    assert code == 0 and "1 of 1 row;" in said and "8 rows are not tried yet" in said
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 1 and (tmp_path / "kept.heldout.jsonl").exists()


def test_a_wording_of_ones_own_is_kept_beside_the_rows(cli, tmp_path):
    kept = tmp_path / "kept.jsonl"
    line = ("task", "filter", "arithmetic", "--model", "tiny-a", "-o", str(kept), "--samples", "2", "--rows", "2")
    code, out, _ = cli(*line, "--template", "0+{question}", "--low", "0", "--high", "1", "--completion-tokens", "9")
    assert code == 0 and out.splitlines()[-1].startswith(f"ftis-node run new --task {kept} --eval-data ")
    assert out.endswith(" --template '0+{question}' --model tiny-a --completion-tokens 9 -o run.toml\n")
    assert json.loads(kept.read_text().splitlines()[0]).keys() == {"question", "answer"}


def test_rows_that_teach_are_kept_also_by_a_command_that_goes_on(cli, tmp_path):
    kept = tmp_path / "kept.jsonl"
    tried = tmp_path / "kept.jsonl.tried"
    line = ("task", "filter", "arithmetic", "--model", "tiny-a", "-o", str(kept), "--samples", "4", "--rows", "12")
    code, out, _ = cli(*line, "--json")
    first = json.loads(out)
    assert code == 0 and first["tried"] == 12 and first["rows"] + first["below"] + first["above"] == 12
    rows = [json.loads(text) for text in kept.read_text().splitlines()]
    assert len(rows) == first["rows"] and all(row.keys() == {"prompt", "answer"} for row in rows)
    assert len((tmp_path / "kept.heldout.jsonl").read_text().splitlines()) == found(cli, "arithmetic")["held_out"]

    whole = tried.read_bytes()
    tried.write_bytes(whole[:-9])  # killed within a line
    assert json.loads(cli(*line, "--json")[1])["tried"] == 12
    assert tried.read_bytes().startswith(whole[:-9] + b"\n") and len(tried.read_bytes().splitlines()) == 14
    again = json.loads(cli(*line, "--low", "0", "--high", "1", "--json")[1])
    assert again["rows"] == 12 and len(tried.read_bytes().splitlines()) == 14, "other bounds need no new samples"
    assert found(cli, str(kept))["rows"] > 0, "it is a task"


def test_a_filter_refuses_what_it_cannot_do_and_overwrites_nothing(cli, tmp_path):
    kept = tmp_path / "kept.jsonl"
    line = ("task", "filter", "arithmetic", "--model", "tiny-a", "-o", str(kept), "--rows", "2", "--samples", "2")

    def refused(*more):
        code, _, err = cli(*line, *more)
        assert code == 2 and not (tmp_path / "kept.heldout.jsonl").exists()
        return err

    assert "no pass rate" in refused("--low", "0.5", "--high", "0.4").lower()
    assert "Let it end in .jsonl" in refused("-o", str(tmp_path / "kept.txt"))
    (tmp_path / "kept.jsonl.tried").write_text('{"task": "another"}\n')
    assert "another task, model, template or number of samples" in refused()
    (tmp_path / "kept.jsonl.tried").unlink()
    kept.write_text("mine")
    assert "did not make it" in refused() and kept.read_text() == "mine"
    kept.unlink()
    assert "Take other bounds" in refused("--low", "0.99", "--high", "0.99")
    assert "judged by code of its own" in cli(*line[:2], "reasoning-gym:chain_sum", *line[3:])[2]
