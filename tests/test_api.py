"""The local API answers its owner over a unix socket, and asking where nobody answers says what to do."""

import asyncio
import inspect
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import fields
from typer.testing import CliRunner

from ftis_node.cli import _COMMANDS, app
from ftis_node.cli.local import ask_daemon
from ftis_node.errors import UserError
from ftis_node.node.status import status_row
from ftis_node.observe import answers
from ftis_node.observe.answers import Status
from ftis_node.observe.api import ask
from ftis_node.observe.web import Api, Route
from ftis_node.store.home import Home
from ftis_node.swarm.reputation import Reputation
from tests.support.command_lines import root
from tests.support.statuses import LOADING, TRAINING, answered, peer

HEAVY = {"aiohttp", "asyncio", "cryptography", "hivemind", "msgspec", "numpy", "psutil", "rich", "torch"}
HEAVY |= {"ftis_node.config.run", "ftis_node.config.settings", "ftis_node.packet"}  # pydantic is typer's too
ENDING = f"""
import sys
from ftis_node.cli import main
try:
    main()
finally:
    print(*sorted({HEAVY} & {{*sys.modules}}), file=sys.stderr)
"""


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ftis-") as directory:
        yield Path(directory) / "api.sock"


@pytest.fixture
async def stopped(socket_path) -> AsyncIterator[asyncio.Event]:
    event = asyncio.Event()

    async def stop(_):
        event.set()
        return {"stopping": True}

    def fail():
        raise RuntimeError("no worker")

    async with served(socket_path, {"/status": lambda: {"state": "ONLINE", "step": 3}, "/broken": fail}, stop=stop):
        yield event


@asynccontextmanager
async def served(path, reads, **orders):
    api = Api([Route(*read) for read in reads.items()], {f"/{name}": order for name, order in orders.items()})
    await api.start(path)
    yield
    await api.close()


async def test_it_answers_reads_and_actions(socket_path, stopped):
    assert await asyncio.to_thread(ask, socket_path, "/status", dict) == {"state": "ONLINE", "step": 3}
    assert not stopped.is_set()
    assert await asyncio.to_thread(ask, socket_path, "/stop", dict, order={}) == {"stopping": True}
    assert stopped.is_set()


def test_only_its_owner_may_connect(socket_path, stopped):
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600


async def test_reading_never_acts(socket_path, stopped):
    with pytest.raises(UserError, match="405"):
        await asyncio.to_thread(ask, socket_path, "/stop", dict)
    assert not stopped.is_set()


@pytest.mark.parametrize(("route", "status"), [("/nothing", "404"), ("/broken", "500")])
async def test_a_busy_daemon_is_not_dead(socket_path, stopped, route, status):
    with pytest.raises(UserError) as error:
        await asyncio.to_thread(ask, socket_path, route, dict)
    assert status in error.value.what
    assert "node.log" in error.value.fix


async def test_what_another_version_answers_is_read_as_far_as_it_can_be(socket_path):
    told = {
        "state": "ONLINE",
        "later": [1],
        "network": {"reachability": "direct", "later": 2},
    }
    async with served(socket_path, {"/status": lambda: told}):
        assert await asyncio.to_thread(ask, socket_path, "/status", dict) == told, "as it is, for --json"
        status = await asyncio.to_thread(ask, socket_path, "/status", Status)
        assert status.network.p2pd_restarts == 0
        assert status.step is None
        for wrong, where in (
            ({"step": "three"}, "step"),
            ({"state": None}, "state"),
            ({"network": {}}, "reachability"),
        ):
            told |= wrong
            with pytest.raises(UserError, match=f"answer cannot be read: .*{where}") as error:
                await asyncio.to_thread(ask, socket_path, "/status", Status)
            assert "same version" in error.value.fix
            told |= {"step": 3, "state": "ONLINE"}


def test_a_status_has_the_fields_that_a_daemon_writes_in_their_order():
    of_the_peer = {"id", "agent", "addresses", "seconds_since_seen", "used", "bytes_in", "bytes_out"}
    read = {field.name for field in fields(answers.PeerRow)}
    assert read <= peer(addresses=[]).keys()
    assert read - of_the_peer <= Reputation(lambda: 0.0).report(b"").keys()
    row = status_row(answered(**TRAINING), None)
    assert row.keys() >= TRAINING.keys()
    assert row | TRAINING == row | {"plan": None}
    assert status_row(answered(**LOADING), None).keys() >= LOADING.keys()
    assert "step" not in status_row(answered(**LOADING), None)
    assert list(row)[-1] == "own_groups_refused"


@pytest.mark.parametrize(("stalled", "code"), [(False, 0), (True, 1)])
async def test_it_is_well_unless_its_worker_stalls(socket_path, tmp_path, stalled, code):
    told = {
        "state": "DEGRADED",
        "reason": "Something.",
        "advice": "",
        "stalled": stalled,
        "step": 3,
    }
    Home(tmp_path).record_runtime(socket_path.parent)
    async with served(socket_path, {"/status": lambda: told}):
        checked = await asyncio.to_thread(CliRunner().invoke, app, ["health", "--home", str(tmp_path), "--json"])
    assert checked.exit_code == code, "degraded alone is nothing that a restart mends"
    assert json.loads(checked.stdout)["stalled"] is stalled


async def test_peers_are_told_in_lines_that_their_words_cannot_break(socket_path, tmp_path):
    numbers = {
        "accepted": 1,
        "bytes_in": 2_500_000,
        "bytes_out": 0,
        "seconds_since_seen": 61.0,
    }
    less = {
        "id": "B",
        "agent": "ftis-node/1",
        "addresses": [],
        "used": 1,
        "standing": "newcomer",
        "refused": {},
    }
    more = less | {
        "id": "A",
        "agent": "x\n\x1b[2J",
        "addresses": ["/ip4/1.2.3.4/tcp/1"],
        "used": 3,
    }
    told = {"peers": [less | numbers, more | numbers], "left_out": [{"id": "C", "reason": "another\rrun"}]}
    Home(tmp_path).record_runtime(socket_path.parent)
    async with served(socket_path, {"/peers": lambda: told}):
        shown = await asyncio.to_thread(CliRunner().invoke, app, ["peers", "--home", str(tmp_path)])
    lines = shown.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["A", "B", "C"], "who gave most comes first"
    told_of = {"  since this start 1 group accepted, 0 refused; 3 used in all", "  2.50 MB in, 0.00 out"}
    told_of |= {"  last seen 1 min 1 s ago, calls itself x\\n\\x1b[2J", "  /ip4/1.2.3.4/tcp/1"}
    assert told_of <= {*lines}
    assert lines[-1] == "  left out: another\\rrun"


async def test_a_daemon_that_is_starting_is_waited_for(socket_path, tmp_path):
    home = Home(tmp_path)
    home.open()
    home.record_runtime(socket_path.parent)
    asked = asyncio.create_task(asyncio.to_thread(ask_daemon, tmp_path, "/status", dict))
    await asyncio.sleep(0.05)
    async with served(socket_path, {"/status": lambda: {"state": "LOADING"}}):
        assert await asked == {"state": "LOADING"}
    with pytest.raises(UserError, match=r"starting, or ending, and does not answer.*ftis-node logs --home"):
        await asyncio.to_thread(ask_daemon, tmp_path, "/status", dict, starting=0.0)
    home.close()


@pytest.mark.parametrize(
    ("dead", "what"),
    [
        (True, "No ftis-node daemon is running"),
        (False, "did not answer within"),
    ],
)
def test_a_dead_daemons_socket_is_as_none_and_a_silent_one_is_left(socket_path, dead, what):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(socket_path))
        silent.listen()
        if dead:
            silent.close()
        with pytest.raises(UserError, match=what):
            ask(socket_path, "/status", dict, timeout=0.1)


@pytest.mark.parametrize(
    ("needed", "commands"),
    [
        ("", ["--version"]),
        ("rich", ["--help"]),
        ("msgspec", ["status --json", "health", "peers", "page", "set wait=30", "pause", "finish", "logs"]),
        ("msgspec rich", ["status"]),
    ],
)
async def test_commands_import_their_needs(needed, commands, socket_path, tmp_path):
    async def ordered(_):
        return status

    status = status_row(answered(**TRAINING), None) | {"page": "http://127.0.0.1/"}
    reads = [Route("/status", lambda: status), Route("/peers", lambda: {"peers": []})]
    (tmp_path / "node.log").write_text("It began.\n")
    Home(tmp_path).record_runtime(socket_path.parent)
    api = Api(reads, dict.fromkeys(("/pause", "/finish", "/set"), ordered))
    await api.start(socket_path)
    environment = os.environ | {"FTIS_HOME": str(tmp_path)}
    for command in commands:
        words = [sys.executable, "-c", ENDING, *command.split()]
        ended = await asyncio.to_thread(subprocess.run, words, env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr.strip()) == (0, needed), command
    await api.close()


def test_the_help_of_all_commands_says_what_each_says_of_itself():
    for name, says in _COMMANDS.items():
        assert inspect.cleandoc(root().get_command(None, name).help).partition("\n\n")[0].replace("\n", " ") == says


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("node.daemon", {"torch", "scipy", "transformers", "rich"}),
        ("lab.simulation.simulate", {"hivemind.p2p", "hivemind.proto", "rich", "torch", "transformers"}),
        ("worker.messages", {"hivemind.p2p", "rich", "torch", "transformers"}),
    ],
)
def test_a_process_is_without_what_it_never_uses(module, never):
    code = f"import ftis_node.{module}, sys; sys.exit(bool({never} & {{*sys.modules}}))"
    subprocess.run([sys.executable, "-c", code], check=True)
