"""Text from one tokenizer becomes another's ids: no byte and no claim is lost, and nobody's word decides how."""

import time
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from tokenizers.models import BPE, WordLevel, WordPiece
from transformers import PreTrainedTokenizerFast

from ftis_node.errors import UsageError
from ftis_node.packet import Completion, TextCompletion
from ftis_node.tasks.rewards import TAGS
from ftis_node.tokenizer.asking import prompt_ids
from ftis_node.tokenizer.codec import Codec, refusal
from tests.support.tokenizers import KINDS, REAL, codec, tokenizer, words_without_spaces

needs_real = pytest.mark.skipif(not set(REAL) <= set(KINDS), reason="the real tokenizers are not here")
of_each_kind = pytest.mark.parametrize("kind", KINDS)
# Each kind writes for itself and for the two that follow it.
PAIRS = [(author, [*KINDS, *KINDS][place + step]) for place, author in enumerate(KINDS) for step in range(3)]
TEXTS = st.one_of(
    st.text("0123456789 +-=\n", max_size=40),
    st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "12", " ", "so ", "clips", "\n"])).map("".join),
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.text("aé数\U0001f600\u0301 ▁<|im_end>/s", max_size=30),
)


def encoded(kind, text):
    """The tokenizer's own ids, without a space or BOS before them, where it can leave these out."""
    return [int(index) for index in codec(kind).encode(text)]


def completion(ids, finished=True):
    """Claims whose sums are exact: −1/8, −2/8, … The last id is an end, if finished."""
    return Completion(np.array(ids, np.uint32), claims(ids), finished)


def claims(pieces):
    return -np.arange(1, len(pieces) + 1, dtype=np.float32) / 8


def as_text(text, *pieces, end=None):
    data = text if isinstance(text, bytes) else text.encode()
    assert sum(pieces) == len(data)
    return TextCompletion(data, np.array(pieces, np.uint8), claims(pieces), end)


def in_bytes(text):
    """The text and its end, in pieces of one byte each."""
    data = text.encode()
    return as_text(data, *[1] * len(data), end=-1.0)


def read(kind, sample, **options):
    made = codec(kind).from_text(sample, **options)
    assert isinstance(made, Completion), made
    return made


def written(kind, ids):
    return codec(kind).decode(np.asarray(ids, np.int64))


@st.composite
def samples(draw, kind):
    """A text that the tokenizer can write, and ids of it: its parts' encodings, so seldom the canonical ones."""
    text = draw(TEXTS)
    places = st.integers(0, max(len(text) - 1, 0))
    inner = draw(st.sets(places, max_size=6))
    starts = sorted({0, *inner})
    ends = [*starts[1:], len(text)]
    ids = []
    for start, end in zip(starts, ends, strict=True):
        ids += encoded(kind, text[start:end])
    assume(written(kind, ids) == text.encode())
    assume(all(written(kind, [index]) for index in ids))
    return text, ids


@cache
def special(kind):
    return {index for index, entry in tokenizer(kind).added_tokens_decoder.items() if entry.special}


@cache
def ordinary(kind):
    """Ids that are not special; of a large vocabulary some 3,000."""
    ids = [index for index in tokenizer(kind).get_vocab().values() if index not in special(kind)]
    return ids[:: max(1, len(ids) // 3000)]


@of_each_kind
def test_every_token_writes_what_the_tokenizer_itself_decodes(kind):
    before = encoded(kind, "3")  # a space at the very beginning may be left out by a decoder
    backend = tokenizer(kind).backend_tokenizer
    for index in ordinary(kind):
        decoded = backend.decode([*before, index], skip_special_tokens=False)
        if kind == "no decoder":  # the library puts spaces between such tokens
            decoded = decoded.replace("3 ", "3", 1)

        ours = b"3" + written(kind, [index])
        assert ours.decode(errors="replace") == decoded

    assert not any(written(kind, [index]) for index in {*special(kind), codec(kind).end})


@of_each_kind
@settings(max_examples=30)
@given(data=st.data())
def test_own_samples_come_back_as_they_were(kind, data):
    own = codec(kind)
    with_text = st.sampled_from(ordinary(kind)).filter(lambda index: written(kind, [index]))
    ids = data.draw(st.lists(with_text, max_size=20))
    for finished in (True, False):
        sample = completion([*ids, own.end] if finished else ids, finished)

        text = own.to_text(sample)

        assert text.text == written(kind, ids)
        assert len(text) == len(sample)
        assert text.finished == finished
        if not len(sample):
            assert own.from_text(text, own=True) is None
            continue

        again = read(kind, text, own=True)
        assert again.chunks is None
        assert again.finished == finished
        assert again.logprobs.tolist() == sample.logprobs.tolist()
        for read_id, id in zip(again.token_ids, sample.token_ids, strict=True):
            assert written(kind, [read_id]) == written(kind, [id]), "two ids may write the same"


@pytest.mark.parametrize(("author", "reader"), PAIRS)
@settings(max_examples=15)
@given(data=st.data())
def test_a_finished_text_keeps_bytes_claims_and_every_common_end(author, reader, data):
    text, ids = data.draw(samples(author))
    theirs = codec(author)
    ours = codec(reader)
    sample = completion([*ids, theirs.end])

    sent = theirs.to_text(sample)
    made = ours.from_text(sent)

    if ours.rewritten(text) != text:
        assert made is None
        return
    assert isinstance(made, Completion)
    assert made.finished
    *own, end = made.token_ids.tolist()
    assert end == ours.end
    assert own == encoded(reader, text)
    assert written(reader, own) == text.encode()
    assert made.logprobs.sum() == sample.logprobs.sum()
    assert made.logprobs[-1] == sample.logprobs[-1]

    sizes = [len(written(reader, [index])) for index in own]
    ends = np.cumsum(sizes, dtype=np.int64)
    pieces = np.cumsum(sent.pieces, dtype=np.int64)
    chunks = np.arange(len(made)) if made.chunks is None else made.chunks
    assert len(chunks) == len(made)
    assert len(made.logprobs) == chunks[-1] + 1
    last = np.flatnonzero(np.diff(chunks))
    common = np.intersect1d(pieces, ends)
    assert ends[last].tolist() == common.tolist(), "each common end, and no other"

    exact = pieces.tolist() == ends.tolist() and not ours._ambiguous[own].any()
    assert (made.chunks is None) == exact


@of_each_kind
@settings(max_examples=30)
@given(text=TEXTS)
def test_one_tokenizer_reads_its_own_encoding_token_by_token(kind, text):
    own = codec(kind)
    assume(own.rewritten(text) == text)
    sample = completion([*encoded(kind, text), own.end])

    made = read(kind, own.to_text(sample))

    assert made.token_ids.tolist() == sample.token_ids.tolist()
    assert made.logprobs.tolist() == sample.logprobs.tolist()
    assert made.chunks is None or made.chunks.tolist() == list(range(len(sample)))


def test_pieces_that_are_no_encoding_of_the_text_go_by_chunks():
    # "<answer>" is one of the 26 words; an author that spelt it in two pieces used another tokenizer, whatever it says.
    split = read("26 words", as_text("<answer>7", 4, 4, 1, end=-2.0))
    assert split.chunks.tolist() == [0, 1, 2]
    assert split.logprobs.tolist() == [-0.375, -0.375, -2.0]

    whole = read("26 words", as_text("<answer>7", 8, 1, end=-2.0))
    assert whole.chunks is None
    assert whole.token_ids.tolist() == split.token_ids.tolist()


def test_bytes_with_two_ids_go_by_chunks_and_as_own_they_are_the_ordinary_id():
    own = codec("prepending")
    vocabulary = tokenizer("prepending").get_vocab()
    sent = own.to_text(completion([vocabulary["<0x38>"], own.end]))
    assert sent.text == b"8"
    assert read("prepending", sent).chunks is not None
    for option in (True, False):
        made = read("prepending", sent, own=option)
        assert made.token_ids.tolist() == [vocabulary["8"], own.end]


def test_an_unfinished_text_loses_its_last_chunk():
    made = read("26 words", as_text("12 34", 2, 1, 2))
    assert not made.finished
    assert made.token_ids.tolist() == encoded("26 words", "12 ")
    assert made.chunks.tolist() == [0, 0, 1]
    assert made.logprobs.tolist() == [-0.125, -0.25]


def test_an_unfinished_text_in_own_tokens_loses_nothing():
    made = read("26 words", as_text("12 3", 1, 1, 1, 1))
    assert made.chunks is None
    assert made.token_ids.tolist() == encoded("26 words", "12 3")
    assert not made.finished
    assert len(made.logprobs) == 4


@pytest.mark.parametrize("kind", ["prepending", "unigram"])
def test_an_unfinished_text_loses_a_character_that_was_cut_and_the_chunk_before_it(kind):
    half = "\U0001f600".encode()[:2]
    own = [written(kind, [index]) for index in encoded(kind, "8-3")]
    assert own == [b"8", b"-", b"3"]
    at_a_piece = (1, 1, 1, 1, 1)
    within_a_piece = (1, 1, 3)
    for pieces, left in (
        (at_a_piece, b"8-"),
        (within_a_piece, b"8"),
    ):
        made = read(kind, as_text(b"8-3" + half, *pieces))
        assert written(kind, made.token_ids) == left
        assert made.logprobs.tolist() == [-0.125, -0.25][: len(left)]


@needs_real
def test_own_tokens_before_a_cut_character_stay_token_by_token():
    face = encoded("gpt2", "\U0001f600")
    assert len(face) > 1, "or nothing is cut"
    ids = [*encoded("gpt2", "so 8"), *face[:-1]]
    sent = codec("gpt2").to_text(completion(ids, False))

    made = read("gpt2", sent)

    assert made.chunks is None
    assert made.token_ids.tolist() == encoded("gpt2", "so 8")
    assert made.logprobs.tolist() == sent.logprobs[: len(made)].tolist()
    assert read("gpt2", sent, own=True).token_ids.tolist() == ids


def test_a_piece_without_text_is_left_out():
    sent = as_text("12", 1, 1, 0)
    made = read("26 words", sent)
    assert made.chunks is None
    assert len(made) == len(made.logprobs) == 2
    assert not made.finished

    as_own = read("26 words", sent, own=True)
    assert as_own.token_ids.tolist() == made.token_ids.tolist()


@pytest.mark.parametrize(
    "sample",
    [
        as_text("", 0),
        as_text("12", 2),
        as_text(b"\xf0\x9f", 1, 1),
    ],
)
def test_an_unfinished_text_of_which_nothing_is_left_is_empty(sample):
    assert codec("26 words").from_text(sample) is None


def test_a_text_of_nothing_but_its_end_is_an_end():
    made = read("26 words", as_text("", end=-0.5))
    assert made.token_ids.tolist() == [codec("26 words").end]
    assert made.logprobs.tolist() == [-0.5]
    assert made.chunks is None
    assert made.finished


@pytest.mark.parametrize(
    "sample",
    [
        as_text(b"1\xf0\x9f", 1, 1, 1, end=-1.0),
        as_text(b"1\xff2", 1, 1, 1, end=-1.0),
        as_text(b"1\xff2", 1, 1, 1),
        as_text(b"12\xff", 1, 1, 1),
        as_text(b"1\xed\xa0\x80", 1, 3, end=-1.0),
    ],
)
@pytest.mark.parametrize("kind", ["26 words", "prepending"])
def test_bytes_that_are_no_utf8_are_counted(kind, sample):
    assert codec(kind).from_text(sample) is None


@needs_real
def test_accents_that_a_tokenizer_composes_are_not_its_text():
    decomposed = as_text("cafe\u0301", 4, 2, end=-1.0)
    assert codec("qwen").from_text(decomposed) is None
    assert isinstance(codec("gpt2").from_text(decomposed), Completion)
    assert isinstance(codec("qwen").from_text(as_text("café", 5, end=-1.0)), Completion)


def test_a_mark_for_a_space_is_no_space():
    assert codec("prepending").from_text(as_text("a▁b", 1, 3, 1, end=-1.0)) is None


@needs_real
@pytest.mark.parametrize("kind", ["qwen", "gpt2"])
def test_text_that_spells_a_special_token_is_plain_text(kind):
    text = "8<|im_end|><|endoftext|>3"
    made = read(kind, in_bytes(text))
    assert not special(kind) & set(made.token_ids[:-1].tolist())
    assert written(kind, made.token_ids) == text.encode()


@of_each_kind
def test_no_spelling_is_read_as_an_end(kind):
    text = "8" + str(tokenizer(kind).eos_token)
    made = codec(kind).from_text(in_bytes(text))
    assert made is None or codec(kind).end not in made.token_ids[:-1].tolist()


def test_the_first_token_without_text_ends_a_text():
    own = codec("prepending")
    vocabulary = tokenizer("prepending").get_vocab()
    eight = vocabulary["8"]

    aborted = own.to_text(completion([eight, vocabulary["<s>"], eight, own.end]))
    assert aborted.text == b"8"
    assert aborted.pieces.tolist() == [1, 0]
    assert aborted.finished is False
    assert aborted.logprobs.tolist() == [-0.125, -0.25]
    assert aborted.pieces.dtype == np.uint8
    assert aborted.logprobs.dtype == np.float32

    finished = own.to_text(completion([eight, own.end, eight], False))
    assert finished.text == b"8"
    assert finished.pieces.tolist() == [1]
    assert finished.end == -0.25


def test_an_end_that_is_an_ordinary_word_of_the_backend_is_an_end():
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"8": 0, "end": 1, "</s>": 2})))
    words.eos_token = "end"
    own = Codec(words)

    sent = own.to_text(completion([0, 1]))

    assert own.end == 1
    assert sent.text == b"8"
    assert sent.pieces.tolist() == [1]
    assert sent.end == -0.25


def test_a_token_longer_than_a_packet_holds_aborts():
    longest = "é" * 127 + "e"
    longer = "e" * 256
    words = Tokenizer(WordLevel({longest: 0, longer: 1, "</s>": 2}))
    own = Codec(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"))
    kept = own.to_text(completion([0, 2]))
    assert kept.pieces.tolist() == [255]

    aborted = own.to_text(completion([0, 1, 2]))
    assert aborted.text == longest.encode()
    assert aborted.pieces.tolist() == [255, 0]
    assert aborted.finished is False

    made = own.from_text(as_text(longer, 200, 56, end=-1.0))
    assert made.token_ids.tolist() == [1, 2], "others may write such a text"


def test_a_prompt_begins_as_its_tokenizer_wants_it():
    for kind in ("prepending", "metaspace", "unigram", "byte-level"):
        vocabulary = tokenizer(kind).get_vocab()
        ids = prompt_ids(tokenizer(kind), "{question}", "8</s>")
        assert ids[0] == vocabulary["<s>"]
        assert kind == "unigram" or vocabulary["</s>"] not in ids
        assert written(kind, ids).startswith(b" 8")
        assert codec(kind).end not in ids[:2]
    assert prompt_ids(tokenizer("26 words"), "{question}", "1+2=") == encoded("26 words", "1+2=")


def test_an_end_after_every_text_is_not_part_of_a_prompt():
    vocabulary = {"8": 0, "<s>": 1, "</s>": 2}
    words = Tokenizer(WordLevel(vocabulary))
    marks = [("<s>", 1), ("</s>", 2)]
    words.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=marks)
    both = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    assert both("8")["input_ids"] == [1, 0, 2]
    assert prompt_ids(both, "{question}", "8") == [1, 0]


def test_what_a_tokenizer_does_for_training_does_not_reach_the_codec():
    vocabulary = {word: place for place, word in enumerate(["a", "b", "ab", "</s>"])}
    words = Tokenizer(BPE(vocabulary, [("a", "b")], dropout=0.99))
    words.enable_truncation(2)
    words.enable_padding(length=9, pad_id=0)
    own = Codec(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"))
    for _ in range(5):
        assert own.encode("abababab").tolist() == [2, 2, 2, 2]


@of_each_kind
def test_a_tokenizer_that_writes_what_the_task_needs_can_take_part(kind):
    """A real one even where it composes accents."""
    needed = ["1+2-3=", "<answer>8</answer>"]
    if kind in REAL:
        needed += ["cafe\u0301 \U0001f600 数 \\frac{1}{2}", "".join(TAGS)]
    assert refusal(codec(kind), needed) == ""


@pytest.mark.parametrize("kind", ["26 words", "no decoder"])
def test_a_tokenizer_without_emoji_is_refused_only_where_they_are_needed(kind):
    why = refusal(codec(kind), ["1+2-3=", "1 \U0001f600"])
    assert "cannot write '\U0001f600', which this task needs" in why
    assert "choose a model" in why


def test_a_tokenizer_that_loses_spaces_is_refused():
    assert "cannot write ' '" in refusal(Codec(words_without_spaces()), ["8 - 3 = 5"])


def test_a_tokenizer_whose_ids_give_back_another_text_is_refused():
    vocabulary = {"3": 0, "##4": 1, "4": 2, "</s>": 3, "[UNK]": 4}
    words = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    own = Codec(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"))
    why = refusal(own, ["3", "4"])
    assert "give back another text" in why
    assert "choose a model" in why


def test_a_tokenizer_without_an_end_of_its_own_has_no_codec():
    words = Tokenizer(WordLevel({"8": 0}))
    endless = PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(UsageError, match="names no EOS") as caught:
        Codec(endless)
    assert "eos_token" in caught.value.fix


HOSTILE = {
    "spaces": " ",
    "one letter": "a",
    "combining marks": "\u0323\u0301",
    "mixed scripts": "aб数\U0001f600שx ",
    "spaces before words": "  x",
    "an end's spelling": "<|im_end|></s>",
}


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
@of_each_kind
def test_hostile_text_takes_time_in_proportion(kind, unit):
    """Pieces of one byte each. Four times the bytes would take sixteen times as long, if time went with the square."""
    own = codec(kind)
    times = {}
    for size in (4096, 16384):
        cut = (unit * size).encode()[:size]
        whole_characters = cut.decode(errors="ignore")
        sample = in_bytes(whole_characters)
        spent = []
        for _ in range(3):
            started = time.thread_time()
            own.from_text(sample)
            spent.append(time.thread_time() - started)
        times[size] = min(spent)
    assert times[16384] < 11 * times[4096]
