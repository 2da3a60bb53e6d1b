"""Every mistake that a person can make at the command line: what is wrong, what to do, the right exit code.

And no error without a test: at the end of a run of all tests, `tests.support.reached` names each place in the code that
makes a `UserError` and that none of them reached.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from huggingface_hub import constants

from ftis_node.config.run import RunFile, dump_run_file
from ftis_node.policy.names import BUILT_IN_DIR
from ftis_node.swarm.identity import Identity
from ftis_node.tasks import load_task
from tests.support.begun import begun
from tests.support.daemons import PATIENCE, command, run_cli
from tests.support.mistakes import JOIN, ROWS, Row
from tests.support.reached import noted, sites, unreached, watching
from tests.support.served import taken_port
from tests.support.swarm import RUN


@pytest.fixture(scope="module", autouse=True)
def no_hub() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        yield


@pytest.fixture(scope="module")
def run_text(tmp_path_factory) -> str:
    task = load_task("arithmetic")
    return dump_run_file(RunFile(run=RUN.model_copy(update={"data": task.data, "reward": task.reward})))


def refused(ended, row):
    """The exit code is as it should be, stderr ends in two sentences in the form of the house, stdout is empty."""
    code, out, err = ended
    lines = err.splitlines()
    assert code == row.code, err
    assert lines[-2].startswith("error: "), err
    assert lines[-1].startswith("       "), err
    told = [line for line in lines if line.startswith("error: ")]
    assert len(told) == 1, err
    assert re.search(row.what, lines[-2]), lines[-2]
    assert re.search(row.fix, lines[-1]), lines[-1]
    assert lines[-2].rstrip()[-1] in ".!?:)…" or row.what in ("cannot be loaded",), lines[-2]
    assert "Traceback" not in err
    if "--dry-run" in row.line and out:  # the plan, as far as it goes; what is wrong with it is told once
        assert out.startswith("Nothing was started")
        assert told[0].removeprefix("error: ") not in out
    else:
        assert out == ""


@pytest.mark.parametrize("mistake", ROWS)
def test_a_mistake(mistake, cli, run_text, tmp_path):
    row = ROWS[mistake]
    _prepare(tmp_path, row, run_text)
    with taken_port() as taken:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        ended = cli(*shlex.split(row.line.format(tmp=tmp_path, taken=taken)))
    refused(ended, row)
    for path, content in before.items():
        assert path.read_bytes() == content, f"{path} was changed"


def _prepare(tmp, row, run_text):
    files = {"file": ""} if "{tmp}/file" in row.line else {}
    for name, content in (files | row.files).items():
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
        begun(tmp / "begun", 7, "tiny-a", "full" if "--adapter" in row.line else "lora")


def _tiny_fingerprint():
    from ftis_node.policy.load import load_tokenizer
    from ftis_node.tokenizer.fingerprint import fingerprint

    return fingerprint(load_tokenizer(str(BUILT_IN_DIR / "tiny-a")))


@pytest.mark.parametrize("line", ["fit --model tiny-a", "fit --model tiny-a --json"])
def test_a_gpu_that_is_not_there(line, cli, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(cli(*shlex.split(f"{line} --device cuda")), Row(line, "no GPU here", "--vram GB"))
    code, out, err = cli(*shlex.split(line))
    assert code == 0
    assert "--device cpu" in out
    assert "no GPU here, so this is for the CPU; --vram GB" in err
    row = Row(f"{JOIN} --device cuda", "no usable CUDA", "doctor")
    refused(cli(*shlex.split(row.line.format(tmp=tmp_path))), row)


def test_a_mistake_that_the_compute_process_finds(cli, run_text, tmp_path):
    """What is wrong comes through the pipe as it was, exit code and all."""
    (tmp_path / "run.toml").write_text(run_text)
    line = f"join --host 127.0.0.1 --device cpu --home {tmp_path}/home --run {tmp_path}/run.toml"
    refused(cli(*shlex.split(f"{line} --task arithmetic")), Row(line, "tokenizer", "family"))
    refused(cli(*shlex.split(f"{line} --task poetry")), Row(line, "no task 'poetry'", "gsm8k"))


def test_a_home_in_use_loses_nothing(join, cli):
    running = join("home", "--model", "tiny-a")
    step = running.reaches(1, "a step")["step"]
    home = running.home.path
    row = Row(f"join --model tiny-a --home {home}", "Another ftis-node daemon", "ftis-node stop", 1)
    refused(cli(*shlex.split(row.line)), row)
    row = Row(f"join --dry-run --model tiny-a --home {home}", "Another ftis-node daemon", "ftis-node stop", 1)
    refused(cli(*shlex.split(row.line)), row)
    running.reaches(step + 1, "the first daemon goes on")
    assert running.stop() == 0
    row = Row(f"join --host 127.0.0.1 --model tiny-b --home {home}", "another model", "first start")
    refused(cli(*shlex.split(row.line)), row)


def test_wrong_flags_are_wrong_usage_and_no_traceback():
    for line in (["join", "--no-such-flag"], ["no-such-command"]):
        ended = run_cli(*line)
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert "Traceback" not in ended.stderr


def test_who_stops_reading_is_no_error():
    told = subprocess.Popen(command("join", "--help"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    told.stdout.close()
    assert b"Traceback" not in told.stderr.read()
    told.stderr.close()
    told.wait(PATIENCE)


# --- no error without a test ------------------------------------------------------------------------------------------


def test_an_error_that_no_test_makes_is_found():
    """`tests.support.reached` asks this of the whole product, at the end of a run of all tests."""
    lines = [
        "def f():",
        "    raise UserError(",
        "    'No.', 'Mend it.'",
        "    )",
        "raise UsageError('Never.', 'x')",
    ]

    places = sorted(sites("\n".join(lines), "a.py"), key=lambda place: place[1][0])

    assert [place[:2] for place in places] == [
        ("a.py", range(2, 5)),
        ("a.py", range(5, 6)),
    ]
    assert unreached(places, {("a.py", 3), ("b.py", 5)}) == ["a.py:5: 'Never.'"]
    assert unreached(places, {("a.py", 2), ("a.py", 5)}) == []


def test_another_process_tells_where_it_made_an_error(tmp_path):
    program = [sys.executable, "-c", "from ftis_node.tasks.rewards import check_rule; check_rule('none such')"]
    ended = subprocess.run(program, env=os.environ | {"PYTHONPATH": watching(tmp_path)}, capture_output=True)
    assert ended.returncode
    assert [path for path, _ in noted(tmp_path)] == ["tasks/rewards.py"]
