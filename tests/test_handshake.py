"""The run of others: of the first peer that gives one, and clear words where none does."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from ftis_node.config.run import RunFile, run_file_as_json
from ftis_node.errors import UserError
from ftis_node.node.assembly import check_peers
from ftis_node.swarm import ftis_pb2
from ftis_node.swarm.handshake import PROTOCOL_MAJOR, fetch_run
from tests.support.doors import node
from tests.support.swarm import PATIENCE, RUN, Answers, eventually, make_run, transport
from tests.support.talkers import ALICE, BOB, CAROL


@asynccontextmanager
async def two(path):
    """Alice, whom Carol asks."""
    async with transport(ALICE, path / "a") as alice, transport(CAROL, path / "c") as carol:
        yield alice, carol


@pytest.mark.virtual_time
async def test_without_any_that_answers_it_says_who_was_asked_and_what_to_do(tmp_path):
    async with transport(CAROL, tmp_path / "c") as carol:
        dead = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{who.peer_id}" for port, who in ((1, ALICE), (2, BOB))]
        now = asyncio.get_running_loop().time
        began = now()
        with pytest.raises(UserError) as error:
            await asyncio.wait_for(fetch_run(carol, dead, patience=0.6), PATIENCE)
        assert now() - began >= 0.6
    assert all(text in error.value.what for text in dead)
    assert "--run FILE" in error.value.fix


class Saying(Answers):
    """What it says in every handshake."""

    def __init__(self, **said):
        super().__init__()
        self.said = said

    async def on_handshake(self, request, peer):
        return ftis_pb2.Handshake(major=PROTOCOL_MAJOR, **self.said)


async def test_a_peer_that_loads_its_model_is_waited_for_and_an_absent_one_is_not(tmp_path, caplog):
    caplog.set_level("INFO")
    async with two(tmp_path) as (alice, carol):
        with pytest.raises(UserError, match="may be loading its model"):
            await fetch_run(carol, [(await alice.addresses())[0]], 0.0, starting=0.6)
        caplog.clear()
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{BOB.peer_id}"
        asked = asyncio.create_task(fetch_run(carol, [dead, *await alice.addresses()], 0.0, starting=PATIENCE))
        await eventually(lambda: "may be loading its model" in caplog.text, "a peer is told to load its model")
        assert not asked.done()
        giving = Saying(run_id=RUN.id, run_file=run_file_as_json(RunFile(run=RUN)))
        await alice.serve(giving)
        assert (await asyncio.wait_for(asked, PATIENCE)).run == RUN


@pytest.mark.virtual_time
async def test_a_node_that_asks_an_old_peer_for_its_run_is_told_at_once_to_upgrade(tmp_path):
    async with node(ALICE, tmp_path, major=1) as (_, alice), transport(CAROL, tmp_path / "c") as carol:
        with pytest.raises(UserError) as error:
            await fetch_run(carol, [(await alice.addresses())[0]], patience=3600.0)
    said = f"it speaks protocol 1, this node speaks {PROTOCOL_MAJOR}: its owner has to upgrade ftis-node"
    assert said in error.value.what
    assert error.value.fix.startswith("Upgrade ftis-node")


@pytest.mark.virtual_time
async def test_a_peer_that_gives_no_run_is_no_help_and_its_words_are_plain(tmp_path):
    async with two(tmp_path) as (alice, carol):
        await alice.serve(Saying(refusal="\x1b[31mgo\naway", run_file="{}"))
        with pytest.raises(UserError) as error:
            await fetch_run(carol, [(await alice.addresses())[0]], patience=0.0)
    assert "?[31mgo?away" in error.value.what
    assert error.value.what.isprintable()


@pytest.mark.virtual_time
async def test_a_home_whose_peers_all_refuse_it_says_why_and_what_to_do(tmp_path):
    told = [
        (RUN, "it speaks protocol 1", "Upgrade"),
        (RUN, "all in another run", "Name a fresh --home"),
        (make_run(founder=CAROL.peer_id), "into the private run", "Ask a member"),
    ]
    async with node(ALICE, tmp_path) as (alice, _), node(BOB, tmp_path, major=1) as (_, network):
        peers = [(await network.addresses())[0]]
        alice.addresses.hear(peers)
        assert not await alice.greet(BOB.author)
        for run, what, fix in told:
            alice.run_file = RunFile(run=run)
            with pytest.raises(UserError) as error:
                check_peers(alice, peers, tmp_path)
            assert what in error.value.what
            assert error.value.fix.startswith(fix)
            alice.majors.clear()
