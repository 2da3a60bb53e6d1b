"""Every mistake that a person can make at the command line: what is wrong, what to do, the right exit code.

And no error without a test: each place in the code that makes a `UserError` is reached by a row of
`tests.support.mistakes`, or a test quotes words of it that no other error has, or it is one of
`tests.support.covered_errors`, which names the tests that reach it without such a quotation.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import ftis_node
from ftis_node.config.run import RunFile, dump_run_file
from ftis_node.errors import UserError
from ftis_node.policy.names import BUILT_IN_DIR
from ftis_node.store.checkpoints import Checkpoints, labelled
from ftis_node.swarm.identity import Identity
from ftis_node.tasks import load_task
from tests.support.cli import Cli
from tests.support.covered_errors import COVERED
from tests.support.daemons import PATIENCE, Join, command, run_cli
from tests.support.mistakes import JOIN, ROWS, Row
from tests.support.ports import taken_port
from tests.support.swarm import RUN

SOURCE = Path(ftis_node.__file__).parent

reached: set[tuple[str, int]] = set()
done: set[str] = set()


@pytest.fixture(scope="module", autouse=True)
def recording() -> Iterator[None]:
    """Where each error of this process was made."""
    before = UserError.__init__

    def made(self: UserError, what: str, fix: str) -> None:
        place = sys._getframe(1)
        path = Path(place.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            reached.add((path.relative_to(SOURCE).as_posix(), place.f_lineno))
        before(self, what, fix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UserError, "__init__", made)
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        yield


@pytest.fixture(scope="module")
def run_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    task = load_task("arithmetic")
    return dump_run_file(RunFile(run=RUN.model_copy(update={"data": task.data, "reward": task.reward})))


def refused(ended: tuple[int, str, str], row: Row) -> None:
    """The exit code is as it should be, stderr ends in two sentences in the form of the house, stdout is empty."""
    code, out, err = ended
    lines = err.splitlines()
    assert code == row.code, err
    assert lines[-2].startswith("error: ") and lines[-1].startswith("       "), err
    told = [line for line in lines if line.startswith("error: ")]
    assert len(told) == 1, err
    assert re.search(row.what, lines[-2]), lines[-2]
    assert re.search(row.fix, lines[-1]), lines[-1]
    assert lines[-2].rstrip()[-1] in ".!?:)…" or row.what in ("cannot be loaded",), lines[-2]
    assert "Traceback" not in err
    if "--dry-run" in row.line and out:  # the plan, as far as it goes; what is wrong with it is told once
        assert out.startswith("Nothing was started") and told[0].removeprefix("error: ") not in out
    else:
        assert out == ""


@pytest.mark.parametrize("mistake", ROWS)
def test_a_mistake(mistake: str, cli: Cli, run_text: str, tmp_path: Path) -> None:
    row = ROWS[mistake]
    _prepare(tmp_path, row, run_text)
    with taken_port() as taken:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        ended = cli(*shlex.split(row.line.format(tmp=tmp_path, taken=taken)))
    refused(ended, row)
    for path, content in before.items():
        assert path.read_bytes() == content, f"{path} was changed"
    done.add(mistake)


def _prepare(tmp: Path, row: Row, run_text: str) -> None:
    for name, content in row.files.items():
        (tmp / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if row.run is not None:
        text = run_text
        for old, new in row.run:
            assert old in text, f"{old!r} is not in\n{text}"
            text = text.replace(old, new.replace("{tokenizer}", _tiny_fingerprint()))
        (tmp / "changed.toml").write_text(text)
        (tmp / "other.toml").write_text(text)
        if "other.toml" in row.line:
            (tmp / "home").mkdir()
            (tmp / "home" / "run.toml").write_text(run_text)
    if "{tmp}/begun" in row.line:
        Identity(b"\1" * 32).keep(tmp / "begun" / "identity.key")
        checkpoints = Checkpoints(tmp / "begun" / "checkpoints")
        facts = {"model": labelled("tiny-a", "lora"), "optimiser": "adamw", "progress": {"step": 7}}
        checkpoints.commit(checkpoints.begin(7), facts)
    if "other.key" in row.line:
        Identity(b"\2" * 32).keep(tmp / "other.key")


def _tiny_fingerprint() -> str:
    from ftis_node.policy.load import load_tokenizer
    from ftis_node.tokenizer.fingerprint import fingerprint

    return fingerprint(load_tokenizer(str(BUILT_IN_DIR / "tiny-a")))


@pytest.mark.parametrize("line", ["fit --model tiny-a", "fit --model tiny-a --json"])
def test_a_gpu_that_is_not_there(line: str, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(cli(*shlex.split(line)), Row(line, "no GPU here", "--vram GB"))
    row = Row(f"{JOIN} --device cuda", "no usable CUDA", "doctor")
    refused(cli(*shlex.split(row.line.format(tmp=tmp_path))), row)
    done.add(line)


def test_a_mistake_that_the_compute_process_finds(cli: Cli, run_text: str, tmp_path: Path) -> None:
    """What is wrong comes through the pipe as it was, exit code and all."""
    (tmp_path / "run.toml").write_text(run_text)
    line = f"join --host 127.0.0.1 --device cpu --home {tmp_path}/home --run {tmp_path}/run.toml"
    refused(cli(*shlex.split(f"{line} --task arithmetic")), Row(line, "tokenizer", "family"))
    refused(cli(*shlex.split(f"{line} --task poetry")), Row(line, "no task 'poetry'", "gsm8k"))
    done.add("the compute process")


def test_a_home_in_use_loses_nothing(join: Join, cli: Cli) -> None:
    running = join("home", "--model", "tiny-a")
    step = running.wait(lambda s: s.get("step", 0) >= 1, "a step")["step"]
    home = running.home.path
    row = Row(f"join --model tiny-a --home {home}", "Another ftis-node daemon", "ftis-node stop", 1)
    refused(cli(*shlex.split(row.line)), row)
    row = Row(f"join --dry-run --model tiny-a --home {home}", "Another ftis-node daemon", "ftis-node stop", 1)
    refused(cli(*shlex.split(row.line)), row)
    running.wait(lambda s: s["step"] > step, "the first daemon goes on")
    assert running.stop() == 0
    row = Row(f"join --host 127.0.0.1 --model tiny-b --home {home}", "another model", "first start")
    refused(cli(*shlex.split(row.line)), row)
    done.add("a home in use")


def test_wrong_flags_are_wrong_usage_and_no_traceback() -> None:
    for line in (["join", "--no-such-flag"], ["no-such-command"]):
        ended = run_cli(*line)
        assert (ended.returncode, ended.stdout) == (2, "") and "Traceback" not in ended.stderr


def test_who_stops_reading_is_no_error() -> None:
    told = subprocess.Popen(command("join", "--help"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert told.stdout is not None and told.stderr is not None
    told.stdout.close()
    assert b"Traceback" not in told.stderr.read()
    told.stderr.close()
    told.wait(PATIENCE)


# --- no error without a test ------------------------------------------------------------------------------------------


LONG = 14  # characters in a row: what a test quotes and only one error says
Site = tuple[str, str]  # the file and the words of an error (gaps are …)


def sites() -> dict[Site, list[ast.Call]]:
    """Every place that makes a UserError: its file and its words → the calls."""
    found: dict[Site, list[ast.Call]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("UserError", "UsageError") and node.args:
                key = path.relative_to(SOURCE).as_posix(), _words(node.args[0])
                found.setdefault(key, []).append(node)
    return found


def _words(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ast.unparse(node)


def pieces(tree: ast.AST) -> set[str]:
    """Every LONG characters in a row of the texts of a program, without its docstrings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in alone)
    return {text[at : at + LONG] for text in texts if isinstance(text, str) for at in range(len(text) - LONG + 1)}


def unquoted(tests: Iterable[str]) -> set[Site]:
    """The errors of whose words the tests quote nothing that no other error says."""
    quoted = set[str]().union(*(pieces(ast.parse(test)) for test in tests))
    said = {site: set[str]().union(*(pieces(call.args[0]) for call in calls)) for site, calls in sites().items()}
    common = Counter(piece for own in said.values() for piece in own)
    return {site for site, own in said.items() if not any(common[piece] == 1 for piece in own & quoted)}


def others() -> dict[str, str]:
    """The files of tests beside this one, which quotes an error only to show that it could be missed."""
    here = Path(__file__)
    return {path.name: path.read_text(encoding="utf-8") for path in here.parent.glob("test_*.py") if path != here}


def test_every_error_is_reached_by_a_test() -> None:
    everything = {*ROWS, "fit --model tiny-a", "the compute process", "a home in use"}
    if not everything <= done:
        pytest.skip("not all rows were run, or not all went well")
    listed = [(file, start) for files in COVERED.values() for file, starts in files.items() for start in starts]
    left = unquoted(others().values())
    missing = []
    for (file, words), calls in sites().items():
        if (file, words) in left and not any(file == at and words.startswith(start) for at, start in listed):
            for call in calls:
                if not any(at == file and call.lineno <= line <= (call.end_lineno or 0) for at, line in reached):
                    missing.append(f"{file}:{call.lineno}: {words}")
    assert not missing, "no row reaches, no test quotes, and no covered_errors.py lists:\n" + "\n".join(missing)


def test_what_is_listed_is_an_error_that_no_test_quotes() -> None:
    left = unquoted(others().values())
    for test, files in COVERED.items():
        assert test in others(), f"there is no {test}"
        for file, starts in files.items():
            for start in starts:
                found = any(at == file and words.startswith(start) for at, words in left)
                assert found, f"{file} has no such error, or a test quotes it: {start}"


def test_an_error_that_is_quoted_no_more_is_found() -> None:
    site = "lab/participant.py", "Node … shares no run with the first node. …"
    assert site not in unquoted(others().values())
    assert site in unquoted(text for name, text in others().items() if name != "test_lab_trial.py")
