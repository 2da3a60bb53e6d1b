"""A simulated swarm does the same for the same seed, loses no byte and no rule, and fills its batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

from ftis_node.cli import app
from ftis_node.errors import UsageError
from ftis_node.lab.simulation.directory import directory_figures
from ftis_node.lab.simulation.network import KINDS, MEMBERSHIP
from ftis_node.lab.simulation.node import SimulatedNode
from ftis_node.lab.simulation.scenario import Scenario
from ftis_node.lab.simulation.simulate import Simulation
from ftis_node.lab.simulation.store import Body
from ftis_node.lab.simulation.tally import table

# Short sessions, so that nodes leave in the middle of everything.
RESTLESS = Scenario(nodes=24, seconds=240.0, session_seconds=300.0, outbound_only=0.4)


class Watched:
    """A simulation with a witness on every dial and on every pull."""

    def __init__(self, scenario: Scenario) -> None:
        self.simulation = simulation = Simulation(scenario)
        self.dialled: list[bytes] = []
        self.pulled: list[tuple[bytes, tuple[bytes, int, int]]] = []
        self.over: list[int] = []  # groups under way and in the pool beyond what is wanted, after each pull
        self.outbound_only: set[bytes] = set()
        self.members: list[SimulatedNode] = []
        network = simulation.network
        self._watch_entries()
        dial: Callable[..., bool] = network.dial

        def witness(caller: Any, peer: bytes) -> bool:
            self.dialled.append(peer)
            return dial(caller, peer)

        network.dial = witness  # type: ignore[method-assign]
        self.figures = simulation.run()

    def _watch_entries(self) -> None:
        for node in self.simulation.network.nodes.values():
            self._watch(node)
        enter = self.simulation.network.enter

        def witness(node: SimulatedNode) -> None:
            enter(node)
            self._watch(node)

        self.simulation.network.enter = witness  # type: ignore[method-assign]

    def _watch(self, node: SimulatedNode) -> None:
        self.members.append(node)
        if node.line.machine.outbound_only:
            self.outbound_only.add(node.line.id)
        take, look = node.pulling._on_bodies, node.pulling._look

        def witness(arrived: list[tuple[Body, float]]) -> None:
            self.pulled += [(node.line.id, body.group.key) for body, _ in arrived]
            take(arrived)

        def looked() -> None:
            before = node.pulling._under_way
            look()
            if node.pulling._under_way > before:
                self.over.append(node.pulling._under_way - node.want().groups)

        node.pulling._on_bodies = witness
        node.pulling._alarm._wake = looked


@cache
def restless() -> Watched:
    return Watched(RESTLESS)


def test_the_same_seed_gives_the_same_figures_and_another_seed_others() -> None:
    scenario = Scenario(nodes=12, seconds=120.0, session_seconds=200.0)
    first, second = Simulation(scenario).run(), Simulation(scenario).run()
    assert first == second
    other = Simulation(Scenario(nodes=12, seconds=120.0, session_seconds=200.0, seed=1)).run()
    assert other["bytes_out_per_node_s"] != first["bytes_out_per_node_s"]


def test_every_byte_sent_is_received_or_lost_or_under_way() -> None:
    network = restless().simulation.network
    totals, lost = network.totals, network.totals["lost"]
    network.send(restless().members[0].line, b"left", MEMBERSHIP, 7, print)
    assert totals["sent"] == totals["received"] + totals["lost"] + totals["flying"]
    network._arrive(b"left", MEMBERSHIP, 7, print, ())
    assert totals["sent"] == totals["received"] + totals["lost"] + totals["flying"]
    assert totals["lost"] == lost + 7, "who is gone receives nothing"
    figures = Simulation(Scenario(nodes=10, seconds=120.0, session_seconds=1e9)).run()
    for kind in KINDS:  # but for what is under way at either end
        assert figures["bytes_in_per_node_s"][kind] == pytest.approx(figures["bytes_out_per_node_s"][kind], rel=0.1)


def test_no_group_is_pulled_or_trained_on_twice_by_one_node() -> None:
    watched = restless()
    assert watched.pulled
    assert max(Counter(watched.pulled).values()) == 1
    taken = Counter((line.id, key) for line, step, _ in watched.simulation.tally.steps for key in step.taken)
    assert taken
    assert max(taken.values()) == 1
    assert all(taker != author for taker, (author, _, _) in taken)


def test_nobody_pulls_more_than_it_wants() -> None:
    over = restless().over
    assert over
    assert max(over) <= 0


def test_a_node_that_only_dials_is_never_dialled_and_yet_its_groups_are_used() -> None:
    watched = restless()
    assert watched.dialled
    assert watched.outbound_only
    assert not watched.outbound_only & set(watched.dialled)
    used = {author for _, (author, _, _) in watched.pulled}
    assert used & watched.outbound_only


def test_ten_nodes_fill_their_batches_and_step_faster_than_alone() -> None:
    figures = Simulation(Scenario(nodes=10, seconds=600.0)).run()
    assert figures["fill"] > 0.95
    assert figures["authors_per_batch"] > 5
    assert figures["speedup"] > 2
    assert figures["lockstep_speedup"] < figures["speedup"]


def test_a_view_holds_64_and_who_has_peers_enough_greets_less_than_an_eager_node() -> None:
    crowd = Simulation(Scenario(nodes=80, seconds=20.0, arrival_seconds=4.0, eager=True))
    eager = crowd.run()
    assert max(len(node.contacts.view) for node in crowd.network.nodes.values()) == 64
    settled = Simulation(Scenario(nodes=80, seconds=20.0, arrival_seconds=4.0)).run()
    assert settled["handshakes_per_node_s"] < eager["handshakes_per_node_s"] / 4


def test_the_table_has_a_column_for_each_simulation() -> None:
    figures = Simulation(Scenario(nodes=4, seconds=60.0)).run()
    rows = table([figures, figures]).splitlines()
    assert all(row.count("|") == 4 for row in rows)


def test_the_command_refuses_what_is_no_list_of_numbers() -> None:
    result = CliRunner().invoke(app, ["lab", "simulate", "--nodes", "10;100"])
    assert isinstance(result.exception, UsageError)


def test_row_38_what_the_busiest_node_of_the_dht_sends_grows_far_slower_than_the_swarm() -> None:
    """When all records lay under one key it sent 504 bytes for each of 64 records to each node every three minutes."""
    few, many = (directory_figures(Scenario(nodes=nodes)) for nodes in (100, 2000))
    under_one_key = 2000 / 180 * 64 * 504
    assert many["directory_busiest_bytes_out_s"] < under_one_key / 20
    assert many["directory_bytes_out_per_node_s"] < 2 * few["directory_bytes_out_per_node_s"]


def test_row_38_nodes_with_peers_enough_hardly_look_up() -> None:
    figures = Simulation(Scenario(nodes=24, seconds=60.0, arrival_seconds=5.0, session_seconds=1e9)).run()
    assert figures["look_ups_per_node_hour"] == 0
