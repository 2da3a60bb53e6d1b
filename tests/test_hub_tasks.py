"""Tasks from a hub of datasets: what is downloaded, once, and what is refused before anything is."""

import io
import json
import resource
from collections.abc import Iterator
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from ftis_node.errors import UsageError, UserError
from ftis_node.host import proxy
from ftis_node.tasks import check_named, hub, load_evaluation, load_task, source_of, with_columns
from ftis_node.tasks.hub import parse
from tests.support.hub import REVISION, Hub, running
from tests.support.swarm import make_run

ROWS = [
    {
        "question": f"What is {n} + {n}?",
        "answer": f"{n} and {n} are\n#### {2 * n}",
        "other": n,
    }
    for n in range(60)
]
FULL = f"hf:ann/sums:main/train@{REVISION},question,answer"


def all_rows(task):
    return (*task.train, *task.held_out)


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture
def offered(tmp_path, monkeypatch) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with running(Hub()) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.address)
        template = made.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        files = {
            "main__train-00000-of-00002_parquet": parquet(ROWS[:30]),
            "main__train-00001-of-00002_parquet": parquet(ROWS[30:]),
            "main__test-00000-of-00001_parquet": parquet(ROWS[:30]),
            "socratic__train-00000-of-00001_parquet": parquet(ROWS),
            "README_json": b"{}",
        }
        made.offer("ann/sums", **files)
        made.offer("bob/lines", train_jsonl=json_lines(ROWS), test_jsonl=json_lines(ROWS[:25]))
        yield made


def test_a_split_is_loaded_pinned_and_kept(offered):
    task = load_task("hf:ann/sums:main/train")
    assert task.name == FULL
    assert task.reward == "integer"
    assert {row.answer for row in all_rows(task)} == {str(2 * n) for n in range(60)}
    for row in task.train:
        assert row.place == f"Row {int(row.answer) // 2 + 1} with a question of {FULL}"
    assert len(task.held_out) >= 1
    assert task.template.count("{question}") == 1
    asked = len(offered.asked)
    assert load_task(FULL) == task, "the rows are kept"
    assert source_of(FULL).download() is None
    assert len(offered.asked) == asked, "nobody is asked"
    assert load_task("hf:ann/sums:main/train") == task
    assert len(offered.asked) == asked + 1, "for the revision"
    evaluation = load_evaluation(FULL)
    assert evaluation.held_out == task.held_out
    assert evaluation.train == ()


def test_a_broken_download_goes_on_where_it_stopped(offered):
    rows = [{"question": f"{'long ' * 1000}{n}", "answer": n} for n in range(5000)]  # it is written in parts of 10 MB
    offered.offer("eve/long", train_jsonl=(content := json_lines(rows)))
    offered.breaks = 15_000_000
    try:
        load_task("hf:eve/long")
    except UsageError as error:
        assert "goes on where it stopped" in error.fix
    assert len(all_rows(load_task("hf:eve/long"))) == 5000
    assert any(int(one.removeprefix("bytes=").partition("-")[0]) > 0 for one in offered.ranges)
    assert offered.sent < 1.4 * len(content)


def test_a_dry_run_asks_for_the_list_and_downloads_nothing(offered):
    assert source_of("hf:ann/sums:main/train").check() is None
    size, name = source_of("hf:ann/sums:main/train").download()
    files = offered.datasets["ann/sums"]
    assert name == FULL
    assert size == sum(len(files[file]) for file in files if file.startswith("main/train"))
    assert not [path for path in offered.asked if "/resolve/" in path]
    task = load_task("hf:ann/sums:main/train")
    assert source_of(FULL).check() == task


def test_columns_have_options_and_are_part_of_the_name(offered):
    name = with_columns("hf:bob/lines", None, "other")
    assert name == "hf:bob/lines:train,question,other"
    task = load_task(name)
    assert task.name == f"hf:bob/lines:train@{REVISION},question,other"
    assert {row.answer for row in all_rows(task)} == {str(n) for n in range(60)}
    assert with_columns("gsm8k", None, None) == "gsm8k"
    with pytest.raises(UsageError, match="name columns of a dataset of a hub"):
        with_columns("gsm8k", "question", None)


def test_a_home_goes_on_with_its_runs_revision(offered):
    for same in (FULL, "hf:ann/sums", "hf:ann/sums:main/train"):
        assert source_of(same).in_run(FULL) == FULL
    for other in (
        "hf:ann/sums:main/test",
        "hf:ann/sums:main/train,question,other",
        f"hf:ann/sums:main/train@{'0' * 40}",
        "gsm8k",
    ):
        assert source_of(other).in_run(FULL) == other
    assert source_of("hf:ann/sums").in_run("gsm8k") == "hf:ann/sums"
    assert source_of(FULL).in_run(None) == FULL
    assert source_of(FULL, reward="math").foreseen() == (None, "math")
    check_named(make_run(task=FULL), task=FULL, reward=None, ours=False)


def conversation(*said):
    """As datasets have it: said is of a role and a text in turn."""
    return [{"role": role, "content": text} for role, text in zip(said[::2], said[1::2], strict=True)]


def test_messages_are_a_question(offered):
    rows = []
    for n in range(40):
        messages = conversation(
            "system", "Be brief.", "user", f"What is {n} + 1?", "assistant", "I think", "user", "and?"
        )
        rows.append({"prompt": messages, "answer": n + 1})
    offered.offer("cat/chat", train_parquet=parquet(rows))
    task = load_task("hf:cat/chat:train,prompt,answer")
    assert {row.question for row in task.train} <= {f"Be brief.\n\nWhat is {n} + 1?" for n in range(40)}


@pytest.mark.parametrize("form", [float, Decimal, lambda n: f"{n}.0", lambda n: str(n).encode(), lambda n: [n]])
def test_an_integer_may_have_another_type_and_lie_within_a_column(form, offered):
    rows = [{"asked": {"text": [f"What is {n}?"]}, "reward_model": {"ground_truth": form(n)}} for n in range(40)]
    offered.offer("fay/nested", train_parquet=parquet(rows))
    task = load_task("hf:fay/nested:train,asked.text.0,reward_model.ground_truth")
    found = {row.question: row.answer for row in all_rows(task)}
    assert found == {f"What is {n}?": str(n) for n in range(40)}


def test_a_conversation_has_question_and_answer_and_blank_lines_do_not_count(offered, caplog):
    rows = [{"messages": conversation("user", f"What is {n}?", "assistant", f"{n}")} for n in range(40)]
    rows.insert(7, {"messages": conversation("user", "And?")})
    offered.offer("gus/chat", train_jsonl=b"\n" + json_lines(rows).replace(b"\n", b"\n \n"))
    task = load_task("hf:gus/chat:train,messages,messages")
    for row in task.train:
        assert row.question == f"What is {row.answer}?"
    assert "1 row of hf:gus/chat" in caplog.text
    assert "left out (row 8)" in caplog.text


def test_few_rows_without_an_answer_under_the_rule_are_left_out(offered, caplog):
    odd = [{"question": f"Why {n}?", "answer": "because"} for n in range(7)]
    offered.offer("dan/odd", train_jsonl=json_lines(ROWS + odd), test_jsonl=json_lines(ROWS[:5] + odd))
    assert len(all_rows(load_task("hf:dan/odd"))) == len(ROWS)
    assert "7 rows of" in caplog.text
    with pytest.raises(UsageError, match="Of 12 rows"):
        load_task("hf:dan/odd:test")
    assert len(all_rows(load_task("hf:dan/odd", reward="exact"))) == len(ROWS) + 7


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("hf:gsm8k", "is no dataset of a hub", "hf:ORG/NAME:SPLIT"),
        ("hf:ann/sums", "several splits of the name train", "main/train, socratic/train"),
        ("hf:ann/sums:valid", "no split of the name valid", "main/train"),
        ("hf:ann/none", "does not exist, or is private", "hf auth login"),
        ("hf:eve/gated", "is gated", "Accept its terms"),
        (f"hf:bob/lines@{'0' * 40}", "has no revision 0000", "Leave out @REVISION"),
        ("hf:bob/lines:train,problem,answer", "has no column 'problem'", "question, answer, other"),
        ("hf:ann/sums:main/train,question,solution", "has no column 'solution'", "question, answer, other"),
        ("hf:bob/lines:train,question,other.value", "has no column 'other.value'", "a dot leads into one"),
        ("hf:bob/wide", "is in UTF-16", "another dataset"),
        ("hf:bob/broken", "no JSON object in line 2 of train.jsonl", "another dataset"),
        ("hf:bob/shards", "cannot be read", "another dataset"),
        ("hf:bob/empty", "has no rows with a text in 'question'", "--question"),
    ],
)
def test_what_cannot_be_used_is_told(name, what, fix, offered):
    offered.offer("eve/gated", train_jsonl=b"")
    offered.offer("bob/broken", train_jsonl=json_lines(ROWS[:1]) + b"no json\n")
    offered.offer("bob/wide", train_jsonl=json_lines(ROWS).decode().encode("utf-16"))
    offered.offer("bob/shards", train_parquet=b"PAR1 is not all of it")
    offered.offer("bob/empty", train_jsonl=json_lines([{"question": " ", "answer": 1}]))
    offered.refuses = {"eve/gated": "GatedRepo"}
    with pytest.raises(UsageError) as refused:
        load_task(name)
    assert what in refused.value.what
    assert fix in refused.value.fix


def test_what_is_too_large_is_refused_before_it_is_downloaded(offered, monkeypatch):
    def refused(words, name, value):
        with monkeypatch.context() as patch, pytest.raises(UsageError, match=words):
            patch.setattr(hub, name, value)
            load_task("hf:ann/sums:main/train")

    refused("are allowed", "BYTES_MAX", 1000)
    refused("left", "free_bytes", lambda _: 1000)
    assert not [path for path in offered.asked if "/resolve/" in path]
    refused("more than 10 rows", "ROWS_MAX", 10)


def packed(columns, codec="zstd"):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, compression=codec, row_group_size=1 << 28, store_schema=False)
    assert len(file.getvalue()) < 100_000
    return file.getvalue()


def repeated(length, count):
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int8)), pa.array(["7" * length]))
    return {"question": column, "answer": column}


@pytest.mark.parametrize(
    ("file", "made", "what"),
    [
        ("train.parquet", lambda: packed(repeated(1 << 20, 65_536)), "unpacks to more than|a row of more than 4 MiB"),
        ("train.parquet", lambda: packed(repeated(1 << 25, 4_096)), "unpacks to more than"),
        ("train.parquet", lambda: packed(repeated(8, 1 << 22)), "more than 200,000 rows"),
        ("train.jsonl", lambda: b"[" * 4_000_000, "no JSON object in line 1"),
        ("train.jsonl", lambda: b'{"question": "7", "answer": [' + b"[]," * 9_000_000 + b"7]}", "a row of more than"),
    ],
)
def test_row_63_unpacking_a_dataset_is_bounded(file, made, what, offered):
    offered.offer("eve/bomb", **{file.replace(".", "_"): made()})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError, match=what):
        load_task("hf:eve/bomb")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert after - before < 1 << 20, "in KiB"
    assert child < 5 << 20


def test_without_a_hub_or_pyarrow_it_says_so(offered, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(UserError, match="cannot be had"):
            load_task("hf:ann/sums:main/train")
        patch.setenv("ALL_PROXY", "socks5h://127.0.0.1:1")
        patch.setattr(proxy.importlib.util, "find_spec", lambda _: None)
        with pytest.raises(UserError, match="names a SOCKS proxy"):
            load_task("hf:ann/sums:main/train")
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="needs pyarrow"):
        (tmp_path / "pyarrow.py").write_text("raise ImportError")
        patch.setenv("PYTHONPATH", str(tmp_path))
        load_task("hf:ann/sums:main/train")


def test_files_beside_it_are_refused_and_a_strangers_run_downloads_nothing(offered, tmp_path):
    with pytest.raises(UsageError, match="makes its own data"):
        load_task(FULL, data=tmp_path)
    with pytest.raises(UsageError, match="is downloaded from a hub"):
        check_named(make_run(task=FULL), task=None, reward=None, ours=False)
    assert parse(FULL).name == FULL
    assert not offered.asked
