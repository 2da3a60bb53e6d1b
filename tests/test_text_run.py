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
    Packet,
    PacketError,
    TextCompletion,
    TextPacket,
    decode,
    encode,
    pack_text_group,
)
from ftis_node.swarm.admission import AdmissionContext, Reason, Rejection, admit
from ftis_node.swarm.announcement import right_of
from ftis_node.swarm.identity import Identity
from ftis_node.tokenizer.codec import Codec
from ftis_node.worker.engine import Engine
from ftis_node.worker.formats import Slot, TextPackets
from ftis_node.worker.messages import GroupPart, ReadableGroup, StepGroup
from tests.support.small_models import arithmetic_run, arithmetic_settings, batch_of, tiny_tokenizer
from tests.support.steppers import stepper

AUTHOR = Identity(bytes(32)).author
Opened = tuple[Engine, AdmissionContext]


def opened(model, *, any_tokenizer=True, **changes):
    engine = Engine()
    facts = engine.load(arithmetic_settings(model=model, eval_prompts=20), "arithmetic")
    run = arithmetic_run(facts, any_tokenizer=any_tokenizer, **changes)
    check_fit(run, facts.shared(), model)
    return engine, AdmissionContext(run, engine.open(run).prompt_digests)


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
    assert theirs.prompt_digests == context.prompt_digests and theirs.run == context.run
    rows = drawn(context)
    generated = author.generate(rows, AUTHOR, 7, 1)
    for slot, (row, group) in enumerate(zip(rows, generated.groups, strict=True)):
        admitted = admit(theirs, AUTHOR, group.packet, announced=(7, slot))
        assert not isinstance(admitted, Rejection) and admitted.row == row
        assert reader.score(row, group.packet) == group.rewards
        read, written = (each.texts([ReadableGroup(row, group.packet, 8)]) for each in (reader, author))
        assert read == written and "<answer>" in "".join(read[0].completions)


@pytest.mark.parametrize("cap", [4, 40])
async def test_no_honest_author_is_struck_by_readers_of_another_tokenizer_or_itself(cap, tmp_path):
    nodes = {model: opened(model, completion_tokens=cap) for model in ("tiny-chars", "tiny-numbers", "tiny-bpe")}
    keys = {model: Identity(bytes([place]) * 32).author for place, model in enumerate(nodes)}
    written = {}
    for model, (engine, context) in nodes.items():
        rows = [context.row_of(keys[model], 7, slot) for slot in range(6)]
        written[model] = list(zip(rows, engine.generate(rows, keys[model], 7, 1).groups, strict=True))
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
        assert not node.means.reputation.left_alone()
        assert all(not node.means.reputation.report(key).refused for key in keys.values())
    assert unread or cap > 12


def test_a_step_on_anothers_group_learns_over_chunks(numbers):
    author, context = numbers
    learner, _ = opened("tiny-bpe")
    rows = drawn(context)
    made = author.generate(rows, AUTHOR, 7, 1)
    before = state(learner)
    report = learner.step(batch_of(rows, made.groups, uneven=True, source="peer"))
    figures = report.diagnostics.sources["peer"]
    assert figures["samples"] + figures.get("unreadable", 0) == 4 * context.run.group
    assert figures["chunked"] > 0.8 * figures["samples"] and 0.2 < figures["ratio_p50"] < 5
    assert report.gradient_norm > 0
    assert any(not torch.equal(before[name], after) for name, after in state(learner).items())


def as_text(packet, prompt, run):
    """The same samples as a packet of a text run."""
    slot = Slot(AUTHOR, packet.round, packet.slot, packet.policy_step)
    return TextPackets(run, tiny_tokenizer()).write(slot, prompt, [], list(packet.completions()))


@pytest.mark.parametrize("source", ["own", "peer"])
def test_with_one_tokenizer_a_text_run_trains_bit_for_bit_as_a_token_run(source):
    tokens, context = opened("tiny-a", any_tokenizer=False)
    text, text_context = opened("tiny-a", completion_tokens=16)
    rows = drawn(context)
    groups = {"tokens": [], "text": []}
    kept = 0
    for row, made in zip(rows, tokens.generate(rows, AUTHOR, 7, 1).groups, strict=True):
        packet = decode(made.packet)
        assert isinstance(packet, Packet)
        prompt = text.task.prompt(text.task.train[row])
        data = as_text(packet, prompt, text_context.run)
        read = text.packets.read(data).completions(own=source == "own")
        # Pads and newlines that a token run has inside a completion end one in a text run; equal groups are compared.
        same = all(
            one is not None and one.chunks is None and np.array_equal(one.token_ids, other.token_ids)
            for one, other in zip(read, packet.completions(), strict=True)
        )
        if same:
            kept += 1
            rewards = [float(place % 2) for place in range(8)]
            groups["tokens"].append(StepGroup(row, [GroupPart(source, made.packet, rewards)]))
            groups["text"].append(StepGroup(row, [GroupPart(source, data, rewards)]))
    assert kept >= 2
    reports = [tokens.step(groups["tokens"]), text.step(groups["text"])]
    assert reports[0].loss == reports[1].loss and reports[0].diagnostics == reports[1].diagnostics
    assert all(torch.equal(one, other) for one, other in zip(state(tokens).values(), state(text).values(), strict=True))


def completion(text, tokenizer, *, end=True):
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], *([tokenizer.eos_token_id] if end else [])]
    return Completion(np.array(ids, np.uint32), np.full(len(ids), -0.5, np.float32), end)


def text_packets(engine, run, **changes):
    """The engine's packets in a run with other caps."""
    return TextPackets(run.model_copy(update=changes), engine.policy.tokenizer)


def refusal(context, data, parts=None, **changes):
    """Why a packet is refused in a run with other caps; parts: of the packet, in place of its own."""
    packet = decode(data)
    assert isinstance(packet, TextPacket)
    packet = replace(packet, **(parts or {}))
    run = context.run.model_copy(update={"group": len(packet.lengths)} | changes)
    other = AdmissionContext(run, context.prompt_digests)
    digest = other.digest_of_row(other.row_of(AUTHOR, 7, 0))
    found = admit(other, AUTHOR, encode(replace(packet, run_id=run.id, prompt_digest=digest)), announced=(7, 0))
    return found.reason if isinstance(found, Rejection) else None


def test_a_completion_that_reaches_the_cap_in_bytes_is_cut_there(chars):
    engine, context = chars
    packets = text_packets(engine, context.run, completion_bytes=5)
    made = [completion(text, engine.policy.tokenizer) for text in ("1234", "12345", "123456789")]
    data = packets.write(Slot(AUTHOR, 7, 0, 1), "", [], made)
    told = [(one.text, one.finished) for one in packets.read(data).texts()]
    assert told == [("1234", True), ("12345", False), ("12345", False)]
    assert refusal(context, data, completion_bytes=5) is None


def test_a_token_without_text_ends_a_completion_unfinished(chars):
    engine, context = chars
    tokenizer = engine.policy.tokenizer
    plain = completion("12", tokenizer)
    pad = tokenizer.pad_token_id
    broken = replace(plain, token_ids=np.array([plain.token_ids[0], pad, *plain.token_ids[1:]], np.uint32))
    broken = replace(broken, logprobs=np.full(4, -0.5, np.float32))
    packets = text_packets(engine, context.run)
    data = packets.write(Slot(AUTHOR, 7, 0, 1), "", [], [broken, plain])
    (first, second) = decode(data).completions()
    assert isinstance(first, TextCompletion) and first.pieces.tolist() == [1, 0] and not first.finished
    assert second.finished and refusal(context, data) is None
    own, _ = packets.read(data).completions(own=True)
    assert own.token_ids.tolist() == plain.token_ids[:1].tolist() and not own.finished


def test_the_cap_in_tokens_holds_for_the_readers_tokens_too(chars, numbers):
    author, context = numbers
    reader, _ = chars
    long = "<think>12 13</think><answer>13</answer>"
    assert len(completion(long, author.policy.tokenizer)) < 30 < len(long)
    slot = Slot(AUTHOR, 7, 0, 1)
    unfinished = completion(long, author.policy.tokenizer, end=False)
    packets = text_packets(author, context.run, completion_tokens=30)
    data = packets.write(slot, "", [], [completion(long, author.policy.tokenizer), unfinished])
    finished, cut = text_packets(reader, context.run, completion_tokens=30).read(data).completions(own=False)
    assert finished is None, "this model would have been cut off there"
    assert 0 < len(cut) <= 30 and not cut.finished
    assert len(cut.logprobs) == cut.chunks[-1] + 1
    whole = bytes(author.policy.tokenizer.decode(unfinished.token_ids), "utf-8")
    assert whole.startswith(bytes(reader.policy.tokenizer.decode(cut.token_ids), "utf-8"))


def written(*pieces, end=-1.0, claim=-1.0):
    sizes = np.array([len(piece) for piece in pieces], np.uint8)
    return TextCompletion(b"".join(pieces), sizes, np.full(len(pieces), claim, np.float32), end)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (written(b"12", b"3"), None),
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
    engine, context = chars
    slot = Slot(AUTHOR, 7, 0, 1)
    two = [made, written(b"1")]
    data = text_packets(engine, context.run).write(slot, "", [], [completion("1", engine.policy.tokenizer)])
    claims = [c for one in two for c in (*one.logprobs.tolist(), *([one.end] if one.finished else []))]
    parts = {
        "finished": tuple(one.finished for one in two),
        "lengths": tuple(len(one.pieces) for one in two),
        "pieces": np.concatenate([one.pieces for one in two]),
        "text": b"".join(one.text for one in two),
        "logprobs": np.array(claims, np.float32),
    }
    assert refusal(context, data, parts, completion_tokens=4, completion_bytes=6) is reason


def test_packets_of_the_other_kind_are_refused(chars):
    engine, context = chars
    tokens, token_context = opened("tiny-a", any_tokenizer=False, completion_tokens=64)
    for one, other in ((engine, token_context), (tokens, context)):
        (group,) = one.generate([0], AUTHOR, 7, 1).groups
        found = admit(other, AUTHOR, encode(replace(decode(group.packet), run_id=other.run_id)))
        assert isinstance(found, Rejection) and found.reason is Reason.OTHER_VERSION
    with pytest.raises(PacketError, match="token ids"):
        engine.packets.read(group.packet).completions(own=False)
    with pytest.raises(PacketError, match="of text"):
        tokens.packets.read(engine.generate([0], AUTHOR, 7, 1).groups[0].packet).completions(own=False)


def test_a_tokenizer_that_cannot_write_the_task_is_told(chars):
    engine, context = chars
    facts = engine.load(arithmetic_settings(model="tiny-chars"), "arithmetic")
    with pytest.raises(UsageError, match="can take no part in a run of any tokenizer: it lacks letters"):
        check_fit(context.run, facts.shared() | {"text_refusal": "it lacks letters"}, "tiny-chars")


def test_a_prompt_longer_than_the_run_allows_is_refused():
    with pytest.raises(UsageError, match="is a prompt of 6 bytes, and the run allows 5"):
        opened("tiny-chars", prompt_bytes=5)


def test_row_47_right_answers_that_nobody_can_read_are_no_signal(chars):
    engine, context = chars
    row = context.row_of(AUTHOR, 7, 0)
    example = engine.task.train[row]
    right = f"<answer>{example.answer}</answer>".encode()

    def group(*thoughts):
        texts = [b"<think>%b</think>" % thought + right for thought in thoughts]
        made = [written(*(bytes([byte]) for byte in text)) for text in texts] + [written(b"\xff")]
        place = {"run_id": context.run_id, "author": AUTHOR, "round": 7, "slot": 0, "policy_step": 0}
        return encode(pack_text_group(**place, prompt=engine.task.prompt(example), completions=made))

    assert engine.score(row, group(b"\xff", b"\xf0\x9f")) == []
    assert engine.score(row, group(b"\xff", b"1")) == [1.0, 1.0, 0.0]


def test_row_47_no_way_of_cutting_a_text_raises_the_judged_weight_and_none_passes_the_cap(numbers):
    """The same text and the same claim in all, cut by chance; the claim is spread so that some pieces look unlikely."""
    reader, _ = numbers
    text = b"<think>12 13</think><answer>13</answer>"
    total = -20.0
    rng = np.random.default_rng(0)
    found = []
    for _ in range(24):
        ends = np.sort(rng.choice(np.arange(1, len(text)), rng.integers(0, 30), replace=False))
        sizes = np.diff([0, *ends, len(text)])
        shares = rng.dirichlet(np.full(len(sizes) + 1, 0.3)) * total
        made = TextCompletion(text, sizes.astype(np.uint8), shares[:-1].astype(np.float32), float(shares[-1]))
        read = Codec(reader.policy.tokenizer).from_text(made)
        assert isinstance(read, Completion)
        start = torch.linspace(-2, -0.1, len(read))
        chunks = None if read.chunks is None else torch.from_numpy(read.chunks)
        packed = {
            "trainer_logprobs": start,
            "start_logprobs": start,
            "sampler_logprobs": torch.from_numpy(read.logprobs),
            "lengths": torch.tensor([len(read)]),
            "chunks": chunks,
        }
        terms = reader.learner.objective.terms(advantages=torch.ones(1), **packed)
        assert float(terms.importance.max()) <= reader.learner.objective.truncation
        found.append(float(start.sum() - read.logprobs.sum()))
    assert len({round(value, 3) for value in found}) == 1, "the whole sample weighs the same, however it is cut"
