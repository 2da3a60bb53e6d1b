"""Two real daemons and a peer that means no good: what each row of the table of threats promises, seen from outside."""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from ftis_node.observe.metrics import read_events
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.wire import inbound
from tests.hostile import content, directory, identity, reputation, streams, telling, text, wire
from tests.hostile.arena import Arena, arena
from tests.hostile.attack import Attack
from tests.hostile.stage import Stage
from tests.support.daemons import run_cli

pytestmark = pytest.mark.slow

SOME_FILES = 8  # that a process has open now and then
PATIENCE = 240.0  # until something has come about, however busy the machine is


@pytest.fixture(scope="module")
def ring(tmp_path_factory) -> Iterator[Arena]:
    with arena(tmp_path_factory.mktemp("arena"), 2) as started:
        yield started


@pytest.fixture(scope="module")
def stage(ring, tmp_path_factory) -> Stage:
    return Stage(ring, tmp_path_factory.mktemp("hostile"), seed=0)


@pytest.fixture(scope="module")
def mixed_stage(tmp_path_factory) -> Iterator[Stage]:
    """Of a text run between two tokenizers."""
    with arena(tmp_path_factory.mktemp("mixed"), 2, mixed=True) as started:
        yield Stage(started, tmp_path_factory.mktemp("hostile-mixed"), seed=0)


@pytest.fixture
def ground(request, kind) -> Stage:
    """Where an attack belongs: in a text run, if it lies about text."""
    return request.getfixturevalue("mixed_stage" if kind.__module__ == text.__name__ else "stage")


@dataclass
class Fight:
    """An attack under way, and what the nodes said before it."""

    ring: Arena
    attack: Attack
    before: dict[str, dict[str, Any]]
    began: float

    def more(self, what, reason):
        """Whether every node has counted more of something since."""
        return all(self.grown(what, reason))

    def grown(self, what, reason):
        """The same of each node."""
        before = {name: status[what].get(reason, 0) for name, status in self.before.items()}
        return [status.get(what, {}).get(reason, 0) > before[name] for name, status in self.ring.statuses().items()]

    def refused(self, *reasons):
        return lambda: all(self.more("refused_packets", reason) for reason in reasons)

    def heard(self, *outcomes):
        return lambda: all(self.more("announcements", outcome) for outcome in outcomes)

    def has_struck(self, times):
        return lambda: self.attack.strikes >= times

    def steps(self):
        """Of all nodes, since the attack began."""
        return [step for steps in self.steps_of_each().values() for step in steps]

    def used_by_attackers(self):
        authors = {peer_id(author.author) for author in self.attack.authors}
        return sum(
            count
            for status in self.ring.statuses().values()
            for author, count in status.get("foreign_groups_used", {}).items()
            if author in authors
        )

    def steps_of_each(self):
        return {
            name: [step for step in read_events(daemon.home.metrics, "step") if step["time"] >= self.began]
            for name, daemon in self.ring.daemons.items()
        }

    def learned_from_one_another(self):
        """Whether each has trained on groups of the other since."""
        ids = self.ring.ids
        return all(
            any(set(step["authors"]) & (set(ids.values()) - {ids[name]}) for step in steps)
            for name, steps in self.steps_of_each().items()
        )

    async def goes_on(self, what):
        """Waits until they have learned from one another from now on."""
        self.began = time.time()
        await until(self.learned_from_one_another, what)


@asynccontextmanager
async def attacked(stage, kind):
    """Afterwards both nodes have gone on with one another, and nothing else has happened to them."""
    stage.ring.new_tracebacks()
    before = stage.ring.statuses()
    began = time.time()
    pids = {name: [process.pid for process in daemon.pids()] for name, daemon in stage.ring.daemons.items()}
    async with stage.under([kind]) as [attack]:
        fight = Fight(stage.ring, attack, before, began)
        await until(fight.has_struck(2), "it has struck twice")
        yield fight
    await fight.goes_on("both go on, and learn from one another")
    assert stage.ring.dead() == []
    assert {name: [p.pid for p in daemon.pids()] for name, daemon in stage.ring.daemons.items()} == pids
    assert stage.ring.innocents_blamed() == []
    assert stage.ring.new_tracebacks() == []


async def until(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"it did not come true that {what}"
        await asyncio.sleep(0.1)


def left_alone(ring, authors):
    """Whether each node says of some of these that it leaves it alone."""
    guilty = {peer_id(author.author) for author in authors}
    return all(guilty & {peer["id"] for peer in report["left_out"]} for report in ring.peers().values())


@pytest.mark.parametrize("kind", [content.Row01Malformed, content.Row08Reward])
async def test_row_01_08_what_is_no_packet_is_refused_and_its_author_ignored(stage, kind):
    async with attacked(stage, kind) as fight:
        await until(fight.refused("malformed"), "malformed packets were refused")
        await until(lambda: left_alone(stage.ring, fight.attack.authors), "an author of them is left alone")
    assert fight.used_by_attackers() == 0


@pytest.mark.parametrize("kind", [wire.Row02ExtBomb, wire.Row02DhtCalls])
async def test_row_02_nested_values_bad_records_and_odd_calls_in_the_dht_do_no_harm(stage, kind):
    async with attacked(stage, kind) as fight:
        await until(fight.has_struck(3), "it has struck")


async def test_row_03_lengths_that_lie_and_messages_over_the_limits_are_refused(stage):
    async with attacked(stage, wire.Row03Oversize) as fight:
        await until(fight.heard("over the limits"), "what is over the limits was left unread")
        await until(fight.refused("wrong bytes"), "who served too much was found out")


@pytest.mark.parametrize(
    "kind",
    [
        content.Row04OtherTokens,
        content.Row05LogProbs,
        content.Row09CherryPicked,
        text.Row01Layout,
        text.Row04Pieces,
        text.Row05Ends,
        text.Row06OtherVersion,
    ],
)
async def test_row_04_05_09_47_what_no_honest_author_makes_is_refused_for_it(ground, kind):
    """Ids, lengths and ends that cannot be; log-probs that are none; answers to other rows than drawn; false pieces."""
    async with attacked(ground, kind) as fight:
        await until(fight.refused(*fight.attack.refusals), "each lie was refused for what it is")
    assert fight.used_by_attackers() == 0


async def test_row_06_who_forges_or_alters_is_found_out_and_its_victims_are_not_blamed(stage):
    async with attacked(stage, identity.Row06Forged) as fight:
        found_out = (
            ("forged", "announcements"),
            ("other author", "refused_packets"),
            (
                "wrong bytes",
                "refused_packets",
            ),
        )
        await until(lambda: any(any(fight.grown(what, reason)) for reason, what in found_out), "somebody found it out")
    assert fight.used_by_attackers() == 0


async def test_row_07_nothing_is_trained_on_twice_and_who_contradicts_itself_is_ignored(stage):
    async with attacked(stage, identity.Row07Replayed) as fight:
        await until(fight.heard(*fight.attack.refusals), "replays and contradictions were noted")
        await until(fight.learned_from_one_another, "the nodes go on meanwhile")
    for daemon in stage.ring.daemons.values():
        trained = [one for step in read_events(daemon.home.metrics, "step") for one in step["batch"]["foreign"]]
        assert len(trained) == len(set(trained))


@pytest.mark.parametrize(
    "kind",
    [
        content.Row09SkippedRounds,
        content.Row10LyingLogProbs,
        content.Row11MaliciousText,
        content.Row12Padded,
        text.Row47Markers,
        text.Row47Cuts,
        text.Row47Low,
        text.Row47Giants,
        text.Row47Empty,
    ],
)
async def test_row_09_to_12_47_lies_within_the_format_leave_steps_finite(ground, kind):
    async with attacked(ground, kind) as fight:
        await until(fight.learned_from_one_another, "the nodes go on meanwhile")
        steps = fight.steps()
    assert all(step["skipped"] is None and math.isfinite(step["loss"]) for step in steps)


async def test_row_13_answers_that_might_hang_a_verifier_are_scored_like_any_other(stage):
    async with attacked(stage, content.Row13HangingAnswers) as fight:
        await until(lambda: fight.used_by_attackers() > 0, "those with a right answer among them are of use")


async def test_row_14_nothing_that_a_terminal_obeys_gets_into_logs_or_lists(stage):
    async with attacked(stage, identity.Row14Escapes) as fight:
        await until(fight.refused("holder"), "its errors have been told")
        homes = [daemon.home.path for daemon in stage.ring.daemons.values()]
        shown = [await asyncio.to_thread(run_cli, "peers", "--home", home) for home in homes]
    texts = [one.stdout for one in shown] + [daemon.log() for daemon in stage.ring.daemons.values()]
    assert any("script" in said for said in texts), "the words did get that far"
    for said in texts:
        assert not set("\x1b\x07\u202e") & set(said)
        assert not any(line.startswith("2026-01-01 ERROR") for line in said.splitlines())


async def test_row_15_however_many_identities_there_are_a_node_makes_a_quarter_itself(stage):
    async with attacked(stage, identity.Row15Sybils) as fight:
        await until(lambda: fight.used_by_attackers() > 0, "groups of theirs were trained on")
        steps = fight.steps()
    for step in steps:
        assert 4 * step["own_groups"] >= step["own_groups"] + step["foreign_groups"], step


@pytest.mark.parametrize("kind", [wire.Row16Eclipse, directory.Row38MadeUp])
async def test_row_16_38_made_up_addresses_and_answers_put_nobody_in_the_view(stage, kind):
    async with attacked(stage, kind) as fight:
        await until(fight.has_struck(4), "it has struck")
        reports = stage.ring.peers()
    assert not [error for error in fight.attack.errors if "must not" in error]
    assert isinstance(fight.attack, wire.Row16Eclipse | directory.Row38MadeUp)
    for name, report in reports.items():
        listed = {peer["id"] for peer in report["peers"]}
        assert set(stage.ring.ids.values()) - {stage.ring.ids[name]} <= listed
        assert not listed & fight.attack.nobody


STRIKES = {
    identity.Row07Aged: 20,
    wire.Row17Holders: 2,
    identity.Row31Flood: 8,
    identity.Row31Calls: 8,
    telling.Row67Records: 8,
    telling.Row68Deaf: 8,
    telling.Row69Holders: 8,
    telling.Row70Busy: 8,
    telling.Row75Keys: 4,
}
HEARD = {
    reputation.Row34Contradictions: "equivocation",
    reputation.Row36Downwards: "too far ahead",
    reputation.Row37Introducers: "new",
    reputation.Row44Large: "malformed",
}


@pytest.mark.parametrize("kind", [*STRIKES, *HEARD])
async def test_row_07_17_31_34_36_37_44_67_to_70_75_who_crawls_or_floods_holds_nobody_up(stage, kind):
    """Keys that cost nothing neither silence the honest nor choose prompts."""
    async with attacked(stage, kind) as fight:
        received = fight.heard(HEARD[kind]) if kind in HEARD else fight.has_struck(STRIKES[kind])
        await until(received, "it has struck, or was received and judged")
        await fight.goes_on("the nodes go on with one another meanwhile")


@pytest.mark.parametrize("kind", [content.Row32NoSignal, text.Row47Unreadable])
async def test_row_32_47_groups_without_signal_or_text_are_not_trained_on(ground, kind):
    async with attacked(ground, kind) as fight:
        await until(
            lambda: all(
                status["pool"]["no_signal"] > fight.before[name]["pool"]["no_signal"] + 10
                for name, status in ground.ring.statuses().items()
            ),
            "they were counted",
        )
    assert fight.used_by_attackers() == 0


@pytest.mark.parametrize("kind", [streams.Row33NeverRead, streams.Row33HalfOpen])
async def test_row_33_streams_not_read_or_half_open_leave_no_socket(stage, kind):
    before = stage.ring.sample().files
    async with attacked(stage, kind) as fight:
        await until(fight.has_struck(4), "it has struck")
        await fight.goes_on("the nodes go on with one another meanwhile")

    def as_before():
        after = stage.ring.sample().files
        return all(after[key] <= before[key] + SOME_FILES for key in before)

    await until(as_before, "the nodes have let go of all its streams")


async def test_row_41_requests_without_end_in_one_stream_are_answered_at_a_bounded_rate(stage):
    began = time.monotonic()
    async with attacked(stage, streams.Row41Requests) as fight:
        await until(fight.has_struck(8), "it has asked for a while")
        await fight.goes_on("the nodes go on with one another meanwhile")
    seconds = time.monotonic() - began
    assert isinstance(fight.attack, streams.Row41Requests)
    most = inbound.LOOKUPS_AT_ONCE + inbound.LOOKUPS_A_SECOND * seconds
    assert fight.attack.answered <= most * len(stage.ring.daemons)
