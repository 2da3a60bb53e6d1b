"""A text run in the engine: any two models read one another, those of one tokenizer as in a token run."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ftis_node.config.run import check_fit
from ftis_node.errors import UsageError
from ftis_node.host.clocks import boot_seconds
from ftis_node.lab.compute import InProcess
from ftis_node.packet import (
    Completion,
    Group,
    PacketError,
    TextCompletion,
    decode,
    encode,
    pack_text_group,
)
from ftis_node.swarm.admission import AdmissionContext, Reason, Rejection, admit
from ftis_node.swarm.announcement import right_of
from ftis_node.swarm.identity import Identity
from ftis_node.tokenizer.codec import Codec
from ftis_node.worker.engine import Engine
from ftis_node.worker.formats import Slot, packets_of
from ftis_node.worker.messages import GroupPart, ReadableGroup, StepGroup
from tests.support.objective_batches import termed
from tests.support.small_models import arithmetic_run, arithmetic_settings, batch_of
from tests.support.steppers import stepper

AUTHOR = Identity(bytes(32)).author
SLOT = Slot(AUTHOR, 7, 0, 1)
Opened = tuple[Engine, AdmissionContext]


def opened(model, *, any_tokenizer=True, **changes):
    engine = Engine()
    facts = engine.load(arithmetic_settings(model=model, eval_prompts=20), "arithmetic")
    run = arithmetic_run(facts, any_tokenizer=any_tokenizer, **changes)
    check_fit(run, facts.shared(), model)
    return engine, AdmissionContext(run, engine.open(run).prompt_digests)


def step_of(author, context):
    """The rows that AUTHOR's first slots answer, and the groups that a model makes of them."""
    rows = drawn(context)
    return rows, author.generate(rows, AUTHOR, 7, 1).groups


def drawn(context, slots=4):
    """The rows that AUTHOR's first slots answer."""
    return [context.row_of(AUTHOR, 7, slot) for slot in range(slots)]


def state(engine):
    return engine.learner.state()[0]


@pytest.fixture(scope="module")
def chars() -> Opened:
    return opened("tiny-chars")


@pytest.fixture(scope="module")
def numbers() -> Opened:
    return opened("tiny-numbers")


def test_models_of_three_tokenizers_agree_on_the_prompts_and_on_every_reward(chars, numbers):
    author, context = chars
    reader, theirs = numbers
    assert theirs.prompt_digests == context.prompt_digests
    assert theirs.run == context.run

    rows, groups = step_of(author, context)

    for slot, (row, group) in enumerate(zip(rows, groups, strict=True)):
        admitted = admit(theirs, AUTHOR, group.packet, announced=(7, slot))
        assert isinstance(admitted, Group)
        assert admitted.row == row
        assert reader.score(row, group.packet) == group.rewards

        readable = [ReadableGroup(row, group.packet, 8)]
        read = reader.texts(readable)
        assert read == author.texts(readable)
        assert "<answer>" in "".join(read[0].completions)


@pytest.mark.parametrize("cap", [4, 40])
async def test_no_honest_author_is_struck_by_readers_of_another_tokenizer_or_itself(cap, tmp_path):
    nodes = {}
    keys = {}
    for place, model in enumerate(("tiny-chars", "tiny-numbers", "tiny-bpe")):
        nodes[model] = opened(model, completion_tokens=cap)
        keys[model] = Identity(bytes([place]) * 32).author
    written = {}
    for model, (engine, context) in nodes.items():
        key = keys[model]
        rows = [context.row_of(key, 7, slot) for slot in range(6)]
        groups = engine.generate(rows, key, 7, 1).groups
        written[model] = list(zip(rows, groups, strict=True))

    unread = 0
    for reader, (engine, context) in nodes.items():
        (tmp_path / reader).mkdir()
        node = stepper(tmp_path / reader, others=2, run=context.run, worker=InProcess(engine))
        for author, groups in written.items():
            for slot, (row, made) in enumerate(groups):
                group = admit(context, keys[author], made.packet, announced=(7, slot))
                assert isinstance(group, Group)
                node.source.inbox.score_later(group, boot_seconds(), right_of(made.rewards))
                unread += not engine.score(row, made.packet)
        await node.source.inbox.scored()

        reputation = node.means.reputation
        assert not reputation.left_alone()
        assert all(not reputation.report(key)["refused"] for key in keys.values())
    assert unread or cap > 12


def test_a_step_on_anothers_group_learns_over_chunks(numbers):
    author, context = numbers
    learner, _ = opened("tiny-bpe")
    rows, groups = step_of(author, context)
    batch = batch_of(rows, groups, uneven=True, source="peer")
    before = state(learner)

    report = learner.step(batch)

    figures = report.diagnostics.sources["peer"]
    assert figures["samples"] + figures.get("unreadable", 0) == 4 * context.run.group
    assert figures["chunked"] > 0.8 * figures["samples"]
    assert 0.2 < figures["ratio_p50"] < 5
    assert report.gradient_norm > 0
    assert any(not torch.equal(before[name], after) for name, after in state(learner).items())


@pytest.mark.parametrize("source", ["own", "peer"])
def test_with_one_tokenizer_a_text_run_trains_bit_for_bit_as_a_token_run(source):
    tokens, context = opened("tiny-a", any_tokenizer=False)
    text, _ = opened("tiny-a", completion_tokens=16)
    of_tokens = []
    of_text = []
    rewards = [float(place % 2) for place in range(8)]
    for row, made in zip(*step_of(tokens, context), strict=True):
        completions = list(decode(made.packet).completions())
        prompt = text.task.prompt(text.task.train[row])
        data = text.packets.write(SLOT, prompt, [], completions)
        read = text.packets.read(data).completions(own=source == "own")
        # Pads and newlines that a token run has inside a completion end one in a text run; equal groups are compared.
        if all(same(one, other) for one, other in zip(read, completions, strict=True)):
            of_tokens.append(StepGroup(row, [GroupPart(source, made.packet, rewards)]))
            of_text.append(StepGroup(row, [GroupPart(source, data, rewards)]))
    assert len(of_text) >= 2

    by_tokens = tokens.step(of_tokens)
    by_text = text.step(of_text)

    assert by_tokens.loss == by_text.loss
    assert by_tokens.diagnostics == by_text.diagnostics
    weights = state(text)
    for name, value in state(tokens).items():
        assert torch.equal(value, weights[name])


def same(read, sampled):
    """Whether a completion came back with each token and its claim."""
    return read is not None and read.chunks is None and np.array_equal(read.token_ids, sampled.token_ids)


def completion(text, tokenizer, *, end=True):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if end:
        ids = [*ids, tokenizer.eos_token_id]
    return Completion(np.array(ids, np.uint32), np.full(len(ids), -0.5, np.float32), end)


def text_packets(engine, run, **changes):
    """The engine's packets in a run with other caps."""
    return packets_of(run.model_copy(update=changes), engine.policy.tokenizer, arithmetic_settings())


def packet_of(context, completions, prompt=""):
    """A packet of completions that no model wrote."""
    place = {
        "run_id": context.run_id,
        "author": AUTHOR,
        "round": 7,
        "slot": 0,
        "policy_step": 0,
    }
    return pack_text_group(**place, prompt=prompt, completions=completions)


def refusal(context, packet, **changes):
    """Why a packet is refused in a run with other caps."""
    run = context.run.model_copy(update={"group": len(packet.lengths)} | changes)
    other = AdmissionContext(run, context.prompt_digests)
    digest = other.digest_of_row(other.row_of(AUTHOR, 7, 0))
    data = encode(replace(packet, run_id=run.id, prompt_digest=digest))
    found = admit(other, AUTHOR, data, announced=(7, 0))
    return found.reason if isinstance(found, Rejection) else None


def test_a_completion_that_reaches_the_cap_in_bytes_is_cut_there(chars):
    engine, context = chars
    packets = text_packets(engine, context.run, completion_bytes=5)
    made = [completion(text, engine.policy.tokenizer) for text in ("1234", "12345", "123456789")]

    data = packets.write(SLOT, "", [], made)

    told = [(one.text, one.finished) for one in packets.read(data).texts()]
    assert told == [
        ("1234", True),
        ("12345", False),
        ("12345", False),
    ]
    assert refusal(context, decode(data), completion_bytes=5) is None


def test_a_token_without_text_ends_a_completion_unfinished(chars):
    engine, context = chars
    tokenizer = engine.policy.tokenizer
    plain = completion("12", tokenizer)
    ids = np.insert(plain.token_ids, 1, tokenizer.pad_token_id)
    broken = replace(plain, token_ids=ids, logprobs=np.full(4, -0.5, np.float32))

    data = engine.packets.write(SLOT, "", [], [broken, plain])

    first, second = decode(data).completions()
    assert first.pieces.tolist() == [1, 0]
    assert not first.finished
    assert second.finished
    assert refusal(context, decode(data)) is None

    own, _ = engine.packets.read(data).completions(own=True)
    assert own.token_ids.tolist() == ids[:1].tolist()
    assert not own.finished


def test_the_cap_in_tokens_holds_for_the_readers_tokens_too(chars, numbers):
    author, context = numbers
    reader, _ = chars
    long = "<think>12 13</think><answer>13</answer>"
    whole = completion(long, author.policy.tokenizer)
    assert len(whole) < 30 < len(long)
    unfinished = completion(long, author.policy.tokenizer, end=False)

    of_author = text_packets(author, context.run, completion_tokens=30)
    data = of_author.write(SLOT, "", [], [whole, unfinished])
    of_reader = text_packets(reader, context.run, completion_tokens=30)
    finished, cut = of_reader.read(data).completions(own=False)

    assert finished is None, "this model would have been cut off there"
    assert 0 < len(cut) <= 30
    assert not cut.finished
    assert len(cut.logprobs) == cut.chunks[-1] + 1
    assert long.startswith(reader.policy.tokenizer.decode(cut.token_ids))


def written(*pieces, end=-1.0, claim=-1.0):
    sizes = np.array([len(piece) for piece in pieces], np.uint8)
    return TextCompletion(b"".join(pieces), sizes, np.full(len(pieces), claim, np.float32), end)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (written(), None),
        (written(b"1", b"2", b"3", b"4", end=None), None),
        (written(b"1", b"23456", end=None), None),
        (written(b"1", b"2345678", end=None), None),
        (written(b"1", b"", end=None), None),
        (written(b"1", b"2", end=None), Reason.CUT_SHORT),
        (written(b"1", b"2", b"3"), None),
        (written(b"1", b"2", b"3", b"4"), Reason.TOO_LONG),
        (written(b"1", b"2", b"3", b"4", b"5", end=None), Reason.TOO_LONG),
        (written(b"1", b"23456"), Reason.TOO_LONG),
        (written(b"123456", b"7", end=None), Reason.TOO_LONG),
        (written(b"1", b"", b"2", end=None), Reason.EMPTY_PIECE),
        (written(b"1", b""), Reason.EMPTY_PIECE),
        (written(b"1", claim=-33.0), Reason.LOGPROB_OUT_OF_RANGE),
        (written(b"1", claim=float("nan")), Reason.LOGPROB_OUT_OF_RANGE),
        (written(b"1", end=0.5), Reason.LOGPROB_OUT_OF_RANGE),
    ],
)
def test_admission_of_text(chars, made, reason):
    _, context = chars
    packet = packet_of(context, [made, written(b"1")])
    assert refusal(context, packet, completion_tokens=4, completion_bytes=6) is reason


def test_packets_of_the_other_kind_are_refused(chars):
    engine, context = chars
    tokens, token_context = opened("tiny-a", any_tokenizer=False, completion_tokens=64)
    for one, other in ((engine, token_context), (tokens, context)):
        (group,) = one.generate([0], AUTHOR, 7, 1).groups
        renamed = replace(decode(group.packet), run_id=other.run_id)
        found = admit(other, AUTHOR, encode(renamed))
        assert found.reason is Reason.OTHER_VERSION

    with pytest.raises(PacketError, match="token ids"):
        engine.packets.read(group.packet).completions(own=False)

    of_text = encode(packet_of(context, [written(b"1")]))
    with pytest.raises(PacketError, match="of text"):
        tokens.packets.read(of_text).completions(own=False)


def test_a_tokenizer_that_cannot_write_the_task_is_told(chars):
    engine, context = chars
    facts = engine.load(arithmetic_settings(model="tiny-chars"), "arithmetic")
    refused = facts.shared() | {"text_refusal": "it lacks letters"}
    with pytest.raises(UsageError, match="can take no part in a run of any tokenizer: it lacks letters"):
        check_fit(context.run, refused, "tiny-chars")


def test_a_prompt_longer_than_the_run_allows_is_refused():
    with pytest.raises(UsageError, match="is a prompt of 6 bytes, and the run allows 5"):
        opened("tiny-chars", prompt_bytes=5)


def test_row_47_right_answers_that_nobody_can_read_are_no_signal(chars):
    engine, context = chars
    row = context.row_of(AUTHOR, 7, 0)
    example = engine.task.train[row]
    right = f"</think><answer>{example.answer}</answer>".encode()

    def group(*thoughts):
        made = [written(b"<think>", thought, right) for thought in thoughts]
        return encode(packet_of(context, [*made, written(b"\xff")], engine.task.prompt(example)))

    assert engine.score(row, group(b"\xff", b"\xf0\x9f")) == []
    assert engine.score(row, group(b"\xff", b"1")) == [1.0, 1.0, 0.0]


def test_row_47_no_way_of_cutting_a_text_raises_the_judged_weight_and_none_passes_the_cap(numbers):
    """The same text and the same claim in all, cut by chance; the claim is spread so that some pieces look unlikely."""
    reader, _ = numbers
    objective = reader.learner.objective
    text = b"<think>12 13</think><answer>13</answer>"
    total = -20.0
    rng = np.random.default_rng(0)
    found = []
    for _ in range(24):
        places = np.arange(1, len(text))
        ends = np.sort(rng.choice(places, rng.integers(0, 30), replace=False))
        sizes = np.diff([0, *ends, len(text)])
        shares = rng.dirichlet(np.full(len(sizes) + 1, 0.3)) * total
        made = TextCompletion(
            text,
            sizes.astype(np.uint8),
            shares[:-1].astype(np.float32),
            float(shares[-1]),
        )

        read = Codec(reader.policy.tokenizer).from_text(made)

        assert isinstance(read, Completion)
        start = torch.linspace(-2, -0.1, len(read))
        terms = termed(
            objective,
            trainer_logprobs=start,
            start_logprobs=start,
            sampler_logprobs=torch.from_numpy(read.logprobs),
            lengths=torch.tensor([len(read)]),
            advantages=torch.ones(1),
            chunks=None if read.chunks is None else torch.from_numpy(read.chunks),
        )
        assert float(terms.importance.max()) <= objective.truncation
        found.append(float(start.sum() - read.logprobs.sum()))
    assert found == pytest.approx([found[0]] * 24, abs=1e-3), "the whole sample weighs the same, however it is cut"
