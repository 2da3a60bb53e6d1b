"""Observers: they see the whole swarm as it claims to be, and take nothing from anybody."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
from msgspec.msgpack import encode

from ftis_node.cli.watch import swarm_lines
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.node.observer import EXPORTED, Observer
from ftis_node.node.options import JoinOptions
from ftis_node.observe.api import link, read_token
from ftis_node.observe.prometheus import swarm_exposition
from ftis_node.observe.web import Route, Web
from ftis_node.packet import packet_digest
from ftis_node.store.home import Home
from ftis_node.swarm import ftis_pb2, self_report
from ftis_node.swarm.chronicle import HISTORY_ROWS, LEAVING, NODES_MAX, Chronicle, Trend, read_chronicle
from ftis_node.swarm.handshake import greeting, shake
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.invitation import invite
from ftis_node.swarm.overview import Overview
from ftis_node.swarm.roster import Roster
from ftis_node.swarm.self_report import FENCE, REPORTS_TOLD, SelfReports
from tests.support.browser import Browser, missing
from tests.support.clock import Clock
from tests.support.documented import exposed, metrics
from tests.support.looking import SCRIPT
from tests.support.swarm import (
    OTHER_RUN,
    PATIENCE,
    RUN,
    Member,
    eventually,
    identity,
    make_run,
    member,
    once,
    packet,
    transport,
)
from tests.support.talkers import NOW, entry, made_by, report, sent
from tests.support.watched import WatchedSimulation, watched_eight

ANN, BEN, CARA, EVE = (identity(number) for number in range(1, 5))


@pytest.fixture
def clocks(monkeypatch) -> Clock:
    """The boot clock in hand; the wall clock goes with it."""
    boot = Clock()
    for module in ("self_report", "overview"):
        monkeypatch.setattr(f"ftis_node.swarm.{module}.boot_seconds", boot)
        monkeypatch.setattr(f"ftis_node.swarm.{module}.unix_seconds", lambda: NOW + boot.now - 1000.0)
    return boot


def reports(who=BEN, *, observing=False, tells=True):
    made = SelfReports(
        who,
        Chronicle(RUN.id, NOW),
        lambda: report(who, int(self_report.unix_seconds()), step=7),
        lambda author: author != EVE.author,
        observing=observing,
    )
    made.telling = tells
    return made


# --- self-reports -----------------------------------------------------------------------------------------------------


def test_a_node_takes_a_report_from_its_author_only_and_an_observer_from_whoever_has_it(clocks):
    for observing in (False, True):
        books = reports(observing=observing)
        books.hear([sent(ANN)], CARA.author)
        assert (ANN.author in books.chronicle.nodes) == observing
        books.hear([sent(ANN, NOW + 1)], ANN.author)
        assert ANN.author in books.chronicle.nodes
    assert reports().news({}, observer=False), "its own it tells anybody"


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("forged", encode(report(ANN).signed_by(CARA))),
        ("changed", encode(msgspec.structs.replace(report(ANN).signed_by(ANN), step=9))),
        ("of another run", encode(report(ANN, run_id=OTHER_RUN.id).signed_by(ANN))),
        ("too old", sent(ANN, NOW - int(FENCE) - 1)),
        ("of the future", sent(ANN, NOW + int(FENCE) + 1)),
        ("of the reader itself", sent(BEN)),
        ("of one who is not welcome", sent(EVE)),
        ("nonsense", b"\xc1"),
    ],
)
def test_a_report_is_left_out_that_is(what, data, clocks):
    books = reports(observing=True)
    books.hear([data, sent(CARA)], CARA.author)
    assert set(books.chronicle.nodes) == {CARA.author}, what


def test_an_older_report_does_not_replace_a_newer_one(clocks):
    books = reports(observing=True)
    books.hear([sent(ANN, NOW, step=5)], CARA.author)
    books.hear([sent(ANN, NOW - 60, step=4)], EVE.author)
    assert books.chronicle.nodes[ANN.author].step == 5


def test_each_peer_is_told_each_report_once_and_others_reports_only_observers(clocks):
    books = reports()
    books.hear([sent(ANN)], ANN.author)
    cara = {}
    assert books.news(cara, observer=False).keys() == {BEN.author}
    assert books.news(cara, observer=False) == {}
    assert books.news({}, observer=True).keys() == {ANN.author, BEN.author}
    clocks.now += 61.0
    assert books.news(cara, observer=False), "a minute later there is a new one"
    clocks.now += 3600.0
    assert len(books.news({}, observer=True)) == 1, "Ann has been silent for an hour"


def test_who_does_not_tell_of_itself_sends_nothing(clocks):
    assert reports(tells=False).news({}, observer=True) == {}


def test_a_flood_of_identities_through_one_peer_evicts_itself(clocks):
    books = reports(observing=True)
    nodes = books.chronicle.nodes
    books.hear([sent(ANN)], CARA.author)
    for number in range(100, 100 + NODES_MAX + 64):
        clocks.now += 0.2
        books.hear([sent(identity(number))], EVE.author)
    assert NODES_MAX - LEAVING <= len(nodes) <= NODES_MAX
    assert ANN.author in nodes
    many = [sent(identity(2000 + number)) for number in range(REPORTS_TOLD + 9)]
    books.hear(many, CARA.author)
    assert sum(seen.first_sender == CARA.author for seen in nodes.values()) == 1 + REPORTS_TOLD, "no more of a message"


def test_row_74_thousands_of_made_up_authors_cost_a_bounded_look():
    book = Chronicle(RUN.id, NOW)
    asked = []
    for number in range(2048):
        author = number.to_bytes(38, "big")
        book.of(author, author, NOW + number / 1000, lambda one: bool(asked.append(one)))
    assert len(book.nodes) <= NODES_MAX
    assert len(asked) < 20 * 2048


def test_free_identities_that_tell_of_themselves_displace_nobody_who_was_there_or_has_a_record(clocks):
    """In an open run everybody may tell, so a flood needs no one to pass it on."""
    books = reports()
    books.spares = lambda author: author == CARA.author
    nodes = books.chronicle.nodes
    books.hear([sent(ANN)], ANN.author)
    for number in range(NODES_MAX + 64):
        clocks.now += 0.2
        one = identity(100 + number)
        books.hear([sent(one)], one.author)
        if number == NODES_MAX:
            books.hear([sent(CARA)], CARA.author)
    assert NODES_MAX - LEAVING <= len(nodes) <= NODES_MAX
    assert {ANN.author, CARA.author} < nodes.keys()
    told = {}
    sizes = [len(books.news(told, observer=True)) for _ in range(NODES_MAX)]
    assert max(sizes) == REPORTS_TOLD
    assert len(told) == len(nodes) + 1, "itself, too"
    clocks.now += 600.0
    dana = identity(5)
    books.hear([sent(dana, NOW + 700)], dana.author)
    assert dana.author in nodes, "those that fell silent make room"


# --- the overview -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swarm() -> WatchedSimulation:
    """Eight nodes, of which two say nothing of themselves, and an observer, in memory."""
    return watched_eight()


def test_an_observer_sees_everybody_and_what_they_claim(swarm):
    nodes = {node.id: node for node in swarm.facts.nodes if node.present}
    assert set(nodes) == {peer_id(author) for author in swarm.nodes}
    assert sum(node.claims is not None for node in nodes.values()) == 6
    for author, one in swarm.nodes.items():
        seen = nodes[peer_id(author)]
        progress = one.stepper.progress
        assert seen.groups > 0
        assert 0 < seen.step <= progress.step
        assert seen.success is not None
        if seen.claims is not None:
            assert 0 <= seen.claims["foreign_used"] <= sum(progress.foreign_groups_used.values())
            assert seen.reported < 120.0
    assert sum(len(node.claims["teachers"]) for node in nodes.values() if node.claims) > 8
    assert len(swarm.facts.history) >= 5


def test_an_observer_takes_nobodys_place(swarm):
    own = swarm.observer.membership.identity.peer_id
    for node in swarm.nodes.values():
        assert own not in {peer_id(peer) for peer in node.swarm.membership.active_view}
        assert own not in node.stepper.progress.foreign_groups_used


def test_what_is_shown_has_no_network_address_in_it(swarm):
    shown = json.dumps(msgspec.to_builtins(swarm.facts))
    assert "/ip4/" not in shown
    assert "/tcp/" not in shown
    for node in swarm.nodes.values():
        for address in node.transport.machine_addresses:
            assert address.split("/")[2] not in shown


def test_metrics_are_of_present_nodes_by_peer_id(swarm):
    body = swarm_exposition(msgspec.to_builtins(swarm.facts))
    assert exposed(body) == metrics("An observer's")
    text = body.decode()
    assert "ftis_swarm_nodes 8.0" in text
    assert text.count("ftis_swarm_node_pass_at_1_claimed{") == 6
    assert "Ada" not in text, "no word of a stranger's"


def test_a_curve_of_days_keeps_its_ends_in_bounded_room():
    curve = Trend(HISTORY_ROWS)
    for minute in range(20_000):
        curve.add(60.0 * minute, minute / 20_000)
    assert len(curve.rows) <= HISTORY_ROWS
    assert curve.rows[0][0] == 0.0
    assert curve.rows[-1][0] > 60.0 * 19_800


@contextlib.asynccontextmanager
async def overview_of(path, file=None):
    async with member(1, path, observing=True, chronicle=read_chronicle(file, RUN), listen=False) as node:
        yield node, Overview(node.swarm, file)


@pytest.mark.virtual_time
async def test_history_goes_on_after_a_restart_and_counts_nothing_twice(tmp_path):
    file = tmp_path / "swarm.history"
    now = int(time.time())
    one = made_by(ANN, 1, 3, issued_at=now - 60)
    later = made_by(ANN, 2, 1, issued_at=now - 600)  # its clock is slow
    for made, groups in (([one], 3), ([one, later], 4)):
        async with overview_of(tmp_path, file) as (node, overview):
            for each in made:
                node.swarm.gossip.table.add(each, each.encode(), age=0.0, first_sender=CARA.author)
            await asyncio.sleep(1.0)
            overview.look()
            overview.save()
            assert overview.facts().nodes[0].groups == groups
    file.write_bytes(b"\xc1")
    async with overview_of(tmp_path, file) as (_, overview):
        assert overview.facts().nodes == []


@pytest.mark.virtual_time
async def test_of_a_time_in_which_the_machine_slept_the_history_says_nothing(tmp_path, clocks):
    async with overview_of(tmp_path) as (_, overview):
        for seconds in (0.0, 60.0, 60.0, 28_800.0, 60.0):
            clocks.now += seconds
            overview.look()
        assert [row[0] for row in overview.book.history.rows] == [NOW + 60, NOW + 120, NOW + 28_980]


# --- over the network -------------------------------------------------------------------------------------------------


@pytest.fixture
async def ann(tmp_path) -> AsyncIterator[Member]:
    async with member(1, tmp_path, unix=time.time) as ann:
        yield ann


@contextlib.asynccontextmanager
async def eve_asks(ann, path, *, observing=False):
    """What a stranger asks, who has greeted her."""
    async with transport(EVE, path / "eve", listen=False) as eve:
        await eve.connect(ann.author, [ann.address])
        hello = greeting(RUN, [])
        hello.observer = observing
        assert not (await shake(eve, ann.author, hello)).refusal
        yield eve


@pytest.mark.virtual_time
async def test_a_hostile_observer_can_push_and_take_nothing(ann, tmp_path):
    [(_, round, _)] = ann.make(1)
    async with eve_asks(ann, tmp_path, observing=True) as eve:
        assert EVE.author not in ann.swarm.membership.active_view
        told = ftis_pb2.ExchangeRequest(entries=[entry(made_by(CARA, 1))], reports=[sent(CARA, int(time.time()))])
        reply = await eve.exchange(ann.author, told, PATIENCE)
        assert not reply.stranger
        assert len(reply.mentions) == 1
        assert not reply.entries
        assert ann.swarm.gossip.table.get(CARA.author, 1) is None
        assert CARA.author not in ann.swarm.chronicle.nodes
        wanted = ftis_pb2.FetchRequest(digests=[packet_digest(packet(ann.author, round, 0))])
        chunks = await eve.fetch(ann.author, once(wanted))
        assert (await anext(chunks)).status == ftis_pb2.FetchChunk.BUSY
        assert not ann.store.served


@pytest.mark.virtual_time
async def test_of_a_strangers_flood_of_reports_one_is_kept_and_none_passed_on_to_peers(ann, tmp_path):
    now = int(time.time())
    own = [sent(EVE, now + number, name=EVIL[:64], step=1) for number in range(300)]
    others = [sent(identity(number), now) for number in range(100, 200)]
    async with eve_asks(ann, tmp_path) as eve:
        for flood in ([bytes(400_000)], [*own, *others], [*others, *own]):
            await eve.exchange(ann.author, ftis_pb2.ExchangeRequest(reports=flood), PATIENCE)
    (seen,) = ann.swarm.chronicle.nodes.values()
    assert seen.report.author == EVE.author
    assert seen.report.at == now
    assert ann.swarm.reports.news({}, observer=False) == {}
    assert len(ann.swarm.reports.news({}, observer=True)) == 1


@pytest.mark.virtual_time
async def test_a_node_that_answers_as_an_observer_is_no_peer(tmp_path):
    async with member(1, tmp_path, observing=True) as ann, member(2, tmp_path, [ann.address]) as ben:
        await eventually(lambda: ann.author in ben.swarm.membership.refused, "Ben's refusal")
        assert not ben.swarm.membership.active_view


LOOKING = Settings(host="127.0.0.1", listen=False, patience=0.0)


async def observed(home, *peers, invitation=None):
    """What an observer has seen after a moment."""
    facts, _ = await Observer(JoinOptions(home, peers=peers, invitation=invitation), LOOKING).run(
        lambda page: None, 0.5
    )
    return facts


async def test_an_observer_serves_and_exports_its_page(ann, tmp_path):
    ann.swarm.reports.describe = lambda: report(ann.identity, int(time.time()), name="<b>Ann</b>", pass_at_1=0.5)
    ann.swarm.reports.telling = True
    ann.make(2)
    home = Home(tmp_path / "home")
    site = tmp_path / "site"
    opened = asyncio.Queue()
    running = asyncio.create_task(
        Observer(JoinOptions(home, peers=(ann.address,)), LOOKING, site).run(opened.put_nowait)
    )
    address = (await opened.get()).address
    token = read_token(home.page_token)
    async with aiohttp.ClientSession() as session:

        async def told(path, **headers):
            async with session.get(address + path, headers=headers) as answer:
                return answer.status, await answer.text()

        nodes = []
        while not nodes or not nodes[0]["groups"] or not nodes[0]["claims"]:
            await asyncio.sleep(0.1)
            nodes = json.loads((await told("swarm.json", Authorization=f"Bearer {token}"))[1])["nodes"]
        [node] = nodes
        assert node["id"] == ann.identity.peer_id
        assert node["groups"] == 2
        assert node["claims"]["name"] == "<b>Ann</b>"
        assert "Who taught whom" in (await told("", Authorization=f"Bearer {token}"))[1]
        assert (await told("swarm.json"))[0] == 401
        assert "ftis_swarm_nodes 1.0" in (await told("metrics"))[1]
    signal.raise_signal(signal.SIGTERM)
    facts, code = await running
    assert code == 0
    assert [node.groups for node in facts.nodes] == [2]
    line = list(swarm_lines(facts))[1]
    assert line.startswith(f"{ann.identity.peer_id}  <b>Ann</b>  step ")
    assert line.endswith(", 2 groups announced, pass@1 0.500")
    texts = {path.name: path.read_text() for path in site.iterdir()}
    assert texts.keys() == {"index.html", "swarm.json", *EXPORTED[1:]}
    assert json.loads(texts["swarm.json"])["nodes"][0]["id"] == ann.identity.peer_id
    assert token not in "".join(texts.values())
    facts = await observed(home, ann.address)
    assert [node.groups for node in facts.nodes] == [2], "kept, and not counted twice"


async def test_an_observer_of_a_private_run_has_to_be_a_member(tmp_path):
    founder = identity(1)
    private = make_run(founder=founder.peer_id)
    roster = Roster(private.id, founder.peer_id, founder, tmp_path / "members", tmp_path / "orders")
    async with member(1, tmp_path, run=private, roster=roster) as ann:
        with pytest.raises(UserError, match="private"):
            await observed(Home(tmp_path / "eve"), ann.address)
        home = Home(tmp_path / "cara")
        ticket = invite(founder, private.id, [ann.address], now=time.time(), seconds=86400, membership=86400)
        facts = await observed(home, invitation=ticket)
        assert facts.private
        assert len(roster.book.issued[founder.author]) == 1
        assert not ann.swarm.membership.active_view
        other = invite(founder, RUN.id, [ann.address], now=time.time(), seconds=86400)
        with pytest.raises(UsageError, match="The invitation is to run"):
            await observed(home, invitation=other)


# --- in a browser -----------------------------------------------------------------------------------------------------

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
async def test_the_page_shows_the_swarm_in_a_browser(swarm, width, dark):
    facts = msgspec.to_builtins(swarm.facts)
    facts["at"] = time.time()
    liar = next(node for node in facts["nodes"] if node["claims"])
    liar["version"] = liar["reach"] = EVIL
    liar["claims"] |= {"name": EVIL, "model": EVIL + 300 * "W", "tokenizer": EVIL}
    liar["claims"]["teachers"] = {EVIL: 5, "nobody": 1 << 52}

    async def answer():
        return facts

    server = Web("t" * 43, [Route("/swarm.json", answer)], "watch.html")
    await server.start("127.0.0.1", 0)

    def look():
        with Browser(width, 900, dark=dark) as browser:
            browser.open(link(server.address, "t" * 43))
            browser.wait("return document.querySelectorAll('.vertex').length === 8")
            assert browser.run("return document.querySelectorAll('.taught').length") > 8
            assert browser.run("return document.querySelectorAll('.nodes tbody tr').length") == 8
            assert browser.run("return document.querySelectorAll('#history .plot > svg').length") == 3
            shown = browser.run("return document.querySelector('#nodes').textContent")
            assert EVIL in shown
            assert "claimed by the node" in shown
            assert browser.run("return window.hacked") is None
            assert browser.run(SCRIPT) == []
            assert browser.errors() == []

    try:
        await asyncio.to_thread(look)
    finally:
        await server.close()
