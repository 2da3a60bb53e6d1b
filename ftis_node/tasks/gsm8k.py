"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 7,473 grade-school problems to train on and 1,319 to be tested on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ftis_node.tasks.download import LOCAL_COPY, Remote, cache_dir, cached, sha256_of
from ftis_node.tasks.jsonl import plain_answer, read_rows, split
from ftis_node.tasks.task import Example, Task

_SOURCE = (
    "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
    "/grade_school_math/data"
)
TRAIN = Remote(f"{_SOURCE}/train.jsonl", 4_166_206, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465")
TEST = Remote(f"{_SOURCE}/test.jsonl", 749_738, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14")


def load_gsm8k(data: Path | None = None, eval_data: Path | None = None) -> Task:
    """The task from local files, from the cache, or from its source, pinned by commit and sha256.

    The original training file is trained on whole, and the original test file is held out. Another file of the same
    layout keeps a tenth of its own rows out of training, as `ftis_node.tasks.jsonl` does. Raises UsageError for files
    that cannot be read and for a download that fails.
    """
    path = data if data is not None else cached(TRAIN, cache_dir() / "gsm8k-train.jsonl")
    content, rows, _ = read_rows(path, gold_answer)
    digest = hashlib.sha256(content).hexdigest()
    if digest == TRAIN.sha256:
        train, held_out = rows, read_rows(eval_data or _test_file(path), gold_answer)[1]
    else:
        train, held_out = split(path, rows)
        if eval_data is not None:
            held_out = read_rows(eval_data, gold_answer)[1]
    return _task(train, held_out, digest)


def to_be_downloaded(data: Path | None, eval_data: Path | None) -> tuple[Remote, ...]:
    """The file that `load_gsm8k` would fetch."""
    train = data if data is not None else cache_dir() / "gsm8k-train.jsonl"
    whole = sha256_of(train) == TRAIN.sha256
    missing = [TRAIN] if data is None and not whole else []
    tested = [train.with_name(train.name.replace("train", "test")), cache_dir() / "gsm8k-test.jsonl"]
    if eval_data is None and (whole or data is None) and not any(sha256_of(path) == TEST.sha256 for path in tested):
        missing.append(TEST)
    return tuple(missing)


def check_gsm8k(data: Path | None, eval_data: Path | None) -> None:
    """Raise UsageError where a file that was named cannot be read or used."""
    for path in (data, eval_data):
        if path is not None:
            read_rows(path, gold_answer)


def gsm8k_to_be_tested(data: Path | None = None) -> Task:
    """The test questions alone, for evaluation: of `data`, from the cache, or from the source.

    Raises UsageError for a file that cannot be read and for a download that fails.
    """
    path = data if data is not None else cached(TEST, cache_dir() / "gsm8k-test.jsonl", fix=LOCAL_COPY)
    content, rows, _ = read_rows(path, gold_answer)
    return _task((), rows, hashlib.sha256(content).hexdigest())


def _task(train: tuple[Example, ...], held_out: tuple[Example, ...], data: str) -> Task:
    return Task.by_rule("gsm8k", train, held_out, data, "integer")


def gold_answer(solution: Any) -> str | None:
    """The integer after the last `####` of a worked solution; None where there is none."""
    if not isinstance(solution, str) or "####" not in solution:
        return None
    return plain_answer(solution.rpartition("####")[2].strip())


def _test_file(train: Path) -> Path:
    """The original test file: beside the training file where it lies there, else from the cache or the source."""
    beside = train.with_name(train.name.replace("train", "test"))
    if sha256_of(beside) == TEST.sha256:
        return beside
    return cached(TEST, cache_dir() / "gsm8k-test.jsonl")
