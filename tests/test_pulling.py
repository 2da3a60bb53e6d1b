"""What two pulls bring of one group is taken once; and what is under way is not hungered for."""

import random
from types import SimpleNamespace

from ftis_node.store.packets import PacketStore
from ftis_node.swarm.known import Arrival
from ftis_node.swarm.pool import Newcomers, Want
from ftis_node.swarm.pulling import Pulling, Trade
from ftis_node.swarm.reputation import Reputation
from ftis_node.swarm.table import Table
from ftis_node.swarm.traffic import Traffic
from tests.support.swarm import CONTEXT, RUN, identity, packet
from tests.support.talkers import made_by

ALICE = identity(1)


async def test_row_07_a_group_that_two_pulls_bring_is_taken_once(tmp_path):
    """As of an announcement that left the table while it was being pulled, and came back; or of a slow holder."""
    taken = []
    store = PacketStore(tmp_path / "store.sqlite", RUN.id, 1 << 20)

    async def take(arrived):
        store.add([one.group for one in arrived], own=False)
        taken.extend(arrived)

    table = Table(600.0, lambda: 0.0, random.Random(0))
    pulling = Pulling(
        Trade(CONTEXT, store, lambda: Want(1, Newcomers(), 1), take),
        membership=SimpleNamespace(transport=SimpleNamespace(), traffic=Traffic()),
        table=table,
        reputation=Reputation(lambda: 0.0),
        interval=lambda: 1.0,
    )
    made = made_by(ALICE, packets=1)
    body = packet(ALICE.author, 0, 0)
    pulled = []
    for _ in range(2):
        table.add(made, made.encode(), age=0.0, first_sender=None)
        [target] = table.choose(1, lambda known: -1)
        target.known.pulling = target.known.every
        pulling._slow([target])
        assert table.choose(1, lambda known: -1), "meanwhile another holder may bring it"
        group = pulling._admit(target, body)
        assert group is not None
        assert pulling._admit(target, body) is None
        pulled.append((target, group))
        table._remove(target.known)
    assert pulling.hungry
    pulling._under_way.add(pulled[0][0])
    assert not pulling.hungry, "the only group that it wants is under way"
    for target, group in pulled:
        left = [target]
        await pulling._hand_over({target: Arrival(group, 0.0, 1)}, left)
        assert not left
        assert not pulling._under_way
    assert len(taken) == 1
    store.close()
