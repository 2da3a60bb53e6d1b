"""A CSV file is a task as a JSONL file is: the same rows, rules and bounds, and errors that name their line."""

import hashlib
import json
from pathlib import Path

import pytest

from ftis_node.errors import UsageError
from ftis_node.tasks import check_named, load_evaluation, load_task, source_of
from tests.support.swarm import make_run

HEAD = b"question,answer\n"


def written(path, content):
    path.write_bytes(content)
    return str(path)


def test_a_csv_file_has_the_rows_and_rules_of_a_jsonl_file(tmp_path):
    rows = [(f'Who said "{i}",\nand why?', f"no. {i}") for i in range(40)]
    quoted = ('"{}",x,"{}"\r\n'.format(q.replace('"', '""'), a) for q, a in rows)
    file = written(tmp_path / "t.csv", b"\xef\xbb\xbfquestion, note ,answer\r\n\r\n" + "".join(quoted).encode())
    lines = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows).encode()
    other = load_task(written(tmp_path / "t.jsonl", lines), reward="exact")
    task = load_task(file, reward="exact")
    assert task.train == other.train
    assert task.held_out == other.held_out
    assert task.template == other.template
    assert task.data == source_of(file).foreseen()[0] == hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert load_evaluation(file, reward="exact").held_out == task.held_out
    assert source_of(file).files == [Path(file)]
    with pytest.raises(UsageError, match="which file is opened here"):
        check_named(make_run(task="t.csv"), task=None, reward=None, ours=False)


def test_a_prompt_column_and_tests_over_several_lines_are_read(tmp_path):
    assert load_task(written(tmp_path / "F.CSV", HEAD + b"a,5.0\nb,5.0\n")).train[0].answer == "5"
    rows = "".join(f'add {i},"assert add(1, 2) == 3\nassert add({i}, 0) == {i}"\n' for i in range(30))
    task = load_task(written(tmp_path / "p.csv", b"prompt,answer\n" + rows.encode()), reward="tests")
    assert task.template == "{question}"
    assert all(row.answer.count("\n") == 1 for row in task.train)
    assert {row.place for row in (*task.train, *task.held_out)} >= {"Line 2 of p.csv", "Line 4 of p.csv"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (HEAD, "is empty"),
        (b"q,a\n1,2\n", "line 1, is no header"),
        (b"question,answer,answer\n1,2,3\n", "line 1, is no header"),
        (b"text,answer\na,1\n", "line 2, has no text in `question` or `prompt`"),
        (HEAD + b'"a\nb",1\nc\n', "line 4, has 1 fields, and the header has 2"),
        (HEAD + b"a,1\n ,2\n", "line 3, has no text in"),
        (HEAD + b"a,1\nb,x\n", "line 3, has an answer that is not an integer"),
        (HEAD + b'a,1\n"b,2\n', "line 3, begins a row that is not CSV"),
        (HEAD + b'a,"1"2\n', "line 2, begins a row that is not CSV"),
        (HEAD + b"a,1\nb\xff,2\n", "line 3, is not UTF-8"),
        (HEAD.decode().encode("utf-16"), "is in UTF-16"),
        (HEAD + b"a" * 200_000 + b",1\n", r"line 2, begins a row that is not CSV \(field larger"),
        (HEAD + b"a,1\n\n" + b"c,x\n" * 20, "20 unusable lines"),
    ],
)
def test_a_csv_file_that_cannot_be_used_says_where(tmp_path, content, message):
    with pytest.raises(UsageError, match=message) as refused:
        load_task(written(tmp_path / "bad.csv", content))
    assert refused.value.fix
