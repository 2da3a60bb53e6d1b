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
CAP = 12
RUN = make_run(packet=3, turns=3, group=2, completion_tokens=CAP, eos=(998, END))
CONTEXT = AdmissionContext(RUN, prompt_digests(PROMPTS))
AUTHOR = Identity(bytes(32)).author


def packet(*completions, prompt=(1, 2, 3), **fields):
    header = {"run_id": bytes(range(16)), "author": AUTHOR, "round": 7, "slot": 1, "policy_step": 3} | fields
    return pack_group(**header, prompt_ids=prompt, completions=completions, turns=True)


EPISODES = (episode([5, END], [6, 7, END], [8, 9, END]), episode([1, 2, 3, END]), episode([4, END], [7], [3] * 9))
DATA = encode(packet(*EPISODES))


def same(one, other):
    one_given, other_given = (np.zeros(len(c), bool) if c.given is None else c.given for c in (one, other))
    arrays = ((one.token_ids, other.token_ids), (one.logprobs, other.logprobs), (one_given, other_given))
    return all(np.array_equal(*pair) for pair in arrays) and one.finished == other.finished


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_the_vector_of_the_specification():
    small = encode(packet(episode([5, 9], [6, 7], [9]), author=bytes(range(38))))
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
    assert isinstance(found, Packet) and encode(found) == data
    assert all(same(one, other) for one, other in zip(found.completions(), group, strict=True))


NO_EPISODES = (
    *(replace(EPISODES[0], given=np.array(at)) for at in ([True] + [False] * 7, [False] * 7 + [True], [False] * 3)),
    replace(EPISODES[0], logprobs=np.zeros(8, np.float32)),
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
    made = packet(*completions, prompt=PROMPTS[row], run_id=context.run.id, round=4, slot=5)
    found = admit(context, AUTHOR, encode(made))
    return found.reason if isinstance(found, Rejection) else found


WHOLE = episode([5, END], [END, 7], [8, 998])


@pytest.mark.parametrize(
    "completion",
    [
        WHOLE,
        episode([5, END]),
        episode([1] * CAP, finished=False),
        episode([5, END], [6] * 3, [7] * 7, finished=False),
        episode([5, END], [6], [5, END], [6], [5, END]),
    ],
)
def test_everything_honest_is_admitted(completion):
    found = outcome(WHOLE, completion)
    assert isinstance(found, Group) and same(list(found.packet.completions())[1], completion)


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (episode([5, END], [6] * 9, [7, END]), Reason.TOO_LONG),
        (episode([1, END], [6] * 2, [1] * 9, finished=False), Reason.TOO_LONG),
        (episode([5, END], [6], [7, 7], finished=False), Reason.CUT_SHORT),
        (episode([END], [6], [END], [6], [END], [6], [END]), Reason.TOO_LONG),
        (episode([5, END], [VOCABULARY], [END]), Reason.UNKNOWN_TOKEN),
        (episode([VOCABULARY, END], [6], [END]), Reason.UNKNOWN_TOKEN),
        (episode([5, 5], [6], [END]), Reason.EOS_MISSING),
        (episode([5, END], [6], [5]), Reason.EOS_MISSING),
        (episode([5, END, 5, END], [6], [END]), Reason.EOS_INTERIOR),
        (episode([5, END], [6], [END, END]), Reason.EOS_INTERIOR),
        (episode([5, END], [6] * 3, [7] * 6 + [END], finished=False), Reason.EOS_UNDECLARED),
        (episode([5, END], [6], [END], logprob=0.1), Reason.LOGPROB_OUT_OF_RANGE),
    ],
)
def test_what_no_honest_author_of_the_run_makes_is_refused(completion, reason):
    assert outcome(completion, WHOLE) is reason


def test_versions_do_not_mix():
    single = AdmissionContext(make_run(group=2, completion_tokens=CAP, eos=(998, END)), prompt_digests(PROMPTS))
    assert outcome(WHOLE, WHOLE, context=single) in {Reason.OTHER_VERSION, Reason.TOO_LARGE}


def test_the_largest_packet_of_a_run_is_within_its_bound():
    most = episode([5, END], [6], [5, END], [6], [7] * 6, finished=False)
    made = packet(most, most, round=2**64 - 1, policy_step=2**64 - 1, slot=2**64 - 1)
    assert len(encode(made)) <= RUN.packet_bytes_max
