"""Only what an honest author of this run could have made is admitted."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.draw import draw
from ftis_node.packet import Completion, Group, encode, packet_digest, prompt_digests
from ftis_node.swarm.admission import AdmissionContext, Reason, Rejection, admit
from ftis_node.swarm.identity import Identity
from tests.support.swarm import PROMPTS, ROWS, VOCABULARY, content, make_run

EOS = (998, 999)
CAP = 8
RUN = make_run(completion_tokens=CAP, eos=EOS)
CONTEXT = AdmissionContext(RUN, prompt_digests(PROMPTS))
AUTHOR = Identity(bytes(32)).author
STRANGER = Identity(bytes([1] * 32)).author
LOGPROB_MIN = -(math.log(VOCABULARY) + 18)


def completion(ids, finished, logprob=-0.5):
    return Completion(np.array(ids, np.uint32), np.full(len(ids), logprob, np.float32), finished)


def honest(author=AUTHOR, round_=4, slot=5, made=None):
    full = [
        completion([1, 2, 998], True),
        completion(list(range(CAP)), False),
        completion([999], True),
    ]
    return content(RUN, author, round_, slot, made or full, policy_step=40)


def refusal(packet, **options):
    data = packet if isinstance(packet, bytes) else encode(packet)
    outcome = admit(CONTEXT, AUTHOR, data, **options)
    assert isinstance(outcome, Rejection), "it was admitted"
    assert outcome.detail.isprintable()
    return outcome.reason


def with_token(index, **changes):
    packet = honest()
    ids = packet.token_ids.copy()
    logprobs = packet.logprobs.copy()
    if "id" in changes:
        ids[index] = int(changes["id"])
    if "logprob" in changes:
        logprobs[index] = changes["logprob"]
    return replace(packet, token_ids=ids, logprobs=logprobs)


@st.composite
def honest_packets(data):
    author = Identity(data(st.binary(min_size=32, max_size=32))).author
    completions = []
    for _ in range(RUN.group):
        finished = data(st.booleans())
        length = data(st.integers(1, CAP)) if finished else CAP
        ids = data(st.lists(st.integers(0, EOS[0] - 1), min_size=length, max_size=length))
        if finished:
            ids[-1] = data(st.sampled_from(EOS))
        completions.append(completion(ids, finished, data(st.floats(-24, 0))))
    round_ = data(st.integers(0, 2**64 - 1))
    slot = data(st.integers(0, 15))
    return author, honest(author, round_, slot, completions)


@given(honest_packets())
def test_everything_honest_is_admitted(made):
    author, packet = made
    place = (packet.round, packet.slot)
    data = encode(packet)
    digest = packet_digest(data)

    group = admit(CONTEXT, author, data, announced=place, digest=digest)

    assert isinstance(group, Group)
    assert group.key == (author, *place)
    assert group.row == draw(RUN.id, author, *place, ROWS)
    assert group.digest == digest
    assert encode(group.packet) == data


def test_a_packet_above_the_runs_size_is_refused_before_it_is_decoded():
    assert refusal(bytes(RUN.packet_bytes_max + 1)) is Reason.TOO_LARGE


SHORT = completion([998], True)
OTHER_PROMPT = CONTEXT.digest_of_row((draw(RUN.id, AUTHOR, 4, 5, ROWS) + 1) % ROWS)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (replace(honest(), run_id=bytes(16)), Reason.OTHER_RUN),
        (honest(author=STRANGER), Reason.OTHER_AUTHOR),  # held against the one who announced it
        (honest(made=[SHORT] * 2), Reason.WRONG_GROUP_SIZE),
        (honest(made=[SHORT] * 4), Reason.WRONG_GROUP_SIZE),
        (honest(made=[completion([1] * CAP + [998], True), SHORT, SHORT]), Reason.TOO_LONG),
        (honest(made=[completion([1] * (CAP - 1), False), SHORT, SHORT]), Reason.CUT_SHORT),
        (with_token(2, id=7), Reason.EOS_MISSING),
        (replace(honest(), finished=(True, True, True)), Reason.EOS_MISSING),
        *((with_token(index, id=eos), Reason.EOS_INTERIOR) for index in (0, 5) for eos in EOS),
        (with_token(10, id=998), Reason.EOS_UNDECLARED),
        (honest(slot=RUN.slots), Reason.SLOT_OUT_OF_RANGE),
        (replace(honest(), prompt_digest=OTHER_PROMPT), Reason.WRONG_PROMPT),
    ],
)
def test_what_no_honest_author_of_the_run_makes_is_refused(made, reason):
    assert refusal(made) is reason


def test_a_packet_announced_under_another_round_or_slot_is_refused():
    assert refusal(honest(), announced=(4, 6)) is Reason.NOT_AS_ANNOUNCED
    assert refusal(honest(), announced=(5, 5)) is Reason.NOT_AS_ANNOUNCED


@pytest.mark.parametrize("index", [0, 1, 7, 10])
@pytest.mark.parametrize("token", [VOCABULARY, 2**31, 2**32 - 1])
def test_an_id_outside_the_vocabulary_is_refused(index, token):
    assert refusal(with_token(index, id=token)) is Reason.UNKNOWN_TOKEN


@pytest.mark.parametrize("index", [0, 5, 11])
@pytest.mark.parametrize(
    "logprob",
    [
        math.nan,
        -math.nan,
        math.inf,
        -math.inf,
        0.0011,
        LOGPROB_MIN - 1e-4,
        -1e30,
        3e38,
    ],
)
def test_an_impossible_logprob_is_refused(index, logprob):
    assert refusal(with_token(index, logprob=logprob)) is Reason.LOGPROB_OUT_OF_RANGE


FULL = completion([1] * (CAP - 1) + [999], True)
EDGES = [
    *(with_token(0, logprob=logprob) for logprob in (0.0, -0.0, 0.0009, LOGPROB_MIN + 1e-4, -1e-45)),
    honest(slot=RUN.slots - 1),
    honest(made=[FULL] * 3),
]


@pytest.mark.parametrize("made", EDGES)
def test_a_logprob_a_slot_and_a_full_length_that_ends_in_eos_are_admitted_at_the_edge(made):
    assert isinstance(admit(CONTEXT, AUTHOR, encode(made)), Group)


@pytest.mark.parametrize("digests", [b"", bytes(7), bytes(12)])
def test_a_context_needs_whole_digests(digests):
    with pytest.raises(ValueError):
        AdmissionContext(RUN, digests)
