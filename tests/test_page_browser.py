"""The page in a real browser: whole at a desk and on a phone, light and dark, and strangers' text stays text."""

import asyncio
import json
import math
from collections.abc import AsyncIterator

import pytest

from ftis_node.observe.api import link
from ftis_node.observe.history import History
from ftis_node.observe.web import Route, Web
from tests.support.browser import Browser, missing
from tests.support.looking import SCRIPT
from tests.support.statuses import LOADING, TRAINING, peer
from tests.support.steps import step

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

TOKEN = "t" * 43
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
LONG = "W" * 300
PEERS = [f"12D3KooW{number:044d}" for number in range(20)]


STATUS = TRAINING | {
    "name": EVIL,
    "pausing": True,
    "finishing": False,
    "model": LONG,
    "reason": f"Training with 20 peers. {EVIL}",
    "advice": f"Run `ftis-node top`. {EVIL}",
    "addresses": [f"/ip4/192.0.2.7/tcp/4001/p2p/{PEERS[-1]}"],
    "uptime": 93784.0,
    "step": 123456,
    "step_seconds": 6.0,
    "peers": 20,
    "own_groups_used": 1234567,
    "foreign_groups_used": {PEERS[0]: 100, PEERS[1]: 10, EVIL: 1},
    "filtered_fraction": math.nan,
    "bytes_in": 123456789012,
    "network": {"reachability": "direct", "p2pd_restarts": 0, "clock": {"behind": -14460.0, "peers": 3}},
    "refused_packets": {EVIL: 3},
}
STANDINGS = ("established", "newcomer", "doubted: its claims look too low", f"banned as an author: {EVIL}")


async def all_peers():
    peers = []
    for number, id in enumerate(PEERS):
        one = peer(id, record=20 + number, mean_reward=0.5, delivered=1, bytes_in=10**number)
        peers.append(one | {"agent": LONG[:64], "standing": STANDINGS[number % 4]})
    peers[0]["agent"] = EVIL
    peers[1]["mean_importance"] = 0.97
    return {
        "peers": peers,
        "left_out": [{"id": PEERS[5], "reason": EVIL + LONG}],
        "names": {PEERS[1]: EVIL[:37], PEERS[2]: LONG},
    }


async def completions():
    one = {
        "reward": 1.0,
        "tokens": 9,
        "finished": True,
        "columns": {EVIL: EVIL, "__proto__": LONG[:256], "n": 0.5},
    }
    texts = [one | {"text": text} for text in (EVIL, LONG, "\u202eabc", "")]
    group = {
        "step": 3,
        "author": None,
        "question": EVIL,
        "answer": EVIL,
        "completions": texts,
    }
    return {"step": 3, "groups": [group, group | {"author": EVIL}]}


@pytest.fixture
async def page(tmp_path) -> AsyncIterator[Web]:
    log = tmp_path / "metrics.jsonl"
    counts = {"own_groups": 8, "foreign_groups": 16, "peers": 2, "pool": 3}
    with log.open("w") as file:
        for number in range(600):
            file.write(json.dumps({"time": 1e9 + number, "event": "step", **step(number), **counts}) + "\n")
            if number % 100 == 0:
                figures = {"pass_at_1": 0.5, "low": 0.4, "high": 0.6}
                file.write(json.dumps({"time": 1e9, "event": "evaluation", "step": number, **figures}) + "\n")
    curves = History(log)
    curves.follow()

    async def history():
        return curves.facts()

    async def now():
        return STATUS

    answers = {
        "status": now,
        "peers": all_peers,
        "history": history,
        "completions": completions,
    }
    server = Web(TOKEN, [Route(f"/api/{name}", answer) for name, answer in answers.items()])
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


async def looked_at(page, look, width=1280, *, dark=False):
    """Opens the page in a thread, for this one serves it."""

    def work():
        with Browser(width, 900, dark=dark) as browser:
            browser.open(link(page.address, TOKEN))
            browser.wait("return document.querySelectorAll('.group').length > 1")
            look(browser)

    await asyncio.to_thread(work)


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (1280, False),
        (1280, True),
        (820, False),
        (360, True),
        (360, False),
    ],
)
async def test_it_is_drawn_whole_at_any_width_and_fits_into_it(page, width, dark):
    def look(browser):
        assert browser.run("return document.querySelectorAll('.plot > svg').length") == 7
        assert browser.run(SCRIPT) == []
        ground = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(json.loads(ground.replace("rgb(", "[").replace(")", "]"))) < 200) == dark
        assert browser.errors() == []

    await looked_at(page, look, width, dark=dark)


async def test_text_of_strangers_is_shown_and_never_run(page):
    def look(browser):
        for place in ("#name", "#reason", "#peers", "#texts-own", "#texts-foreign", "#network"):
            assert EVIL in browser.run("return document.querySelector(arguments[0]).textContent", place), place
        assert f"{EVIL}: {EVIL}" in browser.run("return document.querySelector('#texts-foreign').textContent")
        assert browser.run("return document.querySelectorAll('img, script').length") == 2, "the page's own"
        assert browser.run("return window.hacked") is None
        assert EVIL in browser.run("return document.title")
        assert browser.errors() == []

    await looked_at(page, look)


async def test_what_to_do_is_what_the_node_says(page):
    def look(browser):
        told = browser.run("return document.querySelector('#reason').textContent")
        assert "It pauses after this step." in told
        assert "It ends after" not in told
        assert f"Run ftis-node top. {EVIL}" in told
        assert browser.run("return document.querySelector('.advice code').textContent") == "ftis-node top"

    await looked_at(page, look)


async def test_a_link_that_opens_once_opens_the_page_and_stays_good_for_that_browser(page):
    def work(invited):
        with Browser(1280, 900, dark=False) as browser:
            for _ in range(2):
                browser.open(invited)
                browser.wait("return document.querySelectorAll('.group').length > 1")
                assert browser.run("return location.href") == page.address, "the code is not shown any more"

    await asyncio.to_thread(work, page.invite())


async def test_a_link_that_was_clicked_on_another_site_opens_the_page():
    async def page_with_link():
        return f'<a href="{link(server.address, TOKEN)}">link</a>'.encode()

    server = Web(TOKEN, [Route("/elsewhere", page_with_link, "text/html", open=True)])
    await server.start("127.0.0.1", 0)

    def work():
        with Browser(1280, 900, dark=False) as browser:
            browser.open(server.address.replace("127.0.0.1", "localhost") + "elsewhere")  # to a browser another site
            browser.run("document.querySelector('a').click()")
            browser.wait("return document.getElementById('main') !== null")

    try:
        await asyncio.to_thread(work)
    finally:
        await server.close()


async def test_a_curve_is_read_with_the_keys(page):
    def look(browser):
        browser.run("document.querySelector('.plot').focus()")
        press = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))"
        browser.run(press, "Home")
        told = "return document.querySelector('.tip').textContent"
        assert browser.run(told).startswith("Step 0 · 9 Sept")
        assert "0.50" in browser.run(told)
        browser.run(press, "ArrowRight")
        assert browser.run(told).startswith("Step 100")
        browser.run(press, "Escape")
        assert browser.run("return document.querySelector('.tip').hidden")

    await looked_at(page, look)


async def test_a_node_that_is_gone_is_missed_at_once_and_its_return_seen(page):
    loop = asyncio.get_running_loop()
    port = int(page.address.split(":")[-1].rstrip("/"))

    def look(browser):
        assert browser.run("return document.getElementById('banner').hidden")
        asyncio.run_coroutine_threadsafe(page.close(), loop).result(60)
        browser.wait("return !document.getElementById('banner').hidden")
        assert "does not answer" in browser.run("return document.getElementById('banner').textContent")
        assert "NO ANSWER" in browser.run("return document.getElementById('state').textContent")
        asyncio.run_coroutine_threadsafe(again.start("127.0.0.1", port), loop).result(60)
        browser.wait("return document.getElementById('banner').hidden")
        told = browser.run("return document.body.innerText")
        assert "LOADING" in told
        assert not any(one in told for one in ("none used", "nothing yet", "soon, before"))

    async def now():
        return LOADING

    async def nothing():
        return {}

    others = [Route(f"/api/{name}", nothing) for name in ("peers", "history", "completions")]
    again = Web(TOKEN, [Route("/api/status", now), *others])
    try:
        await looked_at(page, look)
    finally:
        await again.close()
