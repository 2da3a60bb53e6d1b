"""The packets that attackers make for a text run: refused for what they are, or read by every tokenizer."""

from collections import Counter
from types import SimpleNamespace

import pytest

from ftis_node.config.settings import Settings
from ftis_node.demo import text_run
from ftis_node.packet import prompt_digests
from ftis_node.policy.load import load_tokenizer
from ftis_node.swarm.admission import AdmissionContext, Rejection, admit
from ftis_node.tokenizer.codec import Codec
from ftis_node.worker.formats import packets_of
from tests.hostile import text
from tests.hostile.arena import MIXED
from tests.hostile.attack import Lies
from tests.hostile.attacks import ATTACKS, chosen
from tests.hostile.world import World
from tests.support.swarm import RUN, identity, make_text_run

ROUNDS = 40
WORLD = World.of(text_run())
CONTEXT = AdmissionContext(WORLD.run, prompt_digests(WORLD.prompts))
KINDS = [kind for kind in chosen("all", version=2) if issubclass(kind, Lies)]


def made_by(kind, world):
    """Author, round, slot and bytes of packets of many rounds, each by another author."""
    attack = kind(SimpleNamespace(world=world, identity=identity(1), asked=Counter()))  # it calls nobody
    found = []
    for _ in range(ROUNDS):
        author = attack.author().author
        round = attack.round()
        packets = attack.packets(author, round)[: attack.SLOTS]
        found += [(author, round, slot, packet) for slot, packet in enumerate(packets)]
    return found


def verdicts(context, made):
    found = Counter()
    for author, round, slot, data in made:
        one = admit(context, author, data, announced=(round, slot))
        found[one.reason.value if isinstance(one, Rejection) else "admitted"] += 1
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_row_47_every_lie_of_a_text_run_is_refused_for_what_it_is_and_the_rest_is_read(kind):
    made = made_by(kind, WORLD)
    assert verdicts(CONTEXT, made).keys() == (kind.refusals or {"admitted"})
    if kind.refusals:
        return

    for name in MIXED:
        tokenizer = load_tokenizer(name)
        end = Codec(tokenizer).end
        packets = packets_of(WORLD.run, tokenizer, Settings())
        for *_, data in made[:: ROUNDS // 4]:
            packet = packets.read(data)
            completions = list(packet.completions(own=False))
            assert len(packet.texts()) == len(completions) == WORLD.run.group
            read = [one for one in completions if one is not None]
            assert all(0 < len(one) <= WORLD.run.completion_tokens for one in read)
            assert not any(end in one.token_ids[:-1] for one in read)
            assert kind is not text.Row47Unreadable or not read


def test_row_06_a_token_run_refuses_packets_of_text_by_their_version():
    world = World(RUN, [[1, 2]], ["1"], lambda said: [1])
    context = AdmissionContext(RUN, prompt_digests(world.prompts))
    made = made_by(text.Row06OtherVersion, world)
    assert verdicts(context, made).keys() == {"other packet version"}


def test_a_text_run_has_every_row_of_a_token_run_and_one_more():
    rows = {version: {kind.row for kind in chosen("all", version)} for version in (1, 2)}
    assert rows[2] == rows[1] | {47}
    assert set(chosen("all", 1)) | set(chosen("all", 2)) == set(ATTACKS)
    assert World.of(make_text_run()).run.text
