"""Only what an honest author of this run could have made is admitted, and the right one is blamed for the rest."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.config.run import Run
from ftis_node.draw import draw
from ftis_node.packet import (
    MAX_PACKET_BYTES,
    Completion,
    Group,
    Packet,
    decode,
    encode,
    pack_group,
    packet_digest,
    prompt_digests,
)
from ftis_node.swarm.admission import AdmissionContext, Blame, Reason, Rejection, admit
from ftis_node.swarm.identity import Identity

VOCABULARY, EOS, CAP, ROWS = 1000, (998, 999), 8, 50
RUN = Run(
    task="arithmetic",
    data="0" * 64,
    template="{question}",
    reward="arithmetic",
    group=3,
    slots=16,
    prompt_tokens=16,
    completion_tokens=CAP,
    temperature=1.0,
    eos=EOS,
    tokenizer="0" * 64,
    vocabulary=VOCABULARY,
)
PROMPTS = [[row, row + 1] for row in range(ROWS)]
CONTEXT = AdmissionContext(RUN, prompt_digests(PROMPTS))
AUTHOR, STRANGER = Identity(bytes(32)).author, Identity(bytes([1] * 32)).author
LOGPROB_MIN = -(math.log(VOCABULARY) + 18)


def completion(ids: list[int], finished: bool, logprob: float = -0.5) -> Completion:
    return Completion(np.array(ids, np.uint32), np.full(len(ids), logprob, np.float32), finished)


def honest(
    author: bytes = AUTHOR, round_: int = 4, slot: int = 5, completions: list[Completion] | None = None
) -> Packet:
    row = draw(RUN.id, author, round_, slot, ROWS)
    return pack_group(
        run_id=RUN.id,
        author=author,
        round=round_,
        slot=slot,
        policy_step=40,
        prompt_ids=PROMPTS[row],
        completions=completions
        or [completion([1, 2, 998], True), completion(list(range(CAP)), False), completion([999], True)],
    )


def refusal(packet: Packet | bytes, **options: Any) -> Reason:
    data = packet if isinstance(packet, bytes) else encode(packet)
    outcome = admit(CONTEXT, AUTHOR, data, **options)
    assert isinstance(outcome, Rejection), "it was admitted"
    assert outcome.detail.isprintable()
    assert outcome.blame is Blame.AUTHOR
    return outcome.reason


def with_token(index: int, **changes: float) -> Packet:
    packet = honest()
    ids, logprobs = packet.token_ids.copy(), packet.logprobs.copy()
    if "id" in changes:
        ids[index] = int(changes["id"])
    if "logprob" in changes:
        logprobs[index] = changes["logprob"]
    return replace(packet, token_ids=ids, logprobs=logprobs)


@st.composite
def honest_packets(data: st.DrawFn) -> tuple[bytes, Packet]:
    author = Identity(data(st.binary(min_size=32, max_size=32))).author
    completions = []
    for _ in range(RUN.group):
        finished = data(st.booleans())
        length = data(st.integers(1, CAP)) if finished else CAP
        ids = data(st.lists(st.integers(0, EOS[0] - 1), min_size=length, max_size=length))
        if finished:
            ids[-1] = data(st.sampled_from(EOS))
        completions.append(completion(ids, finished, data(st.floats(-24, 0))))
    return author, honest(author, data(st.integers(0, 2**64 - 1)), data(st.integers(0, 15)), completions)


@given(honest_packets())
def test_everything_honest_is_admitted(made: tuple[bytes, Packet]) -> None:
    author, packet = made
    data = encode(packet)
    group = admit(CONTEXT, author, data, announced=(packet.round, packet.slot), digest=packet_digest(data))
    assert isinstance(group, Group)
    assert group.key == (author, packet.round, packet.slot)
    assert group.row == draw(RUN.id, author, packet.round, packet.slot, ROWS)
    assert group.digest == packet_digest(data)
    assert encode(group.packet) == data


@settings(max_examples=300)
@given(honest_packets(), st.data())
def test_no_bytes_make_it_raise(made: tuple[bytes, Packet], data: st.DataObject) -> None:
    author, packet = made
    damaged = bytearray(encode(packet))
    for position in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=4)):
        damaged[position] = data.draw(st.integers(0, 255))
    outcome = admit(CONTEXT, author, bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    assert isinstance(outcome, Group | Rejection)


@given(st.binary(max_size=200))
def test_rubbish_is_malformed(rubbish: bytes) -> None:
    assert refusal(rubbish) in (Reason.MALFORMED, Reason.TOO_LARGE)


def test_a_packet_above_the_runs_size_is_refused_before_it_is_decoded() -> None:
    assert refusal(bytes(RUN.packet_bytes_max + 1)) is Reason.TOO_LARGE


def test_bytes_that_nobody_could_announce_are_held_against_the_holder() -> None:
    outcome = admit(CONTEXT, AUTHOR, bytes(MAX_PACKET_BYTES + 1))
    assert isinstance(outcome, Rejection)
    assert (outcome.reason, outcome.blame) == (Reason.TOO_LARGE, Blame.HOLDER)


@pytest.mark.parametrize("served", [b"", b"rubbish", encode(honest())[:-1], encode(honest(slot=6))])
def test_other_bytes_than_announced_are_held_against_the_holder(served: bytes) -> None:
    outcome = admit(CONTEXT, AUTHOR, served, announced=(4, 5), digest=packet_digest(encode(honest())))
    assert isinstance(outcome, Rejection)
    assert (outcome.reason, outcome.blame) == (Reason.WRONG_HASH, Blame.HOLDER)


def test_a_packet_of_another_run_is_refused() -> None:
    assert refusal(replace(honest(), run_id=bytes(16))) is Reason.OTHER_RUN


def test_somebody_elses_packet_is_held_against_the_one_who_announced_it() -> None:
    assert refusal(honest(author=STRANGER)) is Reason.OTHER_AUTHOR


def test_a_packet_announced_under_another_round_or_slot_is_refused() -> None:
    assert refusal(honest(), announced=(4, 6)) is Reason.NOT_AS_ANNOUNCED
    assert refusal(honest(), announced=(5, 5)) is Reason.NOT_AS_ANNOUNCED


def test_a_slot_beyond_the_runs_is_refused() -> None:
    assert refusal(honest(slot=RUN.slots)) is Reason.SLOT_OUT_OF_RANGE
    assert isinstance(admit(CONTEXT, AUTHOR, encode(honest(slot=RUN.slots - 1))), Group)


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_completions_is_refused(count: int) -> None:
    assert refusal(honest(completions=[completion([998], True)] * count)) is Reason.WRONG_GROUP_SIZE


def test_a_prompt_other_than_the_drawn_one_is_refused() -> None:
    row = draw(RUN.id, AUTHOR, 4, 5, ROWS)
    chosen = prompt_digests([PROMPTS[(row + 1) % ROWS]])
    assert refusal(replace(honest(), prompt_digest=chosen)) is Reason.WRONG_PROMPT


def test_a_packet_moved_to_another_slot_answers_the_wrong_prompt() -> None:
    moved = [refusal(replace(honest(), slot=slot)) for slot in range(RUN.slots) if slot != 5 and slot != 3]
    assert set(moved) == {Reason.WRONG_PROMPT}


def test_a_completion_above_the_cap_is_refused() -> None:
    too_long = [completion([1] * CAP + [998], True), completion([998], True), completion([998], True)]
    assert refusal(honest(completions=too_long)) is Reason.TOO_LONG


def test_an_unfinished_completion_below_the_cap_is_refused() -> None:
    cut = [completion([1] * (CAP - 1), False), completion([998], True), completion([998], True)]
    assert refusal(honest(completions=cut)) is Reason.CUT_SHORT


@pytest.mark.parametrize("index", [0, 1, 7, 10])
@pytest.mark.parametrize("token", [VOCABULARY, 2**31, 2**32 - 1])
def test_an_id_outside_the_vocabulary_is_refused(index: int, token: int) -> None:
    assert refusal(with_token(index, id=token)) is Reason.UNKNOWN_TOKEN


@pytest.mark.parametrize("index", [0, 5, 11])
@pytest.mark.parametrize(
    "logprob", [math.nan, -math.nan, math.inf, -math.inf, 0.0011, 1.0, LOGPROB_MIN - 1e-4, -1e30, 3e38]
)
def test_an_impossible_logprob_is_refused(index: int, logprob: float) -> None:
    assert refusal(with_token(index, logprob=logprob)) is Reason.LOGPROB_OUT_OF_RANGE


@pytest.mark.parametrize("logprob", [0.0, -0.0, 0.0009, LOGPROB_MIN + 1e-4, -1e-45])
def test_a_logprob_at_the_edge_is_admitted(logprob: float) -> None:
    assert isinstance(admit(CONTEXT, AUTHOR, encode(with_token(0, logprob=logprob))), Group)


def test_a_finished_completion_without_eos_is_refused() -> None:
    assert refusal(with_token(2, id=7)) is Reason.EOS_MISSING


@pytest.mark.parametrize("eos", EOS)
def test_an_eos_in_the_middle_is_refused(eos: int) -> None:
    assert refusal(with_token(0, id=eos)) is Reason.EOS_INTERIOR
    assert refusal(with_token(5, id=eos)) is Reason.EOS_INTERIOR


def test_an_invented_eos_is_refused() -> None:
    assert refusal(replace(honest(), finished=(True, True, True))) is Reason.EOS_MISSING


def test_an_eos_that_is_not_called_the_end_is_refused() -> None:
    assert refusal(with_token(10, id=998)) is Reason.EOS_UNDECLARED


def test_a_full_length_completion_may_end_in_eos_by_itself() -> None:
    full = [completion([1] * (CAP - 1) + [999], True)] * 3
    assert isinstance(admit(CONTEXT, AUTHOR, encode(honest(completions=full))), Group)


def test_admission_changes_nothing_and_gives_the_same_answer_again() -> None:
    data = encode(honest())
    first, second = admit(CONTEXT, AUTHOR, data), admit(CONTEXT, AUTHOR, data)
    assert isinstance(first, Group) and isinstance(second, Group)
    assert first.digest == second.digest and data == encode(decode(data))


@pytest.mark.parametrize("digests", [b"", bytes(7), bytes(12)])
def test_a_context_needs_whole_digests(digests: bytes) -> None:
    with pytest.raises(ValueError):
        AdmissionContext(RUN, digests)
