"""The page: shown to its owner only, under its own name only, never acting; and its curves stay small."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import socket
import stat
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ftis_node.condition import State
from ftis_node.errors import UserError
from ftis_node.observe import history as history_module
from ftis_node.observe.history import POINTS, TEACHERS, History
from ftis_node.observe.metrics import MetricsLog
from ftis_node.observe.recent import KEPT, SHOWN, Recent, Shown
from ftis_node.observe.web import Route, Web, json_route, link, read_token
from ftis_node.page import start_page
from ftis_node.settings import Settings
from ftis_node.store.home import Home
from ftis_node.worker.client import WorkerDied
from tests.daemons import Daemon, run_cli
from tests.test_web_doors import opens

TOKEN = "t" * 43
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\x00\ud800"


@pytest.fixture
async def page() -> AsyncIterator[Web]:
    async def answer() -> dict[str, Any]:
        return {"agent": HOSTILE, "loss": math.nan, "nested": [(math.inf, 1)]}

    async def fail() -> dict[str, Any]:
        raise RuntimeError("a secret of the inside")

    async def metrics(request: web.BaseRequest) -> web.Response:
        return web.Response(text="up 1\n")

    routes = [json_route("/api/status", answer), json_route("/broken", fail)]
    server = Web(TOKEN, [*routes, Route("/metrics", metrics, open=True), Route("/closed", metrics)])
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


@pytest.fixture
async def browser() -> AsyncIterator[aiohttp.ClientSession]:
    """It keeps cookies, also of an address in digits."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# --- the token ----------------------------------------------------------------------------------------------------


def test_a_homes_token_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    first = read_token(tmp_path / "page.token")
    assert len(first) == 43, "32 random bytes"
    assert read_token(tmp_path / "page.token") == first
    assert stat.S_IMODE((tmp_path / "page.token").stat().st_mode) == 0o600
    assert read_token(tmp_path / "other.token") != first


def test_an_empty_or_open_token_file_is_mended(tmp_path: Path) -> None:
    (tmp_path / "page.token").write_text("")
    token = read_token(tmp_path / "page.token")
    (tmp_path / "page.token").chmod(0o644)
    assert read_token(tmp_path / "page.token") == token and len(token) == 43
    assert stat.S_IMODE((tmp_path / "page.token").stat().st_mode) == 0o600


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/api/status", "/closed", "/nothing"])
async def test_without_the_token_nothing_is_shown_but_how_to_get_it(
    page: Web, browser: aiohttp.ClientSession, path: str
) -> None:
    for headers in ({}, bearer("wrong"), bearer(""), {"Authorization": TOKEN}, {"Cookie": f"{page._cookie}=wrong"}):
        async with browser.get(page.address.rstrip("/") + path, headers=headers) as response:
            assert response.status == 401
            assert response.content_type == "text/plain"
            assert "ftis-node page" in await response.text()


async def test_the_link_becomes_a_cookie_that_no_script_and_no_other_site_can_use(
    page: Web, browser: aiohttp.ClientSession
) -> None:
    async with browser.get(link(page.address, TOKEN), allow_redirects=False) as response:
        assert response.status == 200, "a redirect after a click elsewhere would be followed without the cookie"
        assert '<meta http-equiv="refresh" content="0; url=/">' in await response.text()
        cookie = response.headers["Set-Cookie"]
    assert {"HttpOnly", "Path=/", "SameSite=Strict"} <= set(cookie.split("; "))
    async with browser.get(page.address) as response:
        assert response.status == 200 and response.content_type == "text/html"
        assert TOKEN not in await response.text()


async def test_a_wrong_link_gives_no_cookie(page: Web, browser: aiohttp.ClientSession) -> None:
    for wrong in ("", "x", TOKEN[:-1], "ü" * 43):
        async with browser.get(link(page.address, wrong), allow_redirects=False) as response:
            assert response.status == 401 and "Set-Cookie" not in response.headers


async def test_a_route_may_be_open_and_no_other_is(page: Web, browser: aiohttp.ClientSession) -> None:
    async with browser.get(f"{page.address}metrics") as response:
        assert (response.status, await response.text()) == (200, "up 1\n")
    async with browser.get(f"{page.address}closed", headers=bearer()) as response:
        assert response.status == 200


# --- names, methods, headers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "10.0.0.1:{port}"]
)
async def test_under_another_name_it_answers_nobody(page: Web, browser: aiohttp.ClientSession, host: str) -> None:
    port = page.address.split(":")[-1].rstrip("/")
    for path in ("", "metrics"):
        headers = bearer() | {"Host": host.format(port=port)}
        async with browser.get(page.address + path, headers=headers) as response:
            assert response.status == 403


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
async def test_under_its_own_names_it_answers(page: Web, browser: aiohttp.ClientSession, host: str) -> None:
    headers = bearer() | {"Host": host.format(port=page.address.split(":")[-1].rstrip("/"))}
    async with browser.get(page.address, headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_it_is_to_be_looked_at_only(page: Web, browser: aiohttp.ClientSession, method: str) -> None:
    async with browser.request(method, f"{page.address}api/status", headers=bearer()) as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


async def test_head_answers_without_a_body(page: Web, browser: aiohttp.ClientSession) -> None:
    async with browser.head(page.address, headers=bearer()) as response:
        assert response.status == 200 and await response.read() == b""


@pytest.mark.parametrize(
    ("path", "status"), [("", 200), ("page.js", 200), ("api/status", 200), ("nothing", 404), ("broken", 500)]
)
async def test_every_answer_forbids_what_a_browser_should_not_do(
    page: Web, browser: aiohttp.ClientSession, path: str, status: int
) -> None:
    async with browser.get(page.address + path, headers=bearer()) as response:
        assert response.status == status
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in response.headers
        assert "secret" not in await response.text()


async def test_what_the_browser_has_is_not_sent_again(page: Web, browser: aiohttp.ClientSession) -> None:
    for path in ("page.css", "api/status"):
        async with browser.get(page.address + path, headers=bearer()) as response:
            tag = response.headers["ETag"]
        async with browser.get(page.address + path, headers=bearer() | {"If-None-Match": tag}) as response:
            assert response.status == 304 and await response.read() == b""


async def test_hostile_text_comes_as_a_string_of_json_and_as_nothing_else(
    page: Web, browser: aiohttp.ClientSession
) -> None:
    async with browser.get(f"{page.address}api/status", headers=bearer()) as response:
        assert response.content_type == "application/json"
        body = await response.text()
    assert "<" not in body and body.isascii()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    told = json.loads(body, parse_constant=refuse)
    assert told == {"agent": HOSTILE, "loss": None, "nested": [[None, 1]]}


async def test_the_page_needs_nothing_from_elsewhere(page: Web, browser: aiohttp.ClientSession) -> None:
    for path in ("", "page.js", "charts.js", "swarm.js", "dom.js", "page.css", "icon.svg"):
        async with browser.get(page.address + path, headers=bearer()) as response:
            assert response.status == 200
            text = (await response.text()).replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, path


# --- what the page knows ------------------------------------------------------------------------------------------


def test_the_page_has_a_shape_and_a_colour_for_every_state() -> None:
    files = resources.files("ftis_node.observe").joinpath("page")
    script, style = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    [marks] = re.findall(r"const MARKS = \{(.*?)\};", script, re.DOTALL)
    assert sorted(re.findall(r'"?([A-Z-]+)"?:', marks)) == sorted(State)
    tones = {state: re.findall(rf"\.state\.{state.lower()}\b[^{{]*\{{ color: var\(--(\w+)\)", style) for state in State}
    assert all(len(found) == 1 for found in tones.values()), tones
    assert tones["DEGRADED"] == ["alert"]


async def test_a_port_that_is_taken_is_told_with_what_to_do() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError) as caught:
            await Web(TOKEN, []).start("127.0.0.1", port)
    assert str(port) in caught.value.what and "http_port" in caught.value.fix and "page=false" in caught.value.fix


# --- the curves ---------------------------------------------------------------------------------------------------


def step(number: int, **facts: Any) -> dict[str, Any]:
    """What the daemon writes of a step, as far as the curves need it."""
    foreign = {"samples": 10.0, "tokens": 100.0, "excess": -5.0, "filtered_fraction": 0.5, "loss_share": 0.25}
    figures = {"samples": 10.0, "loss_weight": 3.0, "negatives": 4.0, "filtered": 1.0}
    return {
        "step": number,
        "own_reward": 0.5,
        "foreign_reward": number / 1000,
        "bytes_in": 1000 * number,
        "bytes_out": 10 * number,
        "seconds": {"wait": 1.0, "train": 2.0, "total": 6.0},
        "diagnostics": {
            "overall": {"loss_weight": 6.0},
            "foreign": foreign,
            "sources": {"own": figures, "peer": figures},
        },
    } | facts


def written(path: Path, steps: range) -> None:
    with path.open("a") as file:
        for number in steps:
            file.write(json.dumps({"time": 1e9 + number, "event": "step", **step(number)}) + "\n")


def test_a_step_becomes_a_point_of_every_curve(tmp_path: Path) -> None:
    history = History(tmp_path / "metrics.jsonl")
    assert not history.follow(), "there is no log yet"
    written(tmp_path / "metrics.jsonl", range(1, 3))
    assert history.follow() and not history.follow()
    steps = history.facts()["steps"]
    assert steps["step"] == [1, 2] and steps["foreign_reward"] == [0.001, 0.002]
    assert (steps["generate"], steps["wait"], steps["train"]) == ([3.0, 3.0], [1.0, 1.0], [2.0, 2.0])
    assert steps["importance"] == [0.95, 0.95] and steps["filtered"] == [0.5, 0.5]
    assert steps["in_rate"] == [None, 1000.0], "bytes a second, from the second step on"
    assert history.facts()["teachers"]["peer"] == {
        "samples": 20.0,
        "loss_weight": 6.0,
        "negatives": 8.0,
        "filtered": 2.0,
    }


def test_however_many_steps_the_points_stay_few_and_their_means_right(tmp_path: Path) -> None:
    history = History(tmp_path / "metrics.jsonl")
    for begin in range(0, 3000, 700):
        written(tmp_path / "metrics.jsonl", range(begin + 1, begin + 701))
        history.follow()
        facts = history.facts()
        assert POINTS / 2 <= len(facts["steps"]["step"]) <= POINTS
        assert facts["steps"]["step"][-1] == begin + 700, "the latest step is always there"
        assert set(facts["steps"]["own_reward"]) == {0.5}
    first = facts["steps"]["foreign_reward"][0]
    assert facts["joined"] == 8 and first == pytest.approx(sum(range(1, 9)) / 8000)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = History(path)
    written(path, range(1, 4))
    history.follow()
    line = path.read_bytes().index(b"\n") + 1
    with path.open("r+b") as file:
        file.write(b"x" * (line - 1))  # were it read again, a point would be missing
    written(path, range(4, 5))
    history.follow()
    assert history.facts()["steps"]["step"] == [1, 2, 3, 4]


@pytest.mark.parametrize("parts", [1, 3])
def test_another_log_in_its_place_is_read_from_its_beginning(tmp_path: Path, parts: int) -> None:
    path = tmp_path / "metrics.jsonl"
    history = History(path)
    for number in range(1, parts):
        written(tmp_path / f"metrics-{number:08d}.jsonl", range(number, number + 1))
    written(path, range(parts, 6))
    history.follow()
    for file in tmp_path.iterdir():
        file.rename(tmp_path / f"old-{file.name}")  # or the next might have its inode
    written(path, range(1, 3))
    assert history.follow() and history.facts()["steps"]["step"] == [1, 2]


def test_of_many_authors_those_with_least_of_the_loss_are_counted_together(tmp_path: Path) -> None:
    figures = {name: 1.0 for name in ("samples", "negatives", "filtered")}
    sources = {f"peer {number}": figures | {"loss_weight": float(number)} for number in range(TEACHERS + 10)}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for name, facts in {"own": figures | {"loss_weight": 0.0}, **sources}.items():
            line = step(1) | {"diagnostics": {"sources": {name: facts}}}
            file.write(json.dumps({"time": 1e9, "event": "step", **line}) + "\n")
    history = History(tmp_path / "metrics.jsonl")
    history.follow()
    told = history.facts()["teachers"]
    assert len(told) <= TEACHERS + 1 and "own" in told and f"peer {TEACHERS + 9}" in told and "peer 0" not in told
    assert sum(one["samples"] for one in told.values()) == TEACHERS + 11, "nobody's are lost"


def test_a_log_in_parts_is_followed_across_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log, histories = MetricsLog(path, 1 << 20, part_bytes=1000), [History(path)]
    for number in range(1, 41):
        log.write("step", **step(number))
        if number % 9 == 0:  # some of which are several parts behind
            histories.append(History(path))
        for history in histories[:: 1 + number % 3]:
            history.follow()
    log.close()
    for history in [*histories, History(path)]:
        history.follow()
        assert history.facts()["steps"]["step"] == list(range(1, 41))
        assert not history.follow()


def test_a_long_log_in_parts_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "WHOLE", 1 << 17)
    monkeypatch.setattr(history_module, "WINDOWS", 16)
    log = MetricsLog(tmp_path / "metrics.jsonl", 1 << 30, part_bytes=100_000)
    for number in range(1, 2001):
        log.write("step", padding="x" * 500, **step(number))
    log.close()
    history = History(tmp_path / "metrics.jsonl")
    history.follow()
    steps = history.facts()["steps"]["step"]
    assert steps[0] == 1 and steps[-1] == 2000 and 100 < len(steps) < 1000
    assert steps == sorted(set(steps)) and max(b - a for a, b in itertools.pairwise(steps)) < 250


def test_half_a_line_waits_for_its_other_half_and_rubbish_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = json.dumps({"time": 1.0, "event": "evaluation", "step": 0, "pass_at_1": 0.5}).encode() + b"\n"
    history = History(path)
    path.write_bytes(b'rubbish\n[1]\n{"event": "step"}\n\xff\n' + line[:30])
    assert not history.follow()
    with path.open("ab") as file:
        file.write(line[30:])
    assert history.follow()
    assert history.facts()["evaluations"]["pass_at_1"] == [0.5]


def test_a_step_without_finite_numbers_leaves_a_gap_and_no_wreck(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write("step", **step(1, own_reward=math.nan, foreign_reward=None, diagnostics={}, skipped="no finite loss"))
    log.close()
    history = History(tmp_path / "metrics.jsonl")
    history.follow()
    steps = history.facts()["steps"]
    assert (steps["own_reward"], steps["foreign_reward"], steps["importance"]) == ([None], [None], [None])


def test_a_restart_from_an_older_checkpoint_takes_back_what_became_void(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for number in range(1, 6):
        log.write("step", **step(number))
    log.write("started", step=3)
    log.write("step", **step(4, own_reward=1.0, bytes_in=7))
    log.close()
    history = History(tmp_path / "metrics.jsonl")
    history.follow()
    steps = history.facts()["steps"]
    assert steps["step"] == [1, 2, 3, 4] and steps["own_reward"][-1] == 1.0
    assert steps["in_rate"][-1] >= 0, "a new process counts bytes from nothing"


def test_a_log_that_was_there_already_is_read_in_part_if_it_is_very_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "WHOLE", 1 << 20)
    monkeypatch.setattr(history_module, "WINDOWS", 64)
    path = tmp_path / "metrics.jsonl"
    padding, count = "x" * 500, 2400
    with path.open("w") as file:
        for number in range(1, count + 1):
            file.write(json.dumps({"time": 1e9 + number, "event": "step", "padding": padding, **step(number)}) + "\n")
    history = History(path)
    history.follow()
    assert history.version < 0.7 * count, "a part of it"
    steps = history.facts()["steps"]["step"]
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert steps[0] < count / 50 and steps[-1] == count and 0 < min(gaps) <= max(gaps) < count / 50


# --- the texts ----------------------------------------------------------------------------------------------------


def shown(number: int, author: str | None) -> Shown:
    packed = {"ids": bytes(4 * 40), "lengths": [2] * 20, "finished": [True] * 20}
    return Shown.of(number, author, 7, [1.0] * 20, packed)


def test_of_the_latest_groups_a_few_are_kept_own_and_foreign_apart() -> None:
    recent = Recent()
    recent.add([shown(1, "peer"), shown(1, None)])
    for number in range(2, 10):
        recent.add([shown(number, None)])
    groups = recent.groups()
    assert [(group.step, group.author) for group in groups] == [(9, None), (8, None), (7, None), (6, None), (1, "peer")]
    assert recent.step == 9 and len([group for group in groups if group.author is None]) == KEPT
    assert {(len(group.lengths), len(group.ids)) for group in groups} == {(SHOWN, 8 * SHOWN)}


class Reader:
    """A compute process that reads texts, or is gone."""

    def __init__(self) -> None:
        self.asked = 0
        self.gone = False

    async def call(self, op: str, **args: Any) -> dict[str, Any]:
        if self.gone:
            raise WorkerDied("gone")
        self.asked += len(args["groups"])
        return {
            "groups": [
                {"question": HOSTILE, "answer": "7", "completions": [HOSTILE] * len(group["lengths"])}
                for group in args["groups"]
            ]
        }


async def test_each_group_is_read_once_and_known_texts_outlive_the_compute_process(
    tmp_path: Path, browser: aiohttp.ClientSession
) -> None:
    home, reader = Home(tmp_path), Reader()
    stepper: Any = SimpleNamespace(recent=Recent(), worker=reader)
    found: list[Any] = [None]
    page = await start_page(home, Settings(), lambda: {"state": "LOADING"}, dict, lambda: found[0])
    assert page is not None
    headers = bearer(read_token(home.page_token))

    async def told(what: str) -> Any:
        async with browser.get(f"{page.address}api/{what}", headers=headers) as response:
            assert response.status == 200
            return await response.json()

    try:
        assert await told("status") == {"state": "LOADING"}
        assert await told("completions") == {"step": 0, "groups": []}
        assert (await told("history"))["steps"] == {}
        found[0] = stepper
        stepper.recent.add([shown(1, None), shown(1, "peer")])
        first = await told("completions")
        assert await told("completions") == first and reader.asked == 2
        assert [group["author"] for group in first["groups"]] == [None, "peer"]
        assert first["groups"][0]["completions"][0] == {"text": HOSTILE, "reward": 1.0, "tokens": 2, "finished": True}
        reader.gone = True
        stepper.recent.add([shown(2, None)])
        assert (await told("completions"))["groups"] == first["groups"]
    finally:
        await page.close()


async def test_who_wants_no_page_gets_none(tmp_path: Path) -> None:
    assert await start_page(Home(tmp_path), Settings(page=False), dict, dict, lambda: None) is None
    assert not (tmp_path / "page.token").exists()


@pytest.mark.slow
async def test_a_daemon_serves_its_page_before_and_while_it_trains(
    tmp_path: Path, browser: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\nprintf %s "$1" > {tmp_path}/opened\n')
    program.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{program} %s")
    daemon = Daemon(tmp_path / "home", "--model", "tiny-a").start()
    try:
        await asyncio.to_thread(daemon.wait, lambda status: status["state"] == "LOADING" and status["page"], "a page")
        told = await asyncio.to_thread(run_cli, "page", "--json", "--home", str(daemon.home.path))
        found = json.loads(told.stdout)
        assert found["page"].startswith(daemon.status()["page"]) and not found["opened"]
        told = await asyncio.to_thread(run_cli, "page", "--open", "--json", "--home", str(daemon.home.path))
        assert json.loads(told.stdout)["opened"]
        invited = (tmp_path / "opened").read_text()
        assert read_token(daemon.home.page_token) not in invited, "all can read a browser's command line"
        assert (await opens(invited))[0] == 200 and (await opens(invited))[0] == 401
        await asyncio.to_thread(daemon.wait, lambda status: status.get("step", 0) >= 2, "two steps")
        async with browser.get(found["page"]) as response:
            assert response.status == 200 and "ftis-node" in await response.text()
        answers = {}
        for what in ("status", "peers", "history", "completions"):
            async with browser.get(f"{daemon.status()['page']}api/{what}") as response:
                answers[what] = await response.json()
        assert answers["status"]["state"] == "ALONE" and answers["peers"] == {"peers": [], "left_out": []}
        assert answers["history"]["steps"]["step"][:1] == [1] and answers["history"]["evaluations"]["step"] == [0]
        groups = answers["completions"]["groups"]
        assert groups and all("<answer>" in one["text"] or one["reward"] < 1 for one in groups[0]["completions"])
        assert read_token(daemon.home.page_token) not in daemon.log(), "the log may be shown to others"
        assert daemon.status()["page"] in daemon.log()
        assert await asyncio.to_thread(daemon.stop) == 0
    finally:
        daemon.clean_up()
