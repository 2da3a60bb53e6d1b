"""The one way from a question to token ids, the ids at which an answer ends, and which ids a model can sample."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from ftis_node.errors import UsageError
from ftis_node.tokenizer.chat import TURN_ENDS, Chat, NoChat, chat_of, instructed
from ftis_node.tokenizer.declared import declared_ends, front_ids, ids_around
from ftis_node.tokenizer.fingerprint import fingerprint

# Ends of families whose base and instruct models take part in one run, where the tokenizer marks them special.
_ENDS = frozenset(
    (
        "<|endoftext|>",
        "<|im_end|>",
        "</s>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        *TURN_ENDS,
    )
)
_OTHER = "Use the tokenizer and the generation config that belong to the model, or another model."


def message_of(template: str, question: str) -> str:
    """The user's message for a run's template: without the names of the speakers, which the chat has already."""
    speakers = "\nUser: {question}\nAssistant:"
    if template.endswith(speakers):
        template = template.removesuffix(speakers) + "\n\n{question}"
    return template.replace("{question}", question)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    question: str,
    chat: Chat | None = None,
    prefix: Sequence[int] | None = None,
) -> list[int]:
    """Token ids of a question in a run's template, as everything here asks it.

    Args:
        chat: the question is in a message of this chat, whose template writes its own BOS; None: in plain text.
        prefix: ids in front of plain text: a run's; None: those that the tokenizer puts there.
    """
    if chat is not None:
        return chat.ids(message_of(template, question))
    before, _, after = template.partition("{question}")
    if prefix is None:
        prefix = front_ids(tokenizer)
    return [*prefix, *ids_around(tokenizer, before, question, after)]


def end_ids(tokenizer: PreTrainedTokenizerBase, chat: Chat | None = None) -> tuple[int, ...]:
    """Sorted ids that end a completion: the generation config's, the tokenizer's EOS, and those of the model's family.

    Raises:
        UsageError: the tokenizer has no end token at all.
    """
    added = tokenizer.added_tokens_decoder.items()
    ids = {index for index, token in added if token.special and token.content in _ENDS}
    ids.update(declared_ends(tokenizer))
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    if chat is not None:
        ids.add(chat.end)
    if not ids:
        raise UsageError("This tokenizer has no end-of-sequence token.", "Set eos_token in its tokenizer_config.json.")
    return tuple(sorted(ids))


def usual_end(tokenizer: PreTrainedTokenizerBase, chat: Chat | None) -> int | None:
    """The one id with which this model ends its answers, asked in a chat or in plain text; None: it has none."""
    declared = declared_ends(tokenizer)
    eos: int | None = tokenizer.eos_token_id
    try:
        chat = chat or chat_of(tokenizer)
        if instructed(tokenizer, chat):
            return chat.end
    except NoChat:
        pass
    if declared and eos not in declared:
        return declared[0]
    return eos


def facts_for(tokenizer: PreTrainedTokenizerBase, chat: Chat | None, turns: int) -> dict[str, Any]:
    """The facts of a tokenizer that a run is made from and compared with, see `config.run`."""
    ends = declared_ends(tokenizer)
    front = front_ids(tokenizer)
    digest = ""
    if chat is not None:
        digest = chat.digest(turns)
    return {
        "tokenizer": fingerprint(tokenizer),
        "vocabulary": len(tokenizer),
        "eos": list(end_ids(tokenizer, chat)),
        "chat": digest,
        "prefix": list(front),
        "ends": list(ends),
        "names": {index: str(tokenizer.convert_ids_to_tokens(index)) for index in (*front, *ends)},
    }


def usable(tokenizer: PreTrainedTokenizerBase, rows: int) -> int:
    """How many ids can be sampled, 0 to this one: the tokenizer names them, and a model with so many rows has them."""
    return min(_named(tokenizer, len(tokenizer)), rows)


@lru_cache(maxsize=1)
def _named(tokenizer: PreTrainedTokenizerBase, size: int) -> int:
    """How many ids a tokenizer of this size names without a gap. A large vocabulary takes a third of a second."""
    ids = set(tokenizer.get_vocab().values())
    if max(ids) < len(ids):
        return len(ids)
    return next(index for index in range(size + 1) if index not in ids)


def refuse_special(tokenizer: PreTrainedTokenizerBase, tags: Sequence[str], model: str) -> None:
    """Raise UsageError for tags of an answer that are special tokens: no text has them, so no answer could earn."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for tag in tags:
        if tag in special:
            raise UsageError(
                f"{model} writes {tag} as a special token, which is no part of a text: no answer could earn a reward.",
                "Use another model, or a task whose own function judges answers without these tags.",
            )


def refuse_rows(tokenizer: PreTrainedTokenizerBase, rows: int, model: str) -> None:
    """Refuse a tokenizer whose words have no rows in the model, or lie beyond a gap of its ids. A few special tokens
    without a row are never sampled: all Gemma 3 models of text have one.

    Raises:
        UsageError: an ordinary word, or the end of its answers, cannot be sampled.
    """
    limit = usable(tokenizer, rows)
    added = tokenizer.added_tokens_decoder
    lacking = [(index, word) for word, index in tokenizer.get_vocab().items() if index >= limit and index not in added]
    if lacking:
        index, word = min(lacking)
        why = f"no token of its tokenizer has the id {limit}"
        if limit == rows:
            why = f"{model} has {rows} embedding rows"
        raise UsageError(f"{model} cannot write {word[:40]!r}, which has the token id {index}: {why}.", _OTHER)
    end = usual_end(tokenizer, None)
    if end is not None and end >= limit:
        word = str(tokenizer.convert_ids_to_tokens(end))
        raise UsageError(
            f"{model} can never end: its end {word[:40]!r} has the token id {end}, and it can write {limit} ids.",
            _OTHER,
        )
