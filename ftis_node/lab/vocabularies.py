"""Tokenizers of the built-in models: words, and three others that cut the same texts elsewhere."""

import json
import random
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ftis_node.lab.teacher import Teacher
from ftis_node.tasks.arithmetic import arithmetic

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PAD = "<|pad|>"
END = "<|end|>"
WORDS = (PAD, END, "\n", *TAGS, " ", *"0123456789", *"+-=*/(),")

# Llama-3's pattern, but for numbers of two digits: `><` and `</` are pieces of their own, and `</think>` is none.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # one character for each of the 256 bytes
_MERGED = 320  # ids
_LONGEST = len("</think><answer>1")  # characters of a token
_TEXTS = 4000  # to learn from


def words() -> Any:
    """A tokenizer of 26 words: tags are ordinary words, numbers are digits, and decoding gives back the very text.

    It is Qwen2's own kind, a byte-level BPE, without merges: transformers loads that class for a Qwen2 model whatever
    the tokenizer's files say, and would spoil any other (spaces would be lost).
    """
    alphabet = {" ": "Ġ", "\n": "Ċ"}  # how byte-level BPE writes them
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={alphabet.get(word, word): i for i, word in enumerate(WORDS)},
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return tokenizer


def characters() -> Any:
    """258 ids: every byte is a token, so tags are spelled letter by letter."""
    return _byte_level([])


def numbers() -> Any:
    """361 ids: the numbers 0 to 99 are tokens, and `<think`, `</`, `><` are, where Llama-3 cuts tags."""
    pairs = [(tens, ones) for tens in "123456789" for ones in "0123456789"]
    for word in ("think", "answer"):
        pairs += [(word[:end], word[end]) for end in range(1, len(word))]
    pairs += [("<", "think"), ("<", "answer"), ("<", "/"), (">", "<")]
    return _byte_level(pairs, _PIECES)


def merged() -> Any:
    """320 ids: merges learned from a teacher's completions as they are, so that a token may span tags and digits. It
    learns them anew at each call, and always the same."""
    rng = random.Random("merged")
    teacher = Teacher(rng, forgetful=3)
    examples = rng.choices(arithmetic().train, k=_TEXTS)
    texts = [teacher.completion(example.question) for example in examples]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_MERGED - 2,  # those for padding and the end come on top
        max_token_length=_LONGEST,
        initial_alphabet=_BYTES,
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    return _byte_level(list(map(tuple, merges)))


def _byte_level(merges: list[tuple[str, str]], pieces: str = "") -> Any:
    """A byte-level BPE that gives back every byte; `pieces` is a pattern whose matches no merge crosses."""
    tokens = [*_BYTES, *map("".join, merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if pieces:
        steps.insert(0, pre_tokenizers.Split(Regex(pieces), behavior="isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


TOKENIZERS = {
    "words": words,
    "chars": characters,
    "numbers": numbers,
    "bpe": merged,
}
"""By the name that a recipe gives."""
