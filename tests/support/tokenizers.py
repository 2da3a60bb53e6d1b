"""Small tokenizers of the kinds that models have, made on the fly, and codecs of all kinds."""

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from ftis_node.tokenizer.codec import Codec
from tests.support.small_models import GPT2, QWEN, tiny_tokenizer

CORPUS = (
    "Natalia sold 48 / 2 = 24 clips in May, and 48 + 24 = 72 clips altogether in April and May.",
    "<think>so 8 - 3 = 5</think>\n<answer>5</answer>",
    "def f(x):\n    return [x, x + 1]  # done\n",
    "The café's naïve owner said: it can't cost more than 3.50 dollars.",
) * 3
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = ("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>")


@cache
def speaker(template: str | None, eos: str = "<|im_end|>") -> Any:
    """A byte-level tokenizer without merges, with the special tokens of two families and this template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(TURNS))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token="<bos>")
    made.chat_template = template
    return made


def _wrapped(backend: Tokenizer) -> Any:
    backend.add_special_tokens(SPECIALS)
    backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def _metaspace() -> Any:
    return pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")


@cache
def sentencepiece_bpe(*, normalizing: bool) -> Any:
    """As Llama 2 and Mistral: BPE that falls back to bytes, with a space before the text by Prepend or by Metaspace."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = _metaspace()
    trained.train_from_iterator(CORPUS, BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    words = dict.fromkeys((*SPECIALS, *BYTES, *sorted(model["vocab"], key=model["vocab"].get)))
    merges = [tuple(merge) for merge in model["merges"]]
    made = Tokenizer(
        BPE({word: place for place, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    if normalizing:
        made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    steps = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    made.decoder = decoders.Sequence(steps)
    return _wrapped(made)


@cache
def sentencepiece_unigram() -> Any:
    """As T5's kind, but falling back to bytes and keeping all spaces."""
    trained = Tokenizer(Unigram())
    trained.pre_tokenizer = _metaspace()
    unknown = {"special_tokens": ["<unk>"], "unk_token": "<unk>"}
    trained.train_from_iterator(CORPUS, UnigramTrainer(vocab_size=200, show_progress=False, **unknown))
    learnt = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"] if entry[0] != "<unk>"]
    words = [(word, 0.0) for word in SPECIALS] + [(word, -100.0) for word in BYTES] + learnt
    made = Tokenizer(Unigram(words, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = _metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(SPACE)])
    return _wrapped(made)


@cache
def byte_level() -> Any:
    """As GPT-2 and Llama 3, with the space before a text that RoBERTa puts there."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, BpeTrainer(vocab_size=340, show_progress=False, initial_alphabet=letters))
    made.decoder = decoders.ByteLevel()
    return _wrapped(made)


@cache
def unigram_without_decoder() -> Any:
    """A unigram over plain text: letters of a small alphabet and a few words of them."""
    words = [*SPECIALS, *"abcdefghijklmnopqrstuvwxyz0123456789 .,=+-/<>\n", "the ", "ing", "answer", "12", " = "]
    return _wrapped(Tokenizer(Unigram([(word, -len(words) + len(word)) for word in words], unk_id=0)))


@cache
def words_without_spaces() -> Any:
    """Whole words, cut at spaces that no id gives back."""
    words = [*SPECIALS, "8", "-", "3", "=", "5", "so"]
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return _wrapped(made)


SMALL = {
    "26 words": tiny_tokenizer,
    "prepending": lambda: sentencepiece_bpe(normalizing=True),
    "metaspace": lambda: sentencepiece_bpe(normalizing=False),
    "unigram": sentencepiece_unigram,
    "byte-level": byte_level,
    "no decoder": unigram_without_decoder,
}
REAL = {"qwen": (QWEN, AutoTokenizer), "gpt2": (GPT2, GPT2Tokenizer)}
KINDS = [*SMALL, *(name for name, (folder, _) in REAL.items() if folder.is_dir())]
"""Names for `codec`: the small ones, and of the real ones those that are there."""


@cache
def tokenizer(kind: str) -> Any:
    return SMALL[kind]() if kind in SMALL else REAL[kind][1].from_pretrained(REAL[kind][0])


@cache
def codec(kind: str) -> Codec:
    return Codec(tokenizer(kind))
