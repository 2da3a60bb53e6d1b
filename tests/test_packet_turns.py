"""Packet version 3: an episode of several turns has one spelling, and only what an honest author could make enters."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.packet import Completion, Group, Packet, PacketError, decode, encode, pack_group, prompt_digests
from ftis_node.swarm.admission import AdmissionContext, Reason, Rejection, admit
from ftis_node.swarm.identity import Identity
from tests.support.swarm import PROMPTS, VOCABULARY, episode, is_in_specification, make_run

END = 999
OTHER_END = 998
CAP = 12
RUN = make_run(
    packet=3,
    turns=3,
    group=2,
    completion_tokens=CAP,
    eos=(OTHER_END, END),
)
CONTEXT = AdmissionContext(RUN, prompt_digests(PROMPTS))
AUTHOR = Identity(bytes(32)).author


def spelled(text, **more):
    """The runs are words; a digit is that id, E and O end an answer, and X is beyond the vocabulary."""
    ids = {"E": END, "O": OTHER_END, "X": VOCABULARY}
    runs = [[ids.get(letter) or int(letter) for letter in word] for word in text.split()]
    return episode(*runs, **more)


def packet(*completions, prompt=(1, 2, 3), **fields):
    header = {
        "run_id": bytes(range(16)),
        "author": AUTHOR,
        "round": 7,
        "slot": 1,
        "policy_step": 3,
    } | fields
    return pack_group(**header, prompt_ids=prompt, completions=completions, turns=True)


EPISODES = (spelled("5E 67E 89E"), spelled("123E"), spelled("4E 7 333333333"))


def parts_of(completion):
    given = completion.given
    if given is None:
        given = np.zeros(len(completion), bool)
    return completion.token_ids.tolist(), completion.logprobs.tolist(), given.tolist(), completion.finished


def same(one, other):
    return parts_of(one) == parts_of(other)


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_the_vector_of_the_specification():
    small = encode(packet(spelled("59 67 9"), author=bytes(range(38))))
    assert is_in_specification(small)


@st.composite
def episodes(draw):
    count = 2 * draw(st.integers(0, 3)) + 1
    runs = [draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5)) for _ in range(count)]
    return episode(*runs, finished=draw(st.booleans()), logprob=draw(st.floats(-30, 0, width=32)))


@given(st.lists(episodes(), min_size=1, max_size=9))
def test_every_group_comes_back(group):
    data = encode(packet(*group))
    found = decode(data)
    assert isinstance(found, Packet)
    assert encode(found) == data
    assert all(same(one, other) for one, other in zip(found.completions(), group, strict=True))


FIRST = EPISODES[0]
NO_EPISODES = (
    replace(FIRST, given=np.arange(8) == 0),
    replace(FIRST, given=np.arange(8) == 7),
    replace(FIRST, given=np.zeros(3, bool)),
    replace(FIRST, logprobs=np.zeros(8, np.float32)),
    Completion(np.zeros(0, np.uint32), np.zeros(0, np.float32), True),
    episode(*[[1]] * 513),
)


@pytest.mark.parametrize("completion", NO_EPISODES)
def test_episodes_that_make_no_sense_are_not_packed(completion):
    with pytest.raises(PacketError):
        packet(completion)


@pytest.mark.parametrize(
    "changes",
    [
        {"turns": np.array([1, 1, 1], np.uint8)},
        {"turns": np.array([1, 0, 1], np.uint32)},
        {"runs": np.array([[2, 3], [2, 0]], np.uint32)},
        {"runs": np.array([[5, 3], [2, 1]], np.uint32)},
        {"ids": np.zeros(3, np.uint32)},
        {"token_ids": np.zeros(19, np.uint32)},
    ],
)
def test_an_impossible_packet_is_not_encoded(changes):
    made = packet(*EPISODES)
    assert made.given is not None
    if "token_ids" not in changes:
        changes = {"given": replace(made.given, **changes)}
    with pytest.raises(PacketError):
        encode(replace(made, **changes))


# --- admission --------------------------------------------------------------------------------------------------------


def outcome(*completions, context=CONTEXT):
    row = context.row_of(AUTHOR, 4, 5)
    made = packet(
        *completions,
        prompt=PROMPTS[row],
        run_id=context.run.id,
        round=4,
        slot=5,
    )
    found = admit(context, AUTHOR, encode(made))
    return found.reason if isinstance(found, Rejection) else found


WHOLE = spelled("5E E7 8O")


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("5E E7 8O", True),
        ("5E", True),
        ("1" * CAP, False),
        ("5E 666 7777777", False),
        ("5E 6 5E 6 5E", True),
    ],
)
def test_everything_honest_is_admitted(text, finished):
    completion = spelled(text, finished=finished)
    found = outcome(WHOLE, completion)
    assert isinstance(found, Group)
    _, admitted = found.packet.completions()
    assert same(admitted, completion)


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (spelled("5E 666666666 7E"), Reason.TOO_LONG),
        (spelled("1E 66 111111111", finished=False), Reason.TOO_LONG),
        (spelled("5E 6 77", finished=False), Reason.CUT_SHORT),
        (spelled("E 6 E 6 E 6 E"), Reason.TOO_LONG),
        (spelled("5E X E"), Reason.UNKNOWN_TOKEN),
        (spelled("XE 6 E"), Reason.UNKNOWN_TOKEN),
        (spelled("55 6 E"), Reason.EOS_MISSING),
        (spelled("5E 6 5"), Reason.EOS_MISSING),
        (spelled("5E5E 6 E"), Reason.EOS_INTERIOR),
        (spelled("5E 6 EE"), Reason.EOS_INTERIOR),
        (spelled("5E 666 777777E", finished=False), Reason.EOS_UNDECLARED),
        (spelled("5E 6 E", logprob=0.1), Reason.LOGPROB_OUT_OF_RANGE),
    ],
)
def test_what_no_honest_author_of_the_run_makes_is_refused(completion, reason):
    assert outcome(completion, WHOLE) is reason


def test_versions_do_not_mix():
    run = make_run(group=2, completion_tokens=CAP, eos=(OTHER_END, END))
    single = AdmissionContext(run, prompt_digests(PROMPTS))
    assert outcome(WHOLE, WHOLE, context=single) in {Reason.OTHER_VERSION, Reason.TOO_LARGE}


def test_the_largest_packet_of_a_run_is_within_its_bound():
    most = spelled("5E 6 5E 6 777777", finished=False)
    largest = 2**64 - 1
    made = packet(most, most, round=largest, policy_step=largest, slot=largest)
    assert len(encode(made)) <= RUN.packet_bytes_max
