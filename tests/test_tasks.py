"""Tasks: the built-in one is the same for ever, files say what is wrong with them, downloads are checked."""

import hashlib
import json
from pathlib import Path

import pytest

from ftis_node.errors import UsageError, UserError
from ftis_node.host.files import cache_dir
from ftis_node.tasks import Example, gsm8k, load_task, make_task, score
from ftis_node.tasks.download import Remote, cached
from ftis_node.tasks.task import TextCaps
from tests.support.models import DATA, real_data
from tests.support.served import Quiet, served


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def every(task):
    """All rows, those that are held out too."""
    return [*task.train, *task.held_out]


def asked(rows):
    return {row.question for row in rows}


def questions(count, first=0):
    return [{"question": f"What is {i} + 1?", "answer": i + 1} for i in range(first, first + count)]


# The built-in task


def test_arithmetic_has_1899_prompts_and_holds_out_at_least_500():
    task = load_task("arithmetic")
    assert len(every(task)) == len(asked(every(task))) == 1899
    assert len(task.held_out) >= 500
    assert {question[0] for question in asked(task.asked(40))} == {*"123456789"}


def test_arithmetic_answers_are_right_and_nothing_on_the_way_is_negative():
    for example in every(load_task("arithmetic")):
        a, first, b, second, c, end = example.question
        middle = int(a) + int(first + b)
        assert middle >= 0
        assert int(example.answer) == middle + int(second + c) >= 0
        assert end == "="


def test_arithmetic_never_changes():
    task = load_task("arithmetic")
    assert task.data == "f121ab9f8723431fe01c8840bbc8c993f0a3dd259552be9e9ceef043eaa0e929"
    assert task.train[:2] == (Example("1+1+2=", "4"), Example("1+1+3=", "5"))
    assert len(task.train) == 1310
    assert task.template == "{question}"
    assert task.reward == "integer"
    assert task.completion_tokens == 16


def test_a_text_run_lets_through_what_a_token_run_does(tmp_path):
    assert load_task("arithmetic").text == load_task("arithmetic-4").text == TextCaps(16, 64, 64)

    lines = [{"question": f"{i}", "answer": i} for i in range(20)]
    file = write(tmp_path / "r.jsonl", *lines)
    assert load_task(str(file)).text == TextCaps(2560, 1280, 320)

    rows = [(f"{i}", i) for i in range(9)]
    made = make_task(rows, completion_tokens=30, prompt_tokens=40)
    assert made.text == TextCaps(200, 150, 37)


@real_data
def test_the_caps_of_a_text_run_fit_the_problems_and_solutions_of_gsm8k():
    task = load_task("gsm8k", data=DATA / "gsm8k_train.jsonl")
    lines = (DATA / "gsm8k_train.jsonl").read_text().splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    assert max(len(task.prompt(e).encode()) for e in every(task)) <= task.text.prompt_bytes
    assert max(len(solution.encode()) for solution in solutions) < task.text.completion_bytes


# GSM8K


@real_data
def test_gsm8k_holds_every_row_and_every_gold_is_an_integer():
    task = load_task("gsm8k", data=DATA / "gsm8k_train.jsonl")  # the test file is found beside it
    assert len(task.train) == 7473
    assert len(task.held_out) == 1319
    assert task.data == gsm8k.TRAIN.sha256
    assert all(str(int(e.answer)) == e.answer for e in every(task))
    assert sum(e.answer.startswith("-") for e in every(task)) == 5


def test_gsm8k_golds_follow_the_hashes(tmp_path):
    golds = {
        "12 is it\n#### 12": "12",
        "#### 1,234": "1234",
        "one #### two\n#### -5": "-5",
        "####  7 ": "7",
    }
    file = write(tmp_path / "g.jsonl", *({"question": f"q{text}?", "answer": text} for text in golds))
    task = load_task("gsm8k", data=file)
    assert {e.question[1:-1]: e.answer for e in every(task)} == golds


def test_gsm8k_without_a_gold_names_the_line(tmp_path):
    file = write(tmp_path / "g.jsonl", {"question": "q", "answer": "#### 1"}, {"question": "r", "answer": "1"})
    with pytest.raises(UsageError, match="line 2"):
        load_task("gsm8k", data=file)


def test_the_template_is_plain_text_and_leaves_braces_in_questions_alone(tmp_path):
    file = write(
        tmp_path / "g.jsonl", *({"question": f"{{x}} {{question}} {i}", "answer": f"#### {i}"} for i in range(3))
    )
    task = load_task("gsm8k", data=file)
    prompt = task.prompt(task.train[0])
    assert prompt.endswith(f"User: {task.train[0].question}\nAssistant:")
    assert score(task.reward, f"{prompt}<think>a</think><answer>1</answer>", "1").reward == 0.0
    assert task.prompt_tokens == 512
    assert task.completion_tokens == 256


# Local files


def test_a_tenth_of_a_local_file_is_held_out_by_its_hash(tmp_path):
    file = write(tmp_path / "mine.jsonl", *questions(1000))
    task = load_task(str(file))
    assert len(asked(every(task))) == len(every(task)) == 1000
    assert 70 <= len(task.held_out) <= 130
    assert task.name == "mine.jsonl"
    assert task.data == hashlib.sha256(file.read_bytes()).hexdigest()
    assert load_task("mine.jsonl", data=file) == task


def test_the_prompts_of_a_run_do_not_depend_on_what_a_node_evaluates_on(tmp_path):
    file = write(tmp_path / "a.jsonl", *questions(50))
    other = write(tmp_path / "b.jsonl", *questions(4, first=100))
    task = load_task(str(file), eval_data=other)
    assert task.train == load_task(str(file)).train
    assert asked(task.held_out) == {f"What is {i} + 1?" for i in range(100, 104)}


@pytest.mark.parametrize("count", range(2, 12))
def test_at_least_one_row_is_held_out_and_one_is_left(tmp_path, count):
    task = load_task(str(write(tmp_path / "few.jsonl", *questions(count))))
    assert task.train
    assert task.held_out
    assert len(every(task)) == count


def test_equal_questions_are_never_on_both_sides(tmp_path):
    task = load_task(str(write(tmp_path / "twice.jsonl", *questions(20), *questions(20))))
    assert not asked(task.train) & asked(task.held_out)


@pytest.mark.parametrize("name", ["w.jsonl", "W.JSONL"])
def test_blank_lines_windows_line_ends_and_a_byte_order_mark_are_accepted(tmp_path, name):
    file = tmp_path / name
    rows = enumerate(["1", '"2"', "3.0", '"4.0"', "-5.00", '" 6,000. "'])
    lines = (f'{{"question": "q{number}", "answer": {answer}}}\r\n\r\n' for number, answer in rows)
    file.write_bytes(b"\xef\xbb\xbf" + "".join(lines).encode())
    task = load_task(str(file))
    assert {e.answer for e in every(task)} == {"1", "2", "3", "4", "-5", "6000"}


GOOD_LINE = b'{"question": "a", "answer": 1}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD_LINE + b"\xff\n", "line 2, is not JSON"),
        *((GOOD_LINE.decode().encode(form), f"is in {form.upper()[:6]}") for form in ("utf-16", "utf-16-be", "utf-32")),
        (b"[" * 100_000, "line 1, is not JSON"),
        (b'{"question": "\\ud800", "answer": 1}', "line 1, is not JSON in UTF-8"),
        (GOOD_LINE + b"\n[1]\n", "line 3, is not a JSON object"),
        (GOOD_LINE + b'{"answer": 1}', "line 2, has no text in `question` or `prompt`"),
        (b'{"question": " ", "answer": 1}', "line 1, has no text"),
        (b'{"question": 7, "answer": 1}', "line 1, has no text"),
        *(
            (b'{"question": "a", "answer": ' + answer + b"}", "line 1, has an answer that is not an integer")
            for answer in (
                b'"x"',
                b"1.5",
                b"1e22",
                b'"5.01"',
                b"true",
                b"null",
                b'""',
                b"[1]",
                b'"1e3"',
                b"9" * 50,
                b"NaN",
            )
        ),
        (b'{"question": "a", "answer": ' + b"9" * 9000 + b"}", "line 1, is not JSON"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(tmp_path, content, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_task(str(file))


def test_training_and_evaluation_use_the_same_field(tmp_path):
    other = write(tmp_path / "e.jsonl", {"prompt": "1+1=", "answer": 2})
    with pytest.raises(UsageError, match="'prompt'"):
        load_task(str(write(tmp_path / "t.jsonl", *questions(5))), eval_data=other)


# Downloads, from a real server on this machine

CONTENT = b'{"question": "q", "answer": "#### 1"}\n' * 5000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Files(Quiet):
    def do_GET(self):
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path == "/truncated":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        body = {"/good": CONTENT, "/wrong": CONTENT[::-1], "/long": CONTENT * 2}.get(self.path, CONTENT[:-100])
        self.wfile.write(body)


def test_a_download_lands_in_one_piece_is_not_repeated_and_mended_if_it_is_damaged(tmp_path):
    target = tmp_path / "cache" / "file"
    with served(Files) as url:
        remote = Remote(f"{url}/good", len(CONTENT), DIGEST)
        assert cached(remote, target).read_bytes() == CONTENT
        target.write_bytes(b"half")
        assert cached(remote, target).read_bytes() == CONTENT
    assert cached(remote, target) == target  # the server is gone
    assert [f.name for f in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("wrong", "sha256 is not"),
        ("long", "more than"),
        ("short", "only"),
        ("truncated", "only"),
        ("missing", "404"),
    ],
)
def test_a_wrong_download_is_refused_and_leaves_nothing(tmp_path, path, reason):
    with served(Files) as url, pytest.raises(UserError, match=reason) as caught:
        cached(Remote(f"{url}/{path}", len(CONTENT), DIGEST), tmp_path / "file")
    assert "--data" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_without_network_a_person_is_told_to_name_a_file(tmp_path, monkeypatch):
    with served(Files) as url:
        pass
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gsm8k, "TRAIN", Remote(f"{url}/good", len(CONTENT), DIGEST))
    with pytest.raises(UserError, match="Cannot download") as caught:
        load_task("gsm8k")
    assert "--data" in caught.value.fix
    assert caught.value.exit_code == 1, "it may be there in a minute"
    assert not (tmp_path / "ftis-node").exists()


def test_the_cache_is_the_users(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/ftis-node")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_dir() == Path.home() / ".cache" / "ftis-node"
