"""Which addresses are dialled hangs on who named them; and what others sent is never taken for the owner's own word."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from ftis_node.config.run import load_run_file
from ftis_node.errors import UsageError
from ftis_node.node.options import JoinOptions
from ftis_node.node.run_source import agreed, remember_files
from ftis_node.store.home import Home
from ftis_node.swarm.invitation import invite, read_line
from ftis_node.swarm.wire import libp2p
from ftis_node.swarm.wire.transport import Unreachable
from ftis_node.text import called
from tests.support.cli import refused
from tests.support.daemons import run_cli
from tests.support.swarm import Member, identity, make_run, member, transport

EVE = identity(9)


async def watched(inviter: Member, home: Path, name: str = "") -> str:
    """What `ftis-node watch` prints on stderr, with an invitation of this member."""
    made = invite(inviter.identity, inviter.run.id, [inviter.address], now=time.time(), seconds=600, name=name)
    line = ("watch", made.text, "--home", str(home), "--for", "4", "--set", "http_port=0")
    ended = await asyncio.to_thread(run_cli, *line)
    sessions = inviter.swarm.membership.sessions.values()
    assert ended.returncode == 0 and any(one.observer for one in sessions), ended.stderr
    return ended.stderr


async def test_row_62_an_inviter_sends_nobody_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own address, on loopback, is dialled as it is written; what it names there afterwards is not."""
    callers: list[Any] = []
    server = await asyncio.start_server(lambda _, writer: callers.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    inside = ("/ip4/127.0.0.1", "/ip6/::ffff:127.0.0.1", "/dns4/localhost", "/ip6/64:ff9b::7f00:1", "/ip4/0.0.0.0")
    lies = [f"{place}/tcp/{port}/p2p/{identity(100 + n).peer_id}" for n, place in enumerate(inside)]
    async with server, member(1, tmp_path) as inviter:
        monkeypatch.setattr(inviter.swarm.membership, "some_addresses", lambda count, besides: lies)
        told = await watched(inviter, tmp_path / "home", f"Ann ({EVE.peer_id})")
    assert not callers
    assert f"by {inviter.identity.peer_id}." in told and EVE.peer_id not in told, "a name is no id"
    assert f"This invitation names: {inviter.address.partition('/p2p/')[0]}." in told


@pytest.mark.parametrize("place", ["/ip4/169.254.169.254/tcp/443", "/ip4/10.0.0.1/tcp/22", "/dnsaddr/vault.corp"])
def test_row_62_an_invitation_that_names_what_only_an_owner_may_is_refused_before_a_dial(place: str) -> None:
    own = f"/p2p/{EVE.peer_id}"
    honest = invite(EVE, bytes(16), [f"{place}{own}", f"/ip4/10.0.0.1/tcp/4001{own}"], now=0.0, seconds=60)
    assert honest.dial == ("/ip4/10.0.0.1/tcp/4001",)
    hostile = type(honest)(run_id=bytes(16), inviter=EVE.author, issued_at=0, expires=60, dial=(place,))
    with pytest.raises(UsageError, match="only this node's owner"):
        read_line(hostile.signed_by(EVE).text, 1.0)


@pytest.mark.parametrize(("host", "reached"), [("127.0.0.1", True), ("169.254.169.254", False), ("0.0.0.0", False)])
async def test_row_62_a_name_that_leads_to_the_link_or_to_no_host_is_not_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, reached: bool
) -> None:
    async def leads(*_: object, **__: object) -> list[Any]:
        return [(2, 1, 6, "", (host, 0))]

    dialled, knock = list[Any](), libp2p._knock
    async with transport(EVE, tmp_path) as network:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", leads)
        monkeypatch.setattr(network, "knock", lambda place: dialled.append(place) or knock(place))
        with pytest.raises(Unreachable, match="nothing listens" if reached else "no addresses"):
            await network.connect(identity(1).author, [f"/dns4/node.example/tcp/1025/p2p/{identity(1).peer_id}"])
    assert dialled == ([f"/ip4/{host}/tcp/1025"] if reached else [])


def test_row_62_a_name_that_looks_like_an_id_is_not_shown() -> None:
    who = EVE.peer_id
    for name in (who, f"Ann ({who})", who[:12], "１２D3KooW", "Qm" + "a" * 44, "x" * 41):
        assert called(who, {who: name}) == who
    assert called(who, {who: "Ann of 12 D"}) == f"Ann of 12 D ({who})"


async def test_row_64_a_run_that_an_observer_keeps_is_not_the_owners_choice(tmp_path: Path) -> None:
    place, run = Home(tmp_path / "home"), make_run(task="hf:somebody/rows:train", reward="tests")
    line = ("join", "--dry-run", "--device", "cpu", "--model", "tiny-a", "--home", place.path)
    async with member(1, tmp_path, run=run) as inviter:
        await watched(inviter, place.path)
    assert load_run_file(place.run_file).run == run
    assert "downloaded from a hub" in refused(*line).what
    assert "by the rule 'tests'" in refused(*line, "--task", run.task).what
    assert not agreed(place, run.id)
    remember_files(place, JoinOptions(place), run.task, run.id)
    assert agreed(place, run.id) and not agreed(place, bytes(16)), "consent is for one run"
    place.task_files.unlink()
    place.store.touch()
    assert agreed(place, run.id), "a node of an earlier version"
