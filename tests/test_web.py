"""The page: shown to its owner only, under its own name only, and never acting."""

import json
import math
import re
import stat
from collections.abc import AsyncIterator
from importlib import resources
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import ClientSession

from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.node.condition import State
from ftis_node.node.dashboard import SHOWN, Dashboard
from ftis_node.node.step_batch import Recent, StepBatch
from ftis_node.observe.api import link, read_token
from ftis_node.observe.web import Route, Web
from ftis_node.store.home import Home
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.pool import Scored
from ftis_node.worker.client import WorkerDied
from ftis_node.worker.messages import GroupText
from tests.support.daemons import run_cli
from tests.support.served import opens, taken_port

TOKEN = "t" * 43
PEER = b"a peer of 38 bytes".ljust(38)
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\x00\ud800"


@pytest.fixture
async def page() -> AsyncIterator[Web]:
    async def answer():
        return {"agent": HOSTILE, "loss": math.nan, "nested": [(math.inf, 1)]}

    async def fail():
        raise RuntimeError("a secret of the inside")

    async def metrics():
        return b"up 1\n"

    routes = [Route("/api/status", answer), Route("/broken", fail)]
    server = Web(TOKEN, [*routes, Route("/metrics", metrics, open=True), Route("/closed", metrics)])
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


async def test_row_29_who_asks_the_open_metrics_often_makes_the_node_work_once_a_second(monkeypatch, browser):
    made = []

    async def count():
        made.append(len(made))
        return b"%d" % len(made)

    server = Web(TOKEN, [Route("/metrics", count, open=True), Route("/closed", count)])
    await server.start("127.0.0.1", 0)
    try:
        for _ in range(20):
            async with browser.get(f"{server.address}metrics") as answer:
                assert await answer.read() == b"1"
        monkeypatch.setattr("ftis_node.observe.web.OPEN_SECONDS", 0.0)
        async with browser.get(f"{server.address}metrics") as answer:
            assert await answer.read() == b"2"
        for number in (b"3", b"4"):
            async with browser.get(f"{server.address}closed", headers=bearer()) as answer:
                assert await answer.read() == number, "the owner's are made for each question"
    finally:
        await server.close()


@pytest.fixture
async def browser() -> AsyncIterator[ClientSession]:
    """It keeps cookies, also of an address in digits."""
    async with ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


def bearer(token=TOKEN):
    return {"Authorization": f"Bearer {token}"}


# --- the token ----------------------------------------------------------------------------------------------------


def test_a_homes_token_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    first = read_token(tmp_path / "page.token")
    assert len(first) == 43, "32 random bytes"
    assert read_token(tmp_path / "page.token") == first
    assert stat.S_IMODE((tmp_path / "page.token").stat().st_mode) == 0o600
    (tmp_path / "page.token").chmod(0o644)
    (tmp_path / "other.token").write_text("")
    assert len(read_token(tmp_path / "other.token")) == 43
    assert read_token(tmp_path / "other.token") != first
    assert read_token(tmp_path / "page.token") == first, "an open one is mended, and an empty one"
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/api/status", "/closed", "/nothing"])
async def test_without_the_token_only_how_to_get_it_is_shown(page, browser, path):
    _, cookie = await opens(link(page.address, TOKEN))
    for headers in (
        {},
        bearer("wrong"),
        bearer(""),
        {"Authorization": TOKEN},
        {"Cookie": f"{cookie}wrong"},
    ):
        async with browser.get(page.address.rstrip("/") + path, headers=headers) as response:
            assert response.status == 401
            assert response.content_type == "text/plain"
            assert "ftis-node page" in await response.text()


@pytest.mark.parametrize("path", ["", "watch.html"])
async def test_the_link_becomes_a_cookie_for_this_site_alone(page, browser, path):
    async with browser.get(link(page.address + path, TOKEN), allow_redirects=False) as response:
        assert response.status == 200, "a redirect after a click elsewhere would be followed without the cookie"
        assert f'<meta http-equiv="refresh" content="0; url=/{path}">' in await response.text()
        cookie = response.headers["Set-Cookie"]
    assert {"HttpOnly", "Path=/", "SameSite=Strict"} <= set(cookie.split("; "))
    async with browser.get(page.address + path) as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        assert TOKEN not in await response.text()


async def test_a_wrong_link_gives_no_cookie(page, browser):
    for wrong in ("", "x", TOKEN[:-1], "ü" * 43):
        async with browser.get(link(page.address, wrong), allow_redirects=False) as response:
            assert response.status == 401
            assert "Set-Cookie" not in response.headers


async def test_a_route_may_be_open_and_no_other_is(page, browser):
    async with browser.get(f"{page.address}metrics") as response:
        assert response.status == 200
        assert await response.text() == "up 1\n"
    async with browser.get(f"{page.address}closed", headers=bearer()) as response:
        assert response.status == 200


# --- names, methods, headers --------------------------------------------------------------------------------------


HOSTS = dict.fromkeys(("evil.example", "evil.example:{}", "127.0.0.1", "127.0.0.1:1", "", "10.0.0.1:{}"), 403)
HOSTS |= dict.fromkeys(("127.0.0.1:{}", "localhost:{}", "LOCALHOST:{}", "[::1]:{}"), 200)


@pytest.mark.parametrize(("host", "status"), HOSTS.items())
async def test_it_answers_under_its_own_names_only(page, browser, host, status):
    for path in ("", "metrics"):
        headers = bearer() | {"Host": host.format(page.address.split(":")[-1].rstrip("/"))}
        async with browser.get(page.address + path, headers=headers) as response:
            assert response.status == status


async def test_it_is_to_be_looked_at_only_and_head_answers_without_a_body(page, browser):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        async with browser.request(method, f"{page.address}api/status", headers=bearer()) as response:
            assert response.status == 405
            assert response.headers["Allow"] == "GET, HEAD"
    async with browser.head(page.address, headers=bearer()) as response:
        assert response.status == 200
        assert await response.read() == b""


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("", 200),
        ("api/status", 200),
        ("nothing", 404),
        ("broken", 500),
    ],
)
async def test_every_answer_has_its_safety_headers(page, browser, path, status):
    async with browser.get(page.address + path, headers=bearer()) as response:
        assert response.status == status
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in response.headers
        assert "secret" not in await response.text()


async def test_hostile_text_comes_as_a_string_of_json_and_as_nothing_else(page, browser):
    async with browser.get(f"{page.address}api/status", headers=bearer()) as response:
        assert response.content_type == "application/json"
        body = await response.text()
    assert "<" not in body
    assert body.isascii()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(body, parse_constant=refuse) == {"agent": HOSTILE, "loss": None, "nested": [[None, 1]]}


async def test_the_page_needs_nothing_from_elsewhere(page, browser):
    for path in ("", "page.js", "charts.js", "swarm.js", "dom.js", "page.css", "icon.svg"):
        async with browser.get(page.address + path, headers=bearer()) as response:
            assert response.status == 200
            text = (await response.text()).replace("http://www.w3.org/2000/svg", "")
        for foreign in ("://", "innerHTML", "insertAdjacentHTML"):
            assert foreign not in text, path


# --- what the page knows ------------------------------------------------------------------------------------------


def test_the_page_has_a_shape_and_a_colour_for_every_state():
    files = resources.files("ftis_node.observe").joinpath("page")
    script, style = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    [marks] = re.findall(r"const MARKS = \{(.*?)\};", script, re.DOTALL)
    assert sorted(re.findall(r'"?([A-Z-]+)"?:', marks)) == sorted(State)
    tones = {state: re.findall(rf"\.state\.{state.lower()}\b[^{{]*\{{ color: var\(--(\w+)\)", style) for state in State}
    assert all(len(found) == 1 for found in tones.values()), tones
    assert tones["DEGRADED"] == ["alert"]


async def test_a_port_that_is_taken_is_told_with_what_to_do():
    with taken_port() as port, pytest.raises(UserError) as caught:
        await Web(TOKEN, []).start("127.0.0.1", port)
    assert str(port) in caught.value.what
    assert "http_port" in caught.value.fix
    assert "page=false" in caught.value.fix


# --- the texts ----------------------------------------------------------------------------------------------------


def batch(own, foreign):
    """So many own groups, and others of one peer."""
    packet = SimpleNamespace(lengths=(2,) * 20, finished=(True,) * 20)
    group = SimpleNamespace(author=PEER, row=7, data=b"", packet=packet)
    scored = Scored(group, (1.0,) * 20, 0.0)
    return StepBatch([scored] * own, [scored] * foreign)


def test_of_the_latest_groups_a_few_are_kept_own_and_foreign_apart():
    recent = Recent()
    recent.add(1, batch(1, 1))
    for number in range(2, 10):
        recent.add(number, batch(1, 0))
    groups = recent.groups()
    assert [group.step for group in groups] == [9, 8, 7, 6, 1]
    assert [group.author for group in groups] == [None] * 4 + [peer_id(PEER)]
    assert recent.step == 9


class Reader:
    """A compute process that reads texts, or is gone."""

    def __init__(self):
        self.asked = 0
        self.gone = False

    async def call(self, request):
        if self.gone:
            raise WorkerDied("gone")
        self.asked += len(request.groups)
        return [GroupText(HOSTILE, "7", [HOSTILE] * group.completions) for group in request.groups]


async def test_each_group_is_read_once_and_texts_outlive_the_process(tmp_path, browser):
    home = Home(tmp_path)
    reader = Reader()
    stepper = SimpleNamespace(recent=Recent(), means=SimpleNamespace(worker=reader))
    node = SimpleNamespace(
        home=home,
        row=lambda: {"state": "LOADING"},
        peers=dict,
        components=None,
        overview=None,
    )
    page = Dashboard(node)
    await page.show(Settings())
    headers = bearer(read_token(home.page_token))

    async def told(what):
        async with browser.get(f"{page.address}api/{what}", headers=headers) as response:
            assert response.status == 200
            return await response.json()

    try:
        assert await told("status") == {"state": "LOADING"}
        assert await told("completions") == {"step": 0, "groups": []}
        assert (await told("history"))["steps"] == {}
        node.components = SimpleNamespace(stepper=stepper)
        stepper.recent.add(1, batch(1, 1))
        first = await told("completions")
        assert await told("completions") == first
        assert reader.asked == 2
        assert [group["author"] for group in first["groups"]] == [None, peer_id(PEER)]
        read = {
            "text": HOSTILE,
            "reward": 1.0,
            "tokens": 2,
            "finished": True,
            "columns": {},
        }
        assert first["groups"][0]["completions"] == [read] * SHOWN
        reader.gone = True
        stepper.recent.add(2, batch(1, 0))
        assert (await told("completions"))["groups"] == first["groups"]
    finally:
        await page.close()


async def test_who_wants_no_page_gets_none(tmp_path):
    node = SimpleNamespace(home=Home(tmp_path))
    page = Dashboard(node)
    await page.show(Settings(page=False))
    assert page.address is None
    assert page.invitation() == {"link": None}
    assert not (tmp_path / "page.token").exists()


@pytest.mark.slow
async def test_a_daemon_serves_its_page_before_and_while_it_trains(tmp_path, browser, join, monkeypatch):
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\nprintf %s "$1" > {tmp_path}/opened\n')
    program.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{program} %s")
    daemon = join("home", "--model", "tiny-a")
    address = daemon.wait(lambda status: status["state"] == "LOADING" and status["page"], "a page")["page"]
    token = read_token(daemon.home.page_token)

    def page(*more):
        return json.loads(run_cli("page", "--json", "--home", str(daemon.home.path), *more).stdout)

    found = page()
    assert found["page"].startswith(address)
    assert not found["opened"]
    assert page("--open")["opened"]
    invited = (tmp_path / "opened").read_text()
    assert token not in invited, "all can read a browser's command line"
    assert (await opens(invited))[0] == 200
    assert (await opens(invited))[0] == 401
    daemon.reaches(2, "two steps")
    async with browser.get(found["page"]) as response:
        assert response.status == 200
        assert "ftis-node" in await response.text()
    answers = {}
    for what in ("status", "peers", "history", "completions"):
        async with browser.get(f"{address}api/{what}") as response:
            answers[what] = await response.json()
    assert answers["status"]["state"] == "ALONE"
    assert answers["peers"] == {"peers": [], "left_out": [], "observers": [], "names": {}}
    assert answers["history"]["steps"]["step"][0] == 1
    assert answers["history"]["evaluations"]["step"] == [0]
    for completion in answers["completions"]["groups"][0]["completions"]:
        assert "<answer>" in completion["text"] or completion["reward"] < 1
    assert token not in daemon.log(), "the log may be shown to others"
    assert address in daemon.log()
