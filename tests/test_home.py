"""One daemon a home; what a killed daemon left is cleared by the next, and nothing else is touched."""

import fcntl
import json
import os
import pwd
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftis_node.errors import UserError
from ftis_node.host.files import replace_bytes
from ftis_node.preflight.bugreport import pack
from ftis_node.preflight.redaction import Redactor
from ftis_node.store.home import Home
from tests.support.cli import refused

HOLDER = """
import sys
from pathlib import Path
from ftis_node.store.home import Home

home = Home(Path(sys.argv[1]))
home.open()
print(home.make_runtime(), flush=True)
sys.stdin.read()
"""


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path) -> Iterator[Home]:
    made = Home(tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def test_the_home_and_its_runtime_directory_are_private(home):
    home.open()
    directory = home.make_runtime()
    assert mode(home.path) == mode(directory) == 0o700
    assert home.api_socket() == directory / "api.sock"
    assert len(str(directory)) < 60, "a socket's path may have 107 bytes"


def test_files_that_a_killed_process_left_half_written_go(home, sleeper):
    home.orders.mkdir(parents=True)
    sleeper.kill()
    sleeper.wait()
    unfinished = [f"swarm.history.{sleeper.pid}.tmp", f"orders/x.removal.{sleeper.pid}.tmp"]
    spared = [f"port.{os.getpid()}.tmp", "a.tmp"]
    for name in (names := [*unfinished, *spared]):
        (home.path / name).touch()
    home.open()
    left = [name for name in names if (home.path / name).exists()]
    assert left == spared, "those of processes that live, and a person's own, stay"


def test_a_file_that_cannot_be_written_leaves_nothing_beside_it(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            replace_bytes(tmp_path / "swarm.history", b"x" * 100)
        with pytest.raises(UserError, match="cannot be written"):
            pack({"node.log": "x"}, tmp_path / "report.tar.gz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_home_on_a_read_only_file_system_is_called_so(tmp_path):
    script = 'mount -t tmpfs -o ro none "$0" && exec "$1" -m ftis_node join --dry-run --home "$0/home"'
    command = ["unshare", "-rm", "sh", "-c", script, tmp_path, sys.executable]
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", tmp_path]).returncode:
        pytest.skip("no mount namespaces here")
    told = subprocess.run(command, capture_output=True, text=True).stderr
    assert f"{tmp_path} is on a read-only file system" in told, told


def test_no_daemon_is_awaited_on_a_home_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    assert not Home(tmp_path / "file").in_use()


def test_who_asks_whether_a_home_is_in_use_keeps_no_daemon_from_it(home):
    home.path.mkdir()
    with (home.path / "lock").open("w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        home.open()
    assert home.in_use()


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("4001", 4001),
        ("", 0),
        ("x", 0),
        ("70000", 0),
        ("-1", 0),
    ],
)
def test_the_port_of_the_last_start_is_remembered(home, text, port):
    assert home.last_port() == 0
    home.path.mkdir()
    home.port.write_text(text)
    assert home.last_port() == port


def test_commands_name_every_home_but_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Home(tmp_path / ".ftis-node").flag == ""
    assert Home(Path("second node")).flag == f" --home '{tmp_path}/second node'"


@pytest.mark.parametrize("line", ["join --dry-run", "doctor", "bugreport", "task check gsm8k"])
def test_without_a_home_folder_it_is_told(line, cli, monkeypatch):
    def unknown(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    code, _, err = cli(*line.split())
    assert code == 1
    assert "error: HOME is not set, and the system knows no home folder" in err
    assert "HOME=/data" in err
    assert Redactor(None).clean("~/x /root/x") == "~/x /root/x"


def test_closing_frees_the_home_and_leaves_no_socket_behind(home, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(home.path.parent / ("x" * 90)))
    home.open()
    directory = home.make_runtime()
    assert len(str(directory / "p2pclient-0123456789a.sock")) < 107, "the longest that a socket may have"
    home.close()
    assert not directory.exists()
    assert home.runtime() is None
    Home(home.path).open()


def test_an_open_home_is_opened_once_and_not_closed_for_others(home):
    home.open()
    directory = home.make_runtime()
    home.open()
    Home(home.path).close()
    assert directory.exists()
    assert home.api_socket() == directory / "api.sock", "it is cleared before, not after"


def test_kill_nine_of_the_holder_frees_the_home_and_the_next_clears_its_sockets(home):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, home.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    directory = Path(holder.stdout.readline().strip())
    assert directory.is_dir()
    with pytest.raises(UserError):
        home.open()
    holder.kill()
    holder.communicate()
    assert directory.is_dir()
    home.open()
    assert not directory.exists()
    assert home.runtime() is None


@pytest.mark.parametrize("record", ["", "[]", "{", '"x"', '{"directory": 5}', '{"directory": ""}'])
def test_a_damaged_record_is_as_good_as_none(home, record):
    home.path.mkdir()
    (home.path / "runtime.json").write_text(record)
    home.open()
    assert home.runtime() is home.api_socket() is None


def test_only_a_runtime_directory_is_ever_removed(home, tmp_path):
    home.path.mkdir()
    (precious := tmp_path / "thesis").mkdir()
    (home.path / "runtime.json").write_text(json.dumps({"pid": os.getpid(), "directory": str(precious)}))
    home.open()
    home.close()
    assert precious.is_dir()


def test_an_observers_home_has_no_node_to_ask(tmp_path):
    (tmp_path / "run.toml").touch()
    assert "an observer's, which has no node to ask" in refused("status", "--home", tmp_path).what
