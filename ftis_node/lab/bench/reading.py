"""The cost of reading between tokenizers: a text in the author's pieces, in the reader's own ids, and in chunks."""

import random
import statistics
import time
import timeit
from collections.abc import Callable, Mapping
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ftis_node.lab.bench.packets import GROUP
from ftis_node.packet import Completion
from ftis_node.policy.load import load_tokenizer
from ftis_node.tokenizer.codec import Codec, align

BUILT_IN = ("tiny-chars", "tiny-numbers", "tiny-bpe")
_SENTENCES = (
    "Natalia sold {} clips in April and {} more in May. ",
    "So the baker needs {} + {} = {} eggs, which can't be bought in boxes of 12.\n",
    "Each of the {} children pays ${}.50, hence {} dollars altogether. ",
    "After {} hours the train is {} miles away; it still has to go {} miles.\n",
    "<think>{}-{}={}</think>\n<answer>{}</answer> ",
)


def bench_reading(tokens: int, repeats: int, tokenizers: Mapping[str, PreTrainedTokenizerBase]) -> dict[str, float]:
    """Microseconds of CPU for each of the author's tokens (median over `repeats`), of the slowest pair for each figure.

    A group has 12 completions of so many tokens. spell: the author's ids become text and piece lengths, and the
    reader encodes the text to own ids. align: chunks from both cuts. read: all that a reader does with a text, from
    bytes to a sample with chunks. A node does none of this on its event loop: it runs in the compute process, and
    there `worker.formats` calls it.

    Raises:
        RuntimeError: a reader cannot read a text, or reads it in its author's cut, so the times would mean nothing.
    """
    codecs = [Codec(tokenizer) for tokenizer in tokenizers.values()]
    slowest: dict[str, float] = {}
    for author, reader in permutations(codecs, 2):
        for key, cost in _pair(author, reader, tokens, repeats).items():
            slowest[key] = max(slowest.get(key, 0.0), cost)
    return slowest


def built_in_tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """Tokenizers of the models of `demo --mixed`, by name."""
    return {name: load_tokenizer(name) for name in BUILT_IN}


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of a call in CPU time of this thread, so that other work on the machine does not count."""
    seconds = timeit.repeat(
        call,
        setup="gc.enable()",
        timer=time.thread_time,
        repeat=repeats,
        number=1,
    )
    return statistics.median(seconds) * 1e6


def _pair(author: Codec, reader: Codec, tokens: int, repeats: int) -> dict[str, float]:
    """As `bench_reading`, of one author and one reader."""
    group = [_completion(author, tokens, seed) for seed in range(GROUP)]
    sent = [author.to_text(completion) for completion in group]
    texts = [completion.text.decode() for completion in sent]
    cuts = [_cut(reader, text) for text in texts]
    for completion in sent:
        read = reader.from_text(completion)
        if read is None or read.chunks is None:
            raise RuntimeError("the benchmark's own text cannot be read in chunks")

    def spell() -> None:
        for completion in group:
            author.to_text(completion)
        for text in texts:
            reader.encode(text)

    def aligned() -> None:
        for completion, cut in zip(sent, cuts, strict=True):
            align(completion.pieces, completion.logprobs, cut)

    def read_all() -> None:
        for completion in sent:
            reader.from_text(completion)

    in_group = GROUP * tokens
    return {
        "spell_us_per_token": median_us(spell, repeats) / in_group,
        "align_us_per_token": median_us(aligned, repeats) / in_group,
        "read_us_per_token": median_us(read_all, repeats) / in_group,
    }


def _cut(reader: Codec, text: str) -> NDArray[np.int64]:
    """Bytes of each of the reader's own tokens of a text; a codec keeps these sizes."""
    sizes = []
    for index in reader.encode(text).tolist():
        sizes.append(len(reader.decode(np.array([index]))))
    return np.array(sizes, np.int64)


def _completion(codec: Codec, tokens: int, seed: int) -> Completion:
    """So many tokens of a text with numbers and tags, the end included; the same for the same seed and codec."""
    rng = random.Random(seed)
    text = ""
    ids = codec.encode(text)
    while len(ids) < tokens:
        sentence = rng.choice(_SENTENCES)
        places = sentence.count("{}")
        numbers = [rng.randrange(2, 400) for _ in range(places)]
        text += sentence.format(*numbers)
        ids = codec.encode(text)
    ended = np.append(ids[: tokens - 1], codec.end)
    claims = np.full(tokens, -0.5, np.float32)
    return Completion(ended.astype(np.uint32), claims, finished=True)
