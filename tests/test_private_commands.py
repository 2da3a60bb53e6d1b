"""Private runs: the commands of their owners."""

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ftis_node.cli import invitations as invitations_module
from ftis_node.cli.invitations import invitation_in, keep_invitation
from ftis_node.config.run import RunFile, dump_run_file
from ftis_node.config.settings import collect
from ftis_node.host.clocks import unix_seconds
from ftis_node.node.daemon import Node
from ftis_node.node.options import JoinOptions
from ftis_node.preflight.redaction import Redactor
from ftis_node.step_report import Watched
from ftis_node.store.home import Home
from ftis_node.swarm import chronicle
from ftis_node.swarm.certificates import MembersBook, encode
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.roster import Roster
from ftis_node.swarm.self_report import SelfReport
from tests.support.cli import answer, printed, refused
from tests.support.daemons import PATIENCE, run_cli
from tests.support.members import ANN, BEN, CARA, DAY, EVE, FOUNDER, PRIVATE, invitation, lasting, removal
from tests.support.swarm import RUN


@pytest.fixture
def home_of(tmp_path) -> Callable[..., Path]:
    """Makes the home of an identity in a run, with the roster that it would have."""

    def make(who, run=PRIVATE, own=(), members=()):
        home = tmp_path / f"home of {who.peer_id}"
        home.mkdir()
        who.keep(home / "identity.key")
        if run is not None:
            (home / "run.toml").write_text(dump_run_file(RunFile(run=run)))
        book = MembersBook(run_id=PRIVATE.id, founder=FOUNDER.author, own=own)
        for one in (*own, *members):
            book.issued.setdefault(one.issuer, {})[one.member] = one
        (home / "members").write_bytes(msgspec.msgpack.encode(book))
        return home

    return make


HERE = "--address", f"/ip4/127.0.0.1/tcp/1025/p2p/{FOUNDER.peer_id}"


def test_invite_prints_a_line_that_join_reads(home_of, tmp_path, monkeypatch):
    home = home_of(FOUNDER)
    new = Home(tmp_path / "new")

    told = answer("invite", "--home", home, "--name", "Ana", *HERE)

    made = invitation_in(told["invitation"], new)
    assert made.run_id == PRIVATE.id
    assert made.inviter == FOUNDER.author
    assert made.name == "Ana"
    assert made.private is True
    assert told["private"]
    assert told["expires"] == made.expires
    assert made.seconds == 180 * DAY

    file = tmp_path / "line"
    file.write_text(f"\ufeff{made.text}\r\n")
    assert invitation_in(str(file), new) == made

    monkeypatch.setattr("sys.stdin", io.StringIO(made.text + "\n"))
    assert invitation_in("-", new) == made

    assert "█" in printed("invite", "--home", home, "--qr", *HERE)

    keep_invitation(new, made)
    assert (new.path / "invitation").stat().st_mode & 0o777 == 0o600
    assert made.text not in Redactor(None).clean(f"join {made.text} --home x")


def test_an_invitation_to_an_open_run_is_no_ticket(home_of, tmp_path, cli):
    home = home_of(FOUNDER, RUN)
    line = printed("invite", "--home", home, *HERE).strip()
    made = invitation_in(line, Home(tmp_path / "nowhere"))
    assert not made.private
    assert made.run_id == RUN.id
    assert "has no members" in refused("members", "--home", home).what

    of_sums = RUN.model_copy(update={"task": "sums.jsonl"})
    (home / "run.toml").write_text(dump_run_file(RunFile(run=of_sums)))
    _, _, told = cli("invite", "--home", str(home), *HERE)
    assert "they also need sums.jsonl" in told
    assert "join ftis:… --task sums.jsonl --eval-data FILE" in told


def names(home, known):
    """Keeps what nodes call themselves as a daemon on the home would."""
    now = unix_seconds()
    book = chronicle.Chronicle(PRIVATE.id, now)
    for who, name in known.items():
        report = SelfReport(
            run_id=PRIVATE.id,
            author=who.author,
            at=int(now),
            name=name,
        )
        book.nodes[who.author] = chronicle.Seen(now, now, who.author, report=report)
    Home(home).swarm_history.write_bytes(msgspec.msgpack.encode(book))


def test_members_are_listed_with_who_invited_them(home_of, monkeypatch):
    expired = lasting((ANN, BEN), issued_at=1, expires=2)
    home = home_of(FOUNDER, members=lasting((FOUNDER, ANN)) + expired)
    at = ("--home", home)
    rows = {row["id"]: row for row in answer("members", *at)["members"]}
    assert rows[FOUNDER.peer_id]["founder"]
    assert rows[ANN.peer_id]["invited_by"] == FOUNDER.peer_id
    assert rows[ANN.peer_id]["why"] is None
    assert "expired" in rows[BEN.peer_id]["why"]

    text = printed("members", *at)
    for words in ("this node; the founder", "may invite", "no member"):
        assert words in text

    names(home, {ANN: "Ann", BEN: "Ann"})
    text = printed("members", *at)
    for words in (f"Ann ({ANN.peer_id})  until", f"invited by Ann ({ANN.peer_id})"):
        assert words in text
    assert {row["name"] for row in answer("members", *at)["members"]} == {None, "Ann"}

    names(home, {ANN: "Ann", BEN: "Ann", FOUNDER: "Ann"})
    ambiguous = refused("remove", "Ann", *at)
    assert "2 members call themselves 'Ann'" in ambiguous.what, "Ben is no member any more"
    assert FOUNDER.peer_id in ambiguous.fix


def test_a_member_is_removed_by_its_name_once_the_owner_has_said_yes(home_of, monkeypatch):
    home = home_of(FOUNDER, members=lasting((FOUNDER, ANN)))
    names(home, {ANN: "Ann", EVE: "Eve"})
    asked = []
    monkeypatch.setattr("ftis_node.cli.invitations.nobody_to_ask", lambda: False)
    monkeypatch.setattr("typer.confirm", lambda text, **_: asked.append(text))

    told = printed("remove", "Ann", "--home", home)

    assert "That is for good" in told
    assert "--model FOLDER" in told
    [question] = asked
    assert f"Ann ({ANN.peer_id}) for good?" in question
    assert "No member calls itself 'Eve'" in refused("remove", "Eve", "--home", home).what


def test_an_order_to_remove_waits_for_the_daemon_and_one_without_effect_is_told_to_the_owner(
    home_of, monkeypatch, caplog
):
    invited = lasting((ANN, BEN), (FOUNDER, BEN), (ANN, CARA), (FOUNDER, EVE))
    home = home_of(ANN, own=lasting((FOUNDER, ANN)), members=invited)
    at = ("--home", home)
    assert "cannot remove" in refused("remove", EVE.peer_id, *at).what
    assert not list((home / "orders").iterdir())

    assert f"stays a member by {FOUNDER.peer_id}" in printed("remove", BEN.peer_id, *at)
    (home / "orders" / "eve.removal").write_bytes(encode(removal(CARA, EVE)))
    roster = Roster(
        PRIVATE.id,
        FOUNDER.peer_id,
        ANN,
        home / "members",
        home / "orders",
    )
    roster.obey()
    assert "has no effect: only the founder and its inviters" in caplog.text
    assert roster.admits(BEN.author)

    assert answer("remove", CARA.peer_id, "--invitations", *at)["removed"] == CARA.peer_id
    assert roster.admits(CARA.author)
    why = {row["id"]: row["why"] for row in answer("members", *at)["members"]}
    assert why[CARA.peer_id]

    roster.obey()
    assert not roster.admits(CARA.author)
    assert roster.book.voided > 0

    monkeypatch.setattr(invitations_module, "RECORDS_MAX", 1)
    assert "no more removals" in refused("remove", CARA.peer_id, *at).what


def test_what_the_commands_refuse_to_a_member(home_of):
    at = ("--home", home_of(BEN, own=lasting((FOUNDER, ANN), (ANN, BEN))))
    assert "may not invite" in refused("invite", *at, *HERE).what
    assert f"Ask {FOUNDER.peer_id}" in refused("remove", ANN.peer_id, *at).fix
    assert "Nobody" in refused("remove", *at).what
    assert "cannot remove" in refused("remove", "nobody", *at).what, "whoever it names, it may not"


def test_what_the_commands_refuse_to_an_inviter(home_of):
    at = ("--home", home_of(ANN, own=lasting((FOUNDER, ANN))))
    assert "Only the founder can appoint" in refused("invite", "--may-invite", *at, *HERE).what
    assert "not an Ed25519" in refused("remove", "Ann", *at).what


def test_what_the_commands_refuse_to_the_founder_and_to_who_has_no_run(home_of):
    at = ("--home", home_of(FOUNDER))
    assert "founder cannot be removed" in refused("remove", FOUNDER.peer_id, *at).what
    assert "no address" in refused("invite", *at, "--address", "/ip4/127.0.0.1/tcp/1025").what
    assert "is no time" in refused("invite", *at, "--expires", "soon", *HERE).what
    assert "No ftis-node daemon" in refused("members", "--home", home_of(CARA, run=None)).what


async def test_a_node_that_still_loads_invites_to_the_run_that_it_begins(home_of):
    home = home_of(FOUNDER, None)
    node = Node(JoinOptions(Home(home), private=True), lambda task: collect(task=task, flags={})[0])
    await node._begin_to_tell(node._open_home())
    facts = RUN.model_dump() | {"turns": 1, "chat": "", "prefix": ()}
    node._compute.watched = Watched(facts=facts)

    told = await asyncio.to_thread(answer, "invite", "--home", home, *HERE)
    assert told["run"] == node.status().run
    await node._stack.aclose()


def test_what_join_refuses(home_of, tmp_path):
    line = ("join", "--dry-run", "--device", "cpu", "--model", "tiny-a", "--home")
    new = tmp_path / "x"
    fresh = invitation(now=unix_seconds()).text
    assert "no file that holds one" in refused(*line, new, tmp_path / "none").what
    assert "has expired" in refused(*line, new, invitation().text).what
    assert "--private begins a run" in refused(*line, new, "--private", fresh).what
    of_an_open_run = home_of(ANN, RUN)
    assert "is to run" in refused(*line, of_an_open_run, fresh).what
    assert "The run is open" in refused(*line, of_an_open_run, "--private").what
    assert "no member of its private run" in refused(*line, home_of(CARA)).what, "before its model is loaded"


def test_daemons_an_invitation_and_a_removal(join):
    """As people do it: a founder, and one who is invited and later removed."""
    founder = join("founder", "--model", "tiny-a", "--private", "--name", "Ana")
    at = "--home", founder.home.path
    founder.reaches(1, "a step")
    printed("pause", *at)

    line = answer("invite", "--home", founder.home.path)["invitation"]
    invited = join("invited", line, "--model", "tiny-b", "--name", "Ben")
    invited.wait(lambda s: s.get("foreign_groups_used"), "a group of the founder's")
    founder.wait(lambda s: f"Ben ({Identity.load(invited.home.key).peer_id})" in printed("members", *at), "his name")
    assert "Ben (" in printed("peers", *at)
    theirs = "--home", invited.home.path
    printed("pause", *theirs)

    looking = "--home", str(founder.home.path.parent / "looking")
    looked = run_cli("watch", answer("invite", *at)["invitation"], *looking, "--for", "2", "--set", "http_port=0")
    assert "makes this observer a member for 180 d" in looked.stderr, looked.stderr
    (row,) = (row for row in answer("members", *at)["members"] if row["observer"])
    assert row["id"] in looked.stderr
    assert printed("members", *at).count(", an observer") == 1
    assert "ftis-node watch --home" in refused("status", *looking).fix

    printed("remove", "Ben", *at)
    invited.wait(lambda s: not s["peers"], "he has no peers any more")
    printed("resume", *theirs)
    invited.wait(lambda s: "this node was removed by Ana" in s["reason"], "it is told")
    status = invited.status()
    assert status["state"] == "ALONE"
    assert not status["peers"]
    assert "  this node; no member: Ben (" in printed("members", *theirs)

    assert invited.stop() == 0
    log = invited.log()
    assert "was saved last. The same command goes on." in log
    assert "ftis-node invite" not in log
    assert "ftis-node invite" in founder.log()
    assert founder.status()["run"] in printed("status", *at)

    removed = join("invited", line, "--model", "tiny-b")
    assert removed.process.wait(PATIENCE) == 1
    log = removed.log()
    assert "this node was removed by" in log
    assert "with a new --home" in log
