"""Every mistake that a person can make: one sentence what, one what to do, the right exit code, no traceback."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import Daemon, run_cli

DEAD = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKAFkdZjAMAKaNHMycURaoRJDkJLfz2N7GFb4fDUZPfWV"


@pytest.fixture(scope="module")
def run_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("run") / "run.toml"
    made = run_cli("run", "new", "-o", str(path))
    assert made.returncode == 0, made.stderr
    return path.read_text()


def refused(home: Path, *flags: str, code: int, what: str, fix: str) -> None:
    """The command ends with `code` and exactly two sentences' worth of stderr, holding `what` and `fix`."""
    ended = run_cli("join", "--home", str(home), "--host", "127.0.0.1", *flags)
    report = [line for line in ended.stderr.splitlines() if line.startswith(("error:", "       "))]
    assert ended.returncode == code, ended.stderr
    assert len(report) == 2, ended.stderr
    assert re.search(what, report[0]), report
    assert re.search(fix, report[1]), report
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


BEFORE_ANYTHING_STARTS = {
    "an unknown model": (("--model", "tiny-q"), "no model 'tiny-q'", "tiny-a"),
    "a folder without a model": (("--model", "{tmp}"), "holds no model", "save_pretrained"),
    "an unknown setting": (("--set", "lerning_rate=1"), "lerning_rate", "learning_rate"),
    "a setting without a value": (("--set", "wait"), "no value", "KEY=VALUE"),
    "a value out of range": (("--own-share", "3"), "own_share.*flags", "valid value"),
    "a settings file that is missing": (("--settings", "{tmp}/none.toml"), "cannot be read", "path"),
    "a malformed peer address": (("--peers", "localhost:4001"), "not a multiaddr", "ip4"),
    "a peer address without a peer": (("--peers", "/ip4/127.0.0.1/tcp/4001"), "/p2p/ID", "ftis-node id"),
    "a peer id that is none": (("--peers", "/ip4/127.0.0.1/tcp/4001/p2p/QmFoo"), "peer", "ftis-node id"),
    "a run file that is missing": (("--run", "{tmp}/none.toml"), "cannot be read", "path"),
}


@pytest.mark.parametrize("mistake", BEFORE_ANYTHING_STARTS)
def test_before_anything_starts(mistake: str, tmp_path: Path) -> None:
    flags, what, fix = BEFORE_ANYTHING_STARTS[mistake]
    refused(tmp_path / "home", *(flag.format(tmp=tmp_path) for flag in flags), code=2, what=what, fix=fix)


def test_a_run_file_with_an_unknown_key_names_the_nearest(tmp_path: Path, run_text: str) -> None:
    (tmp_path / "run.toml").write_text(run_text.replace("temperature =", "temprature ="))
    refused(tmp_path / "h", "--run", str(tmp_path / "run.toml"), code=2, what="temprature", fix="temperature")


def test_peers_that_nobody_answers_at(tmp_path: Path) -> None:
    refused(
        *(tmp_path / "h", "--peers", DEAD, "--set", "patience=1"), code=1, what="None of the peers", fix="--run FILE"
    )


def test_a_model_of_another_tokenizer(tmp_path: Path, run_text: str) -> None:
    other = re.sub(r'tokenizer = "[0-9a-f]{64}"', f'tokenizer = "{"0" * 64}"', run_text)
    (tmp_path / "run.toml").write_text(other)
    refused(tmp_path / "h", "--run", str(tmp_path / "run.toml"), code=2, what="tokenizer", fix="family")


def test_data_that_is_not_the_runs(tmp_path: Path, run_text: str) -> None:
    other = re.sub(r'data = "[0-9a-f]{64}"', f'data = "{"0" * 64}"', run_text)
    (tmp_path / "run.toml").write_text(other)
    refused(tmp_path / "h", "--run", str(tmp_path / "run.toml"), code=2, what="not the run's", fix="same file")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "Cannot read|cannot be read"),
        ("", "empty|no rows|fewer"),
        ('{"question": "1+1", "answer": "2"}\nnot json\n', "line 2"),
        ('{"question": "1+1"}\n{"question": "1+2", "answer": "3"}\n', "line 1"),
    ],
    ids=["missing", "empty", "malformed", "without an answer"],
)
def test_a_data_file(content: str | None, what: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    refused(tmp_path / "h", "--task", str(path), code=2, what=what, fix=".")


def test_a_model_on_the_hub_without_a_network(tmp_path: Path) -> None:
    refused(tmp_path / "h", "--model", "qwen2.5-3b", code=1, what="cannot be loaded", fix="--model FOLDER")


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused(tmp_path / "h", "--port", port, code=1, what=f"port {port}", fix="--port")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "home", "--model", "tiny-a").start()
    daemon.address()
    yield daemon
    daemon.clean_up()


def test_a_home_in_use_loses_nothing(running: Daemon, tmp_path: Path) -> None:
    step = running.wait(lambda s: s.get("step", 0) >= 1, "a step")["step"]
    refused(running.home.path, "--model", "tiny-a", code=1, what="Another ftis-node daemon", fix="ftis-node stop")
    running.wait(lambda s: s["step"] > step, "the first daemon goes on")
    other_run = tmp_path / "other.toml"
    run_cli("run", "new", "--group", "5", "-o", str(other_run))
    assert running.stop() == 0
    refused(running.home.path, "--run", str(other_run), code=2, what="belongs to run", fix="another --home")
    refused(running.home.path, "--model", "tiny-b", code=2, what="another model", fix="first start")


@pytest.mark.parametrize("command", ["status", "peers", "stop"])
def test_asking_a_daemon_that_does_not_run(command: str, tmp_path: Path) -> None:
    ended = run_cli(command, "--home", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "No ftis-node daemon is running" in ended.stderr and "ftis-node join" in ended.stderr


def test_a_demo_does_not_overwrite_what_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("three years of work")
    ended = run_cli("demo", "--output", str(tmp_path))
    assert ended.returncode == 2 and "not a demo's" in ended.stderr
    assert (tmp_path / "thesis.txt").read_text() == "three years of work"


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--temperature", "0"), "temperature"),
        (("--completion-tokens", "1000000"), "packets"),
        (("-o", "{tmp}/none/run.toml"), "cannot be written"),
        (("--task", "poetry"), "no task"),
    ],
)
def test_a_run_that_cannot_be_made(flags: tuple[str, ...], what: str, tmp_path: Path) -> None:
    chosen = ("-o", str(tmp_path / "run.toml")) if "-o" not in flags else ()
    ended = run_cli("run", "new", *chosen, *(flag.format(tmp=tmp_path) for flag in flags))
    assert ended.returncode == 2 and what in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr and len(ended.stderr.strip().splitlines()) == 2
    assert not (tmp_path / "run.toml").exists()


def test_wrong_flags_are_wrong_usage() -> None:
    assert run_cli("join", "--no-such-flag").returncode == 2
    assert run_cli("no-such-command").returncode == 2
