"""Who gets in at the page: links that open once, names that it answers to, and no more connections than it can bear."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ftis_node.observe import web as web_module
from ftis_node.observe.api import link
from ftis_node.observe.web import CODE_SECONDS, CONNECTIONS_MAX, GUESTS_MAX, Guests, Names, Route, Web
from tests.support.served import opens

TOKEN = "t" * 43


@pytest.fixture
async def page() -> AsyncIterator[Web]:
    async def metrics():
        return b"up 1\n"

    server = Web(TOKEN, [Route("/metrics", metrics, open=True)])
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


# --- links that open once -----------------------------------------------------------------------------------------


async def test_the_link_of_a_command_line_opens_once_and_never_has_the_token(page):
    invited = page.invite()
    status, cookie = await opens(invited)
    assert status == 200
    assert TOKEN not in invited
    assert TOKEN not in cookie
    assert (await opens(page.address, cookie))[0] == 200
    assert await opens(invited, cookie) == (200, cookie), "the same browser may go back"
    assert (await opens(page.address + "page.js", "x" + cookie))[0] == 401


async def test_who_was_faster_than_the_owners_browser_is_shut_out(page, caplog):
    invited = page.invite()
    _, stolen = await opens(invited)
    assert await opens(invited) == (401, "")
    assert "used twice" in caplog.text
    assert (await opens(page.address, stolen))[0] == 401
    assert (await opens(invited))[0] == 401, "and it opens for nobody later"


async def test_a_browser_that_is_let_in_already_uses_the_link_up(page):
    invited = page.invite()
    _, mine = await opens(link(page.address, TOKEN))
    assert await opens(invited, mine) == (200, mine), "and keeps the cookie that outlives the node"
    assert (await opens(invited))[0] == 401
    stolen_link = page.invite()
    _, stolen = await opens(stolen_link)
    assert await opens(stolen_link, mine) == (200, mine)
    assert (await opens(page.address, stolen))[0] == 401


def test_a_code_is_good_for_half_a_minute_and_few_are_kept():
    now = 100.0
    guests = Guests(lambda: now)
    late = guests.invite()
    good = guests.invite()
    session = guests.enter(good, "", let_in=False)
    now += CODE_SECONDS + 1
    assert guests.enter(late, "", let_in=False) == ""
    assert guests.enter("ü", "", let_in=False) == ""
    assert guests.know(session) and not guests.know(""), "who is in stays in"
    for _ in range(GUESTS_MAX):
        guests.invite()
    assert not guests.know(session)


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "held"),
    [
        ("Node", True),
        ("node:80", True),
        ("[::1]", True),
        ("evil", False),
        ("", False),
    ],
)
def test_at_port_80_a_host_has_no_port(host, held):
    names = frozenset({"node", "[::1]"})
    assert Names(names, 80).hold(host) == held
    assert not Names(names, 8080).hold(host)


@pytest.mark.parametrize("port", [80, 9464])
def test_beyond_loopback_any_address_in_digits_is_its_name(port):
    beyond = Names(frozenset({"node"}), port, any_address=True)
    loopback = Names(frozenset({"node"}), port)
    for address in ("172.18.0.2", "[2001:db8::7]"):
        assert beyond.hold(f"{address}:{port}")
        assert not loopback.hold(f"{address}:{port}")
        assert beyond.hold(address) == (port == 80)
    assert not beyond.hold(f"evil.example:{port}")
    assert not beyond.hold("172.18.0.2:1")


# --- connections --------------------------------------------------------------------------------------------------


async def asked(reader, writer, page):
    host = page.address.removeprefix("http://").rstrip("/")
    writer.write(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return await reader.readexactly(len("up 1\n"))


def sockets():
    """Open sockets of this process."""
    return sum(str(one.readlink()).startswith("socket:") for one in Path("/proc/self/fd").iterdir() if one.is_symlink())


async def connect(page):
    return await asyncio.open_connection("127.0.0.1", int(page.address.split(":")[-1].rstrip("/")))


async def test_idle_connections_take_few_files_and_shut_nobody_out_who_is_in(page):
    mine = await connect(page)
    assert await asked(*mine, page) == b"up 1\n"
    before = sockets()
    idle = [await connect(page) for _ in range(200)]
    refused = [asyncio.create_task(reader.read()) for reader, _ in idle]
    pending = set(refused)
    while len(pending) > CONNECTIONS_MAX - 1:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    assert await asked(*mine, page) == b"up 1\n"
    assert sockets() - before == 200 + CONNECTIONS_MAX - 1, "this process has both ends"
    for _, writer in (*idle, mine):
        writer.close()
    await asyncio.gather(*refused, return_exceptions=True)
    while True:  # once they are gone there is room again
        again = await connect(page)
        try:
            assert await asked(*again, page) == b"up 1\n"
            break
        except (asyncio.IncompleteReadError, ConnectionError):
            continue
        finally:
            again[1].close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: "])
async def test_a_connection_that_asks_nothing_is_closed(sent, monkeypatch):
    monkeypatch.setattr(web_module, "IDLE_SECONDS", 0.05)
    server = Web(TOKEN, [])
    await server.start("127.0.0.1", 0)
    try:
        reader, writer = await connect(server)
        writer.write(sent)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
    finally:
        await server.close()
