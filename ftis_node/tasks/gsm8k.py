"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 7,473 grade-school problems to train on and 1,319 to be tested on."""

from pathlib import Path
from typing import Any

from ftis_node.host.files import cache_dir
from ftis_node.tasks.download import LOCAL_COPY, Remote, cached, sha256_of
from ftis_node.tasks.jsonl import Layout, plain_answer, read_rows, split
from ftis_node.tasks.source import Source
from ftis_node.tasks.task import Task

_SOURCE = (
    "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
    "/grade_school_math/data"
)
TRAIN = Remote(f"{_SOURCE}/train.jsonl", 4_166_206, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465")
TEST = Remote(f"{_SOURCE}/test.jsonl", 749_738, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14")


def gold_answer(solution: Any) -> str | None:
    """The integer after the last `####` of a worked solution; None where there is none."""
    if not isinstance(solution, str) or "####" not in solution:
        return None
    return plain_answer(solution.rpartition("####")[2].strip())


class Gsm8k(Source):
    """The task from local files, from the cache, or from its source, pinned by commit and sha256.

    The original training file is trained on whole, and the original test file is held out. Another file of the same
    layout keeps a tenth of its own rows out of training, as `ftis_node.tasks.jsonl` does.
    """

    names = ("gsm8k",)
    has_files = True

    def _load(self) -> Task:
        path = self.data or cached(TRAIN, cache_dir() / "gsm8k-train.jsonl")
        digest, train, _ = read_rows(path, _LAYOUT)
        test = self.eval_data
        if digest == TRAIN.sha256:
            test = test or _test_file(path)
        else:
            train, held_out = split(path, train)
        if test is not None:
            held_out = read_rows(test, _LAYOUT)[1]
        return Task.by_rule(self.name, train, held_out, digest, "integer")

    def _test(self) -> Task:
        path = self.data or cached(TEST, cache_dir() / "gsm8k-test.jsonl", fix=LOCAL_COPY)
        digest, rows, _ = read_rows(path, _LAYOUT)
        return Task.by_rule(self.name, (), rows, digest, "integer")

    def _check(self) -> Task | None:
        if self.download() is None:
            return self._load()
        for path in self.files:
            read_rows(path, _LAYOUT)
        return None

    def foreseen(self) -> tuple[str | None, str | None]:
        if self.data is None:
            return TRAIN.sha256, self.rule
        return sha256_of(self.data), self.rule

    def download(self) -> tuple[int, str] | None:
        train = self.data or cache_dir() / "gsm8k-train.jsonl"
        whole = sha256_of(train) == TRAIN.sha256
        missing = []
        if self.data is None and not whole:
            missing.append(TRAIN)
        tested = [_beside(train), cache_dir() / "gsm8k-test.jsonl"]
        wanted = self.eval_data is None and (whole or self.data is None)
        if wanted and not any(sha256_of(path) == TEST.sha256 for path in tested):
            missing.append(TEST)
        if not missing:
            return None
        return sum(one.size for one in missing), missing[0].url


def _beside(train: Path) -> Path:
    return train.with_name(train.name.replace("train", "test"))


def _test_file(train: Path) -> Path:
    """The original test file: beside the training file where it lies there, else from the cache or the source."""
    beside = _beside(train)
    if sha256_of(beside) == TEST.sha256:
        return beside
    return cached(TEST, cache_dir() / "gsm8k-test.jsonl")


_LAYOUT = Layout(gold_answer, "a solution that ends in #### and an integer")
