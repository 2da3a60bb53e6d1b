"""The log: one event a line whatever a peer says, in text and as JSON; and reading it while it grows and is rotated."""

import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from ftis_node.cli.local import ask_daemon
from ftis_node.errors import UserError
from ftis_node.observe import logs
from ftis_node.observe.logs import EventFormatter, as_object, as_text, last_lines, log_to, read_log
from ftis_node.store.home import Home
from tests.support.cli import printed
from tests.support.daemons import ENVIRONMENT, PATIENCE, command
from tests.support.documented import check

FORGED = "hi\n2026-01-01 00:00:00,000 ERROR forged\r\x1b[2J\x9b1m\u2028\u202e\x00 end"

TEXT = EventFormatter()
JSON = EventFormatter(as_json=True)


def record(message, *args, error=None):
    told = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("ftis_node.node.daemon", logging.WARNING, "node/daemon.py", 1, message, args, told)


def raised(text):
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


@contextmanager
def fresh_process():
    """The root logger as it is there: without pytest's handlers."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    root.handlers[:] = []
    try:
        yield
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)


@pytest.mark.parametrize("formatter", [TEXT, JSON])
def test_no_character_of_a_message_ends_its_line_and_a_level_keeps_its_name(formatter):
    line = formatter.format(record("peer says %s", FORGED))
    assert line.isprintable(), "one line, and nothing that moves a cursor or turns text"
    assert "forged" in line
    assert "end" in line, "nothing is lost"
    renamed = record("hello")
    renamed.levelname = "WARN"  # as hivemind has it from its import on
    assert "WARNING" in formatter.format(renamed)


def test_what_can_be_printed_stays_as_it_is():
    assert TEXT.format(record("ρ → ½ of %d", 3)).endswith(" WARNING ρ → ½ of 3")


def test_no_line_of_a_traceback_passes_for_an_event():
    first, *others = TEXT.format(record("it failed", error=raised(FORGED))).split("\n")
    assert first.endswith("WARNING it failed")
    assert any("forged" in line for line in others)
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    told = json.loads(JSON.format(record("it failed", error=raised("why"))))
    assert told["message"] == "it failed"
    assert told["exception"].endswith("ValueError: why")


@pytest.mark.parametrize("error", [None, raised("why")])
def test_a_json_line_is_as_documented(error):
    before = datetime.now(UTC)
    told = json.loads(JSON.format(record("%s", FORGED, error=error)))
    check(told, "Log")
    assert told["level"] == "WARNING"
    assert told["logger"] == "ftis_node.node.daemon"
    assert told["message"] == FORGED
    when = datetime.fromisoformat(told["time"])
    assert when.utcoffset() is not None
    assert abs((when - before).total_seconds()) < 60


@pytest.mark.parametrize("as_json", [False, True])
def test_logs_go_to_stderr_and_to_the_home(tmp_path, capsys, as_json):
    with fresh_process():
        log_to(tmp_path / "new" / "home", as_json=as_json)
        logging.getLogger("ftis_node.x").info("hello\nthere")
    [line] = Home(tmp_path / "new" / "home").log.read_text().splitlines()
    assert line in capsys.readouterr().err.splitlines()
    assert as_object(line)["message"] == ("hello\nthere" if as_json else "hello\\nthere")


def test_a_home_that_cannot_be_written_still_logs_to_stderr(tmp_path, capsys):
    (tmp_path / "home").write_text("a file")
    with fresh_process():
        log_to(tmp_path / "home")
        logging.getLogger("ftis_node.x").info("hello")
    assert "hello" in capsys.readouterr().err


def test_both_formats_are_read_as_text_and_as_objects():
    one = record("hello %s", "there\n")
    text = TEXT.format(one)
    line = JSON.format(one)
    assert as_object(text)["time"] == as_object(line)["time"], "whatever the time zone"
    assert as_object(text)["level"] == as_object(line)["level"] == "WARNING"
    assert as_text(text) == text
    assert as_text(line).endswith(" WARNING hello there\\n")
    assert as_text(JSON.format(record("it failed", error=raised("why")))).endswith("\n    ValueError: why")
    for odd in ("not a line\x1b[2J", "{}", '{"broken', "[1]", "    a traceback's"):
        assert as_text(odd).isprintable()
        assert isinstance(as_object(odd), dict)


# --- reading ----------------------------------------------------------------------------------------------------------


def rotate(log):
    """As `RotatingFileHandler` does."""
    for number in (1, 0):
        present = log.with_name(f"{log.name}.{number}") if number else log
        if present.exists():
            present.rename(log.with_name(f"{log.name}.{number + 1}"))
    log.touch()


def add(log, text):
    with log.open("a") as file:
        file.write(text)


def ended():
    return False


def test_the_last_lines_come_from_older_files_too(tmp_path):
    log = tmp_path / "node.log"
    for text in ("1\n2\n", "3\n4\n", "5\n"):
        rotate(log)
        add(log, text)
    assert list(read_log(log, 4, ended)) == ["2", "3", "4", "5"]
    assert list(read_log(log, 100, ended)) == ["1", "2", "3", "4", "5"]
    assert list(read_log(log, 0, ended)) == []


def test_a_glance_at_the_end_sees_over_a_rotation(tmp_path):
    log = tmp_path / "node.log"
    assert last_lines(log, 3) == []
    add(log, "".join(f"line {number}\n" for number in range(5000)))
    assert last_lines(log, 3) == ["line 4997", "line 4998", "line 4999"]
    rotate(log)
    add(log, "line 5000\n")
    assert last_lines(log, 3) == ["line 4998", "line 4999", "line 5000"]


def test_what_a_daemon_without_a_terminal_prints_does_not_repeat_its_log_nor_grow_for_ever(tmp_path):
    output = logs.begin_output(tmp_path)
    code = "import sys, logging; from pathlib import Path; from ftis_node.observe.logs import log_to; "
    code += f"log_to(Path({str(tmp_path)!r})); logging.error('told'); print('printed', file=sys.stderr)"
    with output.open("ab") as file:
        subprocess.run([sys.executable, "-c", code], stderr=file, check=True, env=os.environ | ENVIRONMENT)
    assert output.read_text() == "printed\n"
    assert "told" in Home(tmp_path).log.read_text()
    with output.open("ab") as file:
        file.truncate(logs.LOG_BYTES + 1)
    assert logs.begin_output(tmp_path) == output
    assert not output.exists()
    assert (tmp_path / "output.log.1").stat().st_size == logs.LOG_BYTES + 1


@pytest.mark.parametrize("begun", ["2026-11-29 12:00:00,000 INFO It runs.\n", '{"message": "It runs."}\n'])
def test_the_error_that_a_daemon_ended_with_is_told_until_another_runs(begun, tmp_path):
    said = "No ftis-node daemon is running on the home"
    log = Home(tmp_path).log
    assert logs.last_words(tmp_path) == ""
    log.write_text(begun)
    with pytest.raises(UserError, match="full"), logs.noting(tmp_path):
        raise UserError("The disk is full.", "Make room.")
    with pytest.raises(UserError, match=rf"{said} .*\. The last one ended with: The disk is full\. Make room\."):
        ask_daemon(tmp_path, "/status", dict)
    add(log, begun)
    with pytest.raises(UserError, match=rf"{said} [^ ]*\. Start one"):
        ask_daemon(tmp_path, "/status", dict)


def test_what_is_added_is_followed_across_rotations_until_the_daemon_ends(tmp_path):
    log = tmp_path / "node.log"
    add(log, "1\n2\n3")  # the last one is still being written

    def life():
        add(log, "+\n4\n")
        yield True
        add(log, "5\n")
        rotate(log)
        add(log, "6\n")
        yield True
        yield True
        log.write_text("")  # emptied in place, as some do to logs
        yield True
        add(log, "7\n")
        yield False

    alive = life()
    assert list(read_log(log, 1, lambda: next(alive))) == ["2", "3+", "4", "5", "6", "7"]


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_the_command_shows_the_log_of_a_node_that_has_ended(tmp_path, follow):
    written = [TEXT.format(record("line %d", n)) + "\n" for n in range(5)]
    add(tmp_path / "node.log", "".join(written))
    line = ("logs", "--home", tmp_path, "-n", "2", *follow)

    as_text = printed(*line).splitlines()
    assert [shown.split()[-1] for shown in as_text] == ["3", "4"]

    as_json = printed(*line, "--json").splitlines()
    assert [json.loads(shown)["message"] for shown in as_json] == ["line 3", "line 4"]


def test_it_follows_a_running_daemon_until_it_ends_or_ctrl_c(tmp_path):
    """The daemon is one by what `runtime.json` says of it."""
    log = tmp_path / "node.log"
    add(log, "first\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as daemon:
        runtime = {"pid": daemon.pid, "directory": str(tmp_path / "ftis-x"), "children": {}}
        (tmp_path / "runtime.json").write_text(json.dumps(runtime))
        line = command("logs", "-f", "--home", str(tmp_path))
        known = os.environ | ENVIRONMENT
        one, other = (subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=known) for _ in range(2))
        for follower in (one, other):
            assert follower.stdout.readline() == "first\n"
        add(log, "second\n")
        for follower in (one, other):
            assert follower.stdout.readline() == "second\n"
        one.send_signal(signal.SIGINT)
        assert one.wait(PATIENCE) == 130
        add(log, "last\n")
        daemon.communicate(b"\n")
        rest, _ = other.communicate(timeout=PATIENCE)
        assert rest == "last\n"
        assert other.returncode == 0
