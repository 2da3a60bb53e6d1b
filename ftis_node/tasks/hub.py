"""Tasks from a hub of datasets: `hf:ORG/NAME[:SPLIT][@REVISION][,QUESTION,ANSWER]`, Parquet or JSONL.

The task's own name has all of these, the revision as a commit; the run has it and the sha256 of the rows. Files are
downloaded by huggingface_hub, which goes on where a download stopped. The two columns are kept in the cache, so that
later starts need no hub.
"""

import functools
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftis_node.errors import UsageError, UserError, first_line
from ftis_node.host.files import cache_dir, free_bytes
from ftis_node.host.proxy import refused_proxy
from ftis_node.installed import NAME, to_install
from ftis_node.tasks.download import put_there
from ftis_node.tasks.gsm8k import gold_answer
from ftis_node.tasks.jsonl import GOLDS, split
from ftis_node.tasks.judge import bare_environment
from ftis_node.tasks.rewards import check_rule, kind_of
from ftis_node.tasks.source import Source
from ftis_node.tasks.task import Example, Task
from ftis_node.text import counted, rounded

HF = "hf:"
"""Prefix of the task's name."""
BYTES_MAX = 2 << 30
ROWS_MAX = 200_000
_NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<split>[\w./-]+))?(?:@(?P<revision>[0-9a-f]{40}))?"
    r"(?:,(?P<question>[\w.-]+),(?P<answer>[\w.-]+))?",
    re.ASCII,
)
_SECONDS = 10.0
_TOLD = 5  # rows that are named
_KINDS = (".parquet", ".jsonl")
_CHILD = Path(__file__).with_name("hub_child.py")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetSplit:
    """Where the rows are. revision: of the dataset, 40 hex digits; None: the newest."""

    repo: str
    split: str = "train"
    revision: str | None = None
    question: str = "question"
    answer: str = "answer"

    @property
    def name(self) -> str:
        """As the run has it, once the revision is known."""
        where = f"{HF}{self.repo}:{self.split}"
        if self.revision:
            where += f"@{self.revision}"
        return f"{where},{self.question},{self.answer}"


def parse(name: str) -> DatasetSplit:
    """Read a task's name. Raises UsageError."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise UsageError(f"{name!a} is no dataset of a hub.", "Write hf:ORG/NAME:SPLIT, as hf:openai/gsm8k:main/train.")
    return DatasetSplit(**{part: value for part, value in found.groupdict().items() if value is not None})


class HubDataset(Source):
    """The task of that name, from the cache or from the hub.

    Rows whose answer is none under the rule are left out, which is the same on every node.
    """

    does = "is downloaded from a hub of datasets"

    @classmethod
    def mine(cls, name: str) -> bool:
        return name.startswith(HF)

    def foreseen(self) -> tuple[str | None, str | None]:
        return None, self.rule

    def download(self) -> tuple[int, str] | None:
        """See `Source.download`; one question to the hub."""
        source = parse(self.name)
        if _kept(source) is not None:
            return None
        source, files = _files(source)
        if _kept(source) is not None:
            return None
        return sum(files.values()), source.name

    def in_run(self, run_task: str | None) -> str:
        """The run's name, if it is the task that a person named, who may have left parts out."""
        named = _NAME.fullmatch(self.name)
        whole = _NAME.fullmatch(run_task or "")
        if named is None or whole is None:
            return self.name
        if all(value in (None, whole[part]) for part, value in named.groupdict().items()):
            return whole[0]
        return self.name

    def with_columns(self, question: str | None, answer: str | None) -> str:
        source = parse(self.name)
        return replace(source, question=question or source.question, answer=answer or source.answer).name

    def _check(self) -> Task | None:
        if self.download() is None:
            return self._load()
        return None

    def _load(self) -> Task:
        check_rule(self.rule)
        source = parse(self.name)
        content = _kept(source)
        if content is None:
            source, files = _files(source)
            content = _kept(source)
        if content is None:
            content = _download(source, files)
        kind = kind_of(self.rule)
        wanted = GOLDS[kind][1]
        pairs = [json.loads(line) for line in content.splitlines()]
        rows, left_out = _examples(pairs, source, functools.partial(_written_plainly, kind))
        if len(left_out) > len(rows):  # only then: the rows of a run that others have do not change
            rows, left_out = _examples(pairs, source, functools.partial(_gold, kind))
        if len(left_out) > len(rows):
            raise UsageError(
                f"Of {len(pairs):,} rows of {source.name}, {len(left_out):,} have an answer that is not {wanted}.",
                "Name another column with --answer, or another rule with --reward.",
            )
        if left_out:
            first = ", ".join(map(str, left_out[:_TOLD])) + ", …" * (len(left_out) > _TOLD)
            left = counted(len(left_out), "row")
            logger.warning("%s of %s left out (row %s): the answer is not %s.", left, source.name, first, wanted)
        train, held_out = split(source.name, tuple(rows))
        return Task.by_rule(source.name, train, held_out, hashlib.sha256(content).hexdigest(), self.rule)


def _examples(
    pairs: Sequence[tuple[str, Any]], source: DatasetSplit, gold_of: Callable[[Any], str | None]
) -> tuple[list[Example], list[int]]:
    """Return the rows with a gold answer, and the numbers of those without."""
    rows = []
    left_out = []
    for number, (question, value) in enumerate(pairs, start=1):
        gold = gold_of(value)
        if gold is None:
            left_out.append(number)
        else:
            rows.append(Example(question, gold, f"Row {number} with a question of {source.name}"))
    return rows, left_out


def _gold(kind: str, value: Any) -> str | None:
    """Return the gold answer of this kind, which may stand alone in a list; None where there is none."""
    if isinstance(value, list) and len(value) == 1 and kind != "tests":
        value = value[0]
    gold = GOLDS[kind][0](value)
    if gold is None and kind == "integer":
        return gold_answer(value)
    return gold


def _written_plainly(kind: str, value: Any) -> str | None:
    """The same, but None for `5.0` in any form, and for a list: most datasets have neither."""
    if isinstance(value, float) or (isinstance(value, list) and kind != "tests"):
        return None
    if kind == "integer" and isinstance(value, str) and "." in value.rpartition("####")[2]:
        return None
    return _gold(kind, value)


def _rows_file(source: DatasetSplit) -> Path:
    return cache_dir() / "hf" / f"{hashlib.sha256(source.name.encode()).hexdigest()[:32]}.jsonl"


def _kept(source: DatasetSplit) -> bytes | None:
    """The rows in the cache, a JSON array [question, answer] a line; None if they are not there."""
    if not source.revision:
        return None
    try:
        return _rows_file(source).read_bytes()
    except OSError:
        return None


def _files(source: DatasetSplit) -> tuple[DatasetSplit, dict[str, int]]:
    """The source with its revision, and its files with their sizes in bytes. Raises UsageError."""
    from huggingface_hub import HfApi, constants

    try:
        api = HfApi(endpoint=constants.ENDPOINT)
        info = api.dataset_info(source.repo, revision=source.revision, files_metadata=True, timeout=_SECONDS)
    except Exception as error:  # as many kinds as there are layers
        raise _refused(source, error) from error
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or () if one.rfilename.endswith(_KINDS)}
    folder, _, start = source.split.rpartition("/")
    chosen = {
        name: size
        for name, size in sizes.items()
        if re.match(rf"{re.escape(start)}(?![A-Za-z0-9])", name.rpartition("/")[2])
        and (not folder or name.rpartition("/")[0] == folder)
    }
    folders = sorted({name.rpartition("/")[0] for name in chosen})
    if len(folders) != 1:
        shown = ", ".join(sorted({_split_of(name) for name in chosen or sizes})[:10]) or "none in Parquet or JSONL"
        what = "no split"
        if folders:
            what = "several splits"
        raise UsageError(f"{source.repo} has {what} of the name {source.split}.", f"Write one of: {shown}.")
    if len({Path(name).suffix for name in chosen}) > 1:
        chosen = {name: size for name, size in chosen.items() if name.endswith(".parquet")}
    total = sum(chosen.values())
    if total > BYTES_MAX:
        raise UsageError(
            f"The files of {source.name} have {rounded(total)}, and {rounded(BYTES_MAX)} are allowed.",
            "Choose a smaller split, or make a .jsonl file of the rows that you want.",
        )
    return replace(source, revision=str(info.sha)), dict(sorted(chosen.items()))


def _split_of(file: str) -> str:
    folder, _, name = file.rpartition("/")
    start = re.split(r"[-.]", name, maxsplit=1)[0]
    if not folder:
        return start
    return f"{folder}/{start}"


def _download(source: DatasetSplit, files: dict[str, int]) -> bytes:
    """The rows of the files, which are kept. Raises UsageError."""
    from huggingface_hub import constants, hf_hub_download

    total = sum(files.values())
    free = free_bytes(Path(constants.HF_HUB_CACHE))
    if total > 0.9 * free:
        raise UsageError(f"{source.name} has {rounded(total)}, and the disk {rounded(free)} left.", "Make room on it.")
    logger.info("Downloading %s, %s in %s.", source.name, rounded(total), counted(len(files), "file"))
    paths = []
    for file in files:
        try:
            where = hf_hub_download(
                source.repo, file, repo_type="dataset", revision=source.revision, endpoint=constants.ENDPOINT
            )
        except Exception as error:  # as above
            raise _refused(source, error) from error
        paths.append(where)
    content = _unpacked(paths, source)
    if not content:
        raise UsageError(f"{source.name} has no rows with a text in {source.question!r}.", "Name another --question.")
    put_there(_rows_file(source), content)
    return content


def _unpacked(paths: Sequence[str], source: DatasetSplit) -> bytes:
    """The JSON of [question, answer] of each row, a line each; a process with limits reads the files.

    Raises:
        UsageError: they cannot be read, or are too large.
    """
    command = [sys.executable, "-P", str(_CHILD), source.question, source.answer, str(ROWS_MAX)]
    folder = _rows_file(source).parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as rows:
        files = [os.path.abspath(path) for path in paths]
        ended = subprocess.run([*command, *files], stdout=rows, stderr=subprocess.PIPE, env=bare_environment(), cwd="/")
        if not ended.returncode:
            rows.seek(0)
            return rows.read()
    try:
        what, fix = json.loads(ended.stderr.splitlines()[-1])
    except (ValueError, IndexError):
        what = "unpacks to more than the process that reads it may have"
        fix = "Choose another dataset."
    if fix[0] == "[":  # an extra
        fix = f"Run: {to_install(f'{NAME}{fix}')}"
    raise UsageError(f"{source.name} {what}.", fix)


def _refused(source: DatasetSplit, error: Exception) -> UserError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    named = f"The dataset {source.repo}"
    if isinstance(error, GatedRepoError):
        return UsageError(
            f"{named} is gated.", "Accept its terms on its page, and log in with `hf auth login` or HF_TOKEN."
        )
    if isinstance(error, RepositoryNotFoundError):
        return UsageError(
            f"{named} does not exist, or is private.", "Check the name; log in with `hf auth login` or HF_TOKEN."
        )
    if isinstance(error, RevisionNotFoundError):
        return UsageError(f"{named} has no revision {source.revision}.", "Leave out @REVISION for the newest.")
    proxy = refused_proxy()
    if proxy is not None:
        return UserError(f"{named} cannot be had: {proxy.what}", proxy.fix)
    return UserError(f"{named} cannot be had: {first_line(error)}.", "Try again: a download goes on where it stopped.")
