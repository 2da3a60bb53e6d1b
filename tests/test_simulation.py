"""A simulated swarm does the same for the same seed, loses no byte and no rule, and fills its batches."""

import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from ftis_node.host.clocks import boot_seconds, unix_seconds
from ftis_node.lab.simulation import node as simulated
from ftis_node.lab.simulation.directory import directory_figures
from ftis_node.lab.simulation.network import KINDS
from ftis_node.lab.simulation.scenario import Machine, Scenario
from ftis_node.lab.simulation.simulate import Simulation
from ftis_node.lab.simulation.store import CONTEXT, PACKET_BYTES, RUN, Reader, make_packet, rewards
from ftis_node.lab.simulation.tally import table
from ftis_node.packet import Group, packet_digest
from ftis_node.swarm import swarm
from ftis_node.swarm.admission import admit
from ftis_node.swarm.announcement import PacketRef, announce
from ftis_node.swarm.identity import Identity

# Short sessions, so that nodes leave in the middle of everything.
RESTLESS = Scenario(nodes=16, seconds=150.0, session_seconds=150.0, outbound_only=0.4)


class Watched(Simulation):
    """A simulation with a witness on every dial and on every packet that arrives."""

    def __init__(self, scenario):
        super().__init__(scenario)
        self.dialled = []
        self.pulled = []
        self.waiting = []  # groups in a pool, after each arrival
        self.members = []
        self.figures = self.run()

    def enter(self):
        node = super().enter()
        self.members.append(node)
        connect, arrive = node.transport.connect, node.store.add

        async def dial(peer, addresses):
            if peer not in node.transport.links:
                self.dialled.append(peer)
            await connect(peer, addresses)

        def take(groups, *, own, ages=()):
            arrive(groups, own=own)
            if not own:
                self.pulled += [(node.transport.author, group.key) for group in groups]
                self.waiting.append(len(node.stepper.pool))

        node.transport.connect = dial
        node.store.add = take
        return node

    @property
    def outbound_only(self):
        return {node.transport.author for node in self.members if node.transport.machine.outbound_only}


@cache
def restless():
    return Watched(RESTLESS)


@cache
def settled():
    """Who has come stays, and can be dialled."""
    return Watched(Scenario(nodes=12, seconds=360.0, session_seconds=1e9, outbound_only=0.0))


def of_seed(seed):
    return str(Simulation(Scenario(nodes=8, seconds=40.0, session_seconds=40.0, seed=seed)).run())


def test_the_same_seed_gives_the_same_figures_in_each_process_without_hivemind_and_another_seed_others():
    """Also where sets are walked through in another order."""
    code = """
import sys
from tests.test_simulation import of_seed
print(of_seed(0))
sys.exit("hivemind.p2p" in sys.modules)
"""
    other_order = os.environ | {"PYTHONHASHSEED": "77"}
    elsewhere = subprocess.run([sys.executable, "-c", code], env=other_order, capture_output=True, check=True)
    here = of_seed(0)
    assert elsewhere.stdout.decode() == here + "\n"
    assert here != of_seed(1)


def test_the_machines_clocks_are_back_after_a_simulation():
    before = boot_seconds(), unix_seconds()
    Simulation(Scenario(nodes=2, seconds=1200.0)).run()
    assert 0 <= boot_seconds() - before[0] < 600
    assert 0 <= unix_seconds() - before[1] < 600


def test_every_byte_sent_is_received_or_lost_or_under_way():
    totals = restless().network.totals
    assert totals["lost"] > 0, "nodes left in the middle of everything"
    assert totals["sent"] == totals["received"] + totals["lost"] + totals["flying"]
    figures = settled().figures
    for kind in KINDS:  # but for what is under way at either end
        assert figures["bytes_in_per_node_s"][kind] == pytest.approx(figures["bytes_out_per_node_s"][kind], rel=0.1)


@pytest.mark.parametrize(("fast", "slow"), [(1500.0, 1501.0), (60.0, 600.0)])
def test_two_nodes_of_any_speeds_train_on_one_anothers_groups(fast, slow, monkeypatch):
    """As method.md derives it, of steps that take so many seconds alone; a fifth of groups has no signal."""
    machines = [Machine(seconds / 40, 0.4 * seconds, 2.5e6, False) for seconds in (slow, fast)]
    monkeypatch.setattr(simulated, "draw_machine", lambda scenario, rng: machines.pop())
    simulation = Simulation(Scenario(nodes=2, seconds=6 * slow, session_seconds=1e12))
    simulation.run()
    shares, lasted = {}, {}
    for each in (fast, slow):
        steps = [
            (len(step.taken), took)
            for machine, step, took in simulation.tally.steps
            if machine.group_seconds == each / 40
        ]
        shares[each] = sum(taken for taken, _ in steps) / 24 / len(steps)
        lasted[each] = sum(took for _, took in steps) / len(steps)
    assert shares[slow] == pytest.approx(0.45, abs=0.1)
    assert shares[fast] == pytest.approx(0.9 * lasted[fast] / lasted[slow] / 2, rel=0.35)


def test_no_group_is_pulled_or_trained_on_twice_by_one_node():
    watched = restless()
    assert watched.pulled
    assert max(Counter(watched.pulled).values()) == 1
    assert watched.tally.steps
    assert all(len(set(step.taken)) == len(step.taken) for _, step, _ in watched.tally.steps)


def test_nobody_pulls_much_more_than_it_wants():
    assert 0 < max(restless().waiting) <= 2 * RESTLESS.settings.batch_groups


def test_a_node_that_only_dials_is_never_dialled_and_yet_its_groups_are_used():
    watched = restless()
    assert watched.dialled
    assert watched.outbound_only
    assert not watched.outbound_only & set(watched.dialled)
    assert watched.outbound_only & {author for _, (author, _, _) in watched.pulled}


def test_honest_nodes_blame_nobody_though_they_leave_without_a_word():
    for node in restless().members:
        assert not node.swarm.reputation.left_alone()
        assert set(node.swarm.pulling.rejections) <= {"holder"}


def test_authors_get_a_record_and_newcomers_then_share_a_quarter_of_a_batch():
    assert any(node.swarm.reputation.newcomers_room(24) == 6 for node in settled().members)


def test_a_packet_passes_admission_and_says_whether_its_rewards_differ():
    who = Identity(bytes(32))
    for right in range(3):
        _, body = make_packet(who.author, 1_700_000_000_000, 3, 1, right)
        verdict = admit(CONTEXT, who.author, body, announced=(1_700_000_000_000, 3), digest=packet_digest(body))
        assert isinstance(verdict, Group)
        assert sum(rewards(verdict.packet)) == right
        assert len(body) == pytest.approx(PACKET_BYTES, abs=4)


def test_a_forged_announcement_is_read_and_not_sound():
    who, other = Identity(bytes(32)), Identity(bytes(31) + b"1")
    _, body = make_packet(who.author, 7, 0, 1, 1)
    packets = [PacketRef(0, packet_digest(body), len(body), 1)]
    made = announce(
        who,
        run_id=RUN.id,
        round=7,
        policy_step=1,
        issued_at=0,
        packets=packets,
    )
    forged = made.encode().replace(who.author, other.author)
    read = Reader()
    assert read(made.encode(), max_packets=64).verify()
    assert not read(forged, max_packets=64).verify()


def test_twelve_nodes_fill_their_batches_and_step_faster_than_alone():
    figures = settled().figures
    assert figures["fill"] > 0.95
    assert figures["speedup"] > max(2, figures["lockstep_speedup"])


def test_fast_authors_do_not_serve_everybody():
    """The busiest sent 2.3 times the mean while every holder was as likely to be asked."""
    figures = settled().figures
    assert figures["upload_max_over_mean"] < 2
    assert figures["authors_per_batch"] > 10


def test_a_view_holds_64_and_who_has_peers_enough_greets_less(monkeypatch):
    """Beside nodes that never have enough, and greet whom they hear of."""
    scenario = Scenario(nodes=68, seconds=10.0, arrival_seconds=4.0)
    settled = Simulation(scenario).run()
    monkeypatch.setattr(swarm, "ENOUGH_PEERS", 1000)
    crowd = Simulation(scenario)
    eager = crowd.run()
    assert max(len(node.swarm.membership.active_view) for node in crowd.nodes.values()) == 64
    assert settled["handshakes_per_node_s"] < eager["handshakes_per_node_s"] / 4


def test_the_table_has_a_column_for_each_simulation():
    figures = settled().figures
    assert all(row.count("|") == 4 for row in table([figures, figures]).splitlines() if row.startswith("|"))
    short = table([Simulation(Scenario(nodes=2, seconds=3.0)).run()])
    assert "–: there was nothing to count" in short
    assert "simulate more --seconds" in short


def test_row_38_what_the_busiest_node_of_the_dht_sends_grows_far_slower_than_the_swarm():
    """When all records lay under one key it sent 504 bytes for each of 64 records to each node every three minutes."""
    few, many = (directory_figures(Scenario(nodes=nodes)) for nodes in (100, 2000))
    under_one_key = 2000 / 180 * 64 * 504
    assert many["directory_busiest_bytes_out_s"] < under_one_key / 20
    assert many["directory_bytes_out_per_node_s"] < 2 * few["directory_bytes_out_per_node_s"]


def test_row_38_nodes_with_peers_enough_hardly_look_up():
    figures = Simulation(Scenario(nodes=24, seconds=40.0, arrival_seconds=5.0, session_seconds=1e9)).run()
    assert figures["look_ups_per_node_hour"] == 0
