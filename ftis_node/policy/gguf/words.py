"""The tokenizer of a GGUF file, such that it has the fingerprint of the one from a hub."""

import json
import re
from pathlib import Path
from typing import Any

from ftis_node.policy.gguf.header import GgufHeader, UnusableFile
from ftis_node.tokenizer.fingerprint import merges_of

LISTS = (
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.scores",
)
# The small files of a model's folder that `tokenizer=` takes.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
# Kinds of tokens: special ones; others that are never split; rows without one; bytes.
_PLAIN = 1
_CONTROL = 3
_OWN = 4
_UNUSED = 5
_BYTE = 6
_NEVER = -1000.0  # the score of what no merge makes
_LONGEST = 1024  # characters of a token

_PARTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _PARTS % ""
_LLAMA = _PARTS % "{1,3}"
# How text is split before merges, by llama.cpp's names: a pattern, or how ByteLevel itself does it.
_SPLITS = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3"), _LLAMA),
    **dict.fromkeys(("gpt-2", "default", "smollm"), ""),
}
# Names that look special to llama.cpp's converter, and are not in Qwen's own tokenizers.
_NOT_SPECIAL = {"qwen2": re.compile(r"<\|(fim_(prefix|middle|suffix|pad)|repo_name|file_sep)\|>")}
# Tokens that end a text or a turn wherever they are special, as in llama.cpp.
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
)
_IMAGE = "<image_soft_token>"  # Gemma 3's tokenizer has it, beyond the rows of the models for text
_GEMMA_ROWS = 262_144
_AS_IT_IS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)  # how a word of its own is found
Properties = dict[str, Any]  # by their names: of a GGUF file, or of tokenizer.json


def ends_of(header: GgufHeader) -> list[int]:
    """Ids that end a completion: the file's own, its end first, and special ones of known names; each once.

    They may be none. config.json gets them in this order, and `asking.usual_end` takes the first.
    """
    facts = header.facts
    own = [facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds = facts.get("tokenizer.ggml.token_type") or []
    words = facts.get("tokenizer.ggml.tokens") or []
    ends = [place for place in own if isinstance(place, int)]
    for place, (word, kind) in enumerate(zip(words, kinds, strict=False)):
        if word in _ENDS and kind == _CONTROL:
            ends.append(place)
    return list(dict.fromkeys(ends))


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into a folder, over those that are there.

    Raises:
        UnusableFile: the file has none, or one that is not known here.
    """
    facts = header.facts
    words = facts.get("tokenizer.ggml.tokens")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise UnusableFile("it has no tokenizer")
    if max(map(len, words)) > _LONGEST:
        raise UnusableFile(f"it has a token of more than {_LONGEST} characters")
    kind = facts.get("tokenizer.ggml.model")
    if kind == "gpt2":
        state = _by_bytes(facts, words)
    elif kind == "llama":
        state = _by_pieces(facts, words)
    else:
        raise UnusableFile(f"its tokenizer is of the kind {kind!a}, which is not known here")
    text = json.dumps(state, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(_told(header, words), indent=1), encoding="utf-8")


def _told(header: GgufHeader, words: list[str]) -> Properties:
    """What tokenizer_config.json says."""
    facts = header.facts
    template = facts.get("tokenizer.chat_template")
    told: Properties = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.fact("context_length"),
    }
    if isinstance(template, str):
        told["chat_template"] = template
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        place = facts.get(f"tokenizer.ggml.{key}_token_id")
        if name == "bos" and not _begins(facts) and "bos_token" not in str(template):
            continue
        if isinstance(place, int) and 0 <= place < len(words):
            told[f"{name}_token"] = words[place]
    return told


def _begins(facts: Properties) -> bool:
    """Whether a special token, the BOS, is put in front of every text."""
    byte_level = facts.get("tokenizer.ggml.model") == "gpt2"
    by_itself = not byte_level or facts.get("tokenizer.ggml.pre") in ("llama3", "llama-v3", "llama-bpe")
    return bool(facts.get("tokenizer.ggml.add_bos_token", by_itself))


def _added(facts: Properties, words: list[str]) -> list[Properties]:
    """The tokens that are never split, as tokenizer.json has them.

    Raises:
        UnusableFile: the file does not say which they are.
    """
    kinds = facts.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list):
        raise UnusableFile("it does not say which of its tokens are special")
    ordinary = _NOT_SPECIAL.get(str(facts.get("tokenizer.ggml.pre")))
    added = []
    for place, (word, kind) in enumerate(zip(words, kinds, strict=False)):
        if kind in (_CONTROL, _OWN) and word and not _filler(place, word):
            special = kind == _CONTROL and not (ordinary and ordinary.fullmatch(word))
            added.append({"id": place, "content": word, **_AS_IT_IS, "special": special})
    return added


def _filler(place: int, word: str) -> bool:
    """Whether the converter made the word up, because the model has more rows than its tokenizer has ids."""
    return word == f"[PAD{place}]"


def _template(facts: Properties, words: list[str]) -> Properties:
    """What is put around a text, as tokenizer.json has it: the BOS in front, if there is to be one; nothing behind."""
    place = facts.get("tokenizer.ggml.bos_token_id")
    text: list[Properties] = [{"Sequence": {"id": "A", "type_id": 0}}]
    tokens: Properties = {}
    if _begins(facts) and isinstance(place, int) and 0 <= place < len(words):
        first = words[place]
        text = [{"SpecialToken": {"id": first, "type_id": 0}}, *text]
        tokens = {first: {"id": first, "ids": [place], "tokens": [first]}}
    pair = [*text, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": text,
        "pair": pair,
        "special_tokens": tokens,
    }


def _by_bytes(facts: Properties, words: list[str]) -> Properties:
    """The content of tokenizer.json for merges of bytes, as in GPT-2. words: by id.

    Raises:
        UnusableFile: it splits texts in an unknown way, or lacks merges or kinds of tokens.
    """
    before = facts.get("tokenizer.ggml.pre", "default")
    if before not in _SPLITS:
        raise UnusableFile(f"its tokenizer splits texts in a way {before!a} that is not known here")
    merges = facts.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise UnusableFile("its tokenizer has no merges")
    added = _added(facts, words)
    pattern = _SPLITS[before]
    outside = {entry["id"] for entry in added}
    vocabulary = {word: n for n, word in enumerate(words) if n not in outside and not _filler(n, word)}
    split: Properties = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": not pattern,
    }
    first: Properties = {}
    if pattern:
        first = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
    elif before == "smollm":
        first = {"type": "Digits", "individual_digits": True}
    if first:
        split = {"type": "Sequence", "pretokenizers": [first, split]}
    normalizer: Properties | None = None
    if before == "qwen2":
        normalizer = {"type": "NFC"}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": split,
        "post_processor": _template(facts, words),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [merge.split(" ", 1) for merge in merges],
            "ignore_merges": pattern == _LLAMA,
        },
    }


def _by_pieces(facts: Properties, words: list[str]) -> Properties:
    """The content of tokenizer.json for pieces of SentencePiece: transformers knows how each family's are merged.

    Raises:
        UnusableFile: it is damaged, or transformers is too old.
    """
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer
    except ImportError:
        raise UnusableFile("its tokenizer needs transformers 5.20 or newer") from None
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in facts.items()}
    wanted: Properties = {"tokenizer_type": "llama"}
    wanted |= {name: given[name] for name in ("tokens", "scores", "token_type", "merges") if name in given}
    family = facts["general.architecture"]
    try:
        made, _ = convert_gguf_tokenizer(family, wanted)
    except (KeyError, ValueError, TypeError) as error:
        raise UnusableFile(f"its tokenizer is damaged ({type(error).__name__})") from None
    state: Properties = json.loads(made.to_str())
    state["post_processor"] = _template(facts, words)
    if family == "gemma3" and len(words) == _GEMMA_ROWS:
        state["added_tokens"].append({"id": _GEMMA_ROWS, "content": _IMAGE, **_AS_IT_IS, "special": True})
    return state


def spelled(state: Properties, rows: int, *, spaced: bool) -> Properties:
    """The facts of a tokenizer as a GGUF file has them, with their whole keys; `write_tokenizer` the other way round.

    Nothing is refused: `metadata` reads them again and compares.

    Args:
        state: the content of tokenizer.json. rows: of the model's embedding; those without a word get one.
        spaced: a text gets a space in front.
    """
    model = state["model"]
    added = {entry["id"]: entry for entry in state["added_tokens"]}
    known = {place: word for word, place in model["vocab"].items()}
    known |= {place: entry["content"] for place, entry in added.items()}
    words = [known.get(place, f"[PAD{place}]") for place in range(rows)]
    merges = merges_of(model)
    kinds = []
    for place, word in enumerate(words):
        kind = _UNUSED
        if place in known:
            kind = _PLAIN
        if place in added:
            kind = _OWN
            if added[place]["special"]:
                kind = _CONTROL
        elif model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", word):
            kind = _BYTE
        kinds.append(kind)
    facts: Properties = {"tokens": words, "token_type": kinds}
    before = _split_of(state)
    if before is not None:
        facts |= {"model": "gpt2", "pre": before, "merges": merges}
    else:  # merges of pieces are told by scores: the sooner the higher
        ranks: dict[str, float] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), -float(rank))
        scores = [_NEVER if place in added else ranks.get(word, 0.0) for place, word in enumerate(words)]
        facts |= {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": spaced}
    return {f"tokenizer.ggml.{key}": value for key, value in facts.items()}


def _split_of(state: Properties) -> str | None:
    """The name that llama.cpp has for how a tokenizer splits texts into bytes' words; None: none that is known here.

    Of several names for one way it is the first of `_SPLITS`.
    """
    for name in _SPLITS:
        empty = {"tokenizer.ggml.pre": name, "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": []}
        if _splitting(_by_bytes(empty, [])) == _splitting(state):
            return name
    return None


def _splitting(state: Properties) -> list[Any]:
    """What of tokenizer.json says how it splits texts; compare it by ==."""
    return [state["model"].get("ignore_merges", False), state["normalizer"], state["pre_tokenizer"]]
