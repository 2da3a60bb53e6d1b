"""A model's own chat template, read once: the texts before, after and between a user's messages.

Only made-up messages go through the template, which is Jinja of the model's makers, in transformers' sandbox. What
strangers wrote, a run's template, a question or what an environment says, is put between these texts afterwards, and is
never rendered.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from ftis_node.errors import UsageError
from ftis_node.tokenizer.declared import declared_ends, ids_around

Wanted = Literal["auto", "always", "never"]

_MESSAGES = ("What is 2 + 3?", "Name a river")
_ANSWER = "Five."
_OPENED = "<think>"
# Llama's templates put a date in front, today's unless told; every node must have the same one.
_DAY = "26 Jul 2024"
_ANOTHER_DAY = "27 Jul 2024"
# Ends of a turn in families whose tokenizer names another EOS, and whose base models have no chat template.
TURN_ENDS = ("<end_of_turn>", "<|end|>", "<turn|>")


class NoChat(Exception):
    """Why a tokenizer's template cannot be used."""


@dataclass(frozen=True, eq=False)
class Frame:
    """What stands around messages, and before the model's turn after each.

    before, after: around the first message; between, after: around a later one, after the end token of an answer.
    """

    tokenizer: PreTrainedTokenizerBase
    before: str
    after: str
    between: str | None

    def ids(self, message: str) -> list[int]:
        """Token ids of the prompt. Special tokens that the message spells are plain text."""
        return ids_around(self.tokenizer, self.before, message.strip(), self.after)

    def later(self, message: str) -> list[int]:
        """Token ids of a later message, with what stands around it."""
        assert self.between is not None, "`frame_of` has looked"
        return ids_around(self.tokenizer, self.between, message.strip(), self.after)


@dataclass(frozen=True, eq=False)
class Chat(Frame):
    """A model's chat template, which says what stands around messages.

    end: the id that ends the model's turn. thinking: what the template's switch `enable_thinking` says, if it has one.
    """

    end: int
    thinking: bool

    def digest(self, turns: int = 1) -> str:
        """sha256 (hex) of the texts around messages: two models with one are asked alike.

        Raises:
            UsageError: episodes have several turns, and the template says nothing fixed between them.
        """
        texts = [self.before, self.after]
        if turns > 1:
            texts.append(_between(self))
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def frame_of(tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat | None) -> Frame:
    """What stands around the messages of an episode: a chat's texts, or those of a run's template on new lines.

    Raises:
        UsageError: the chat has no text that is always between an answer and the next message.
    """
    if chat is not None:
        _between(chat)
        return chat
    before, _, after = template.partition("{question}")
    return Frame(tokenizer, before, after, "\n" + before)


def _between(chat: Chat) -> str:
    """The text between an answer and the next message. Raises UsageError if there is none that is fixed."""
    if chat.between is None:
        raise UsageError(
            "This model's chat template has no fixed text between an answer and the message that follows it.",
            "Use another model, or chat=never.",
        )
    return chat.between


def chat_of(tokenizer: PreTrainedTokenizerBase, *, thinking: bool = False) -> Chat:
    """Read a tokenizer's template.

    Raises:
        NoChat: there is none, or none that puts a message into the text as it is and ends its answer with a token.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise NoChat("it has no chat template")
    texts = {_around(tokenizer, message, thinking) for message in _MESSAGES}
    if len(texts) > 1:
        raise NoChat("what its chat template puts around a message depends on the message")
    before, after = texts.pop()
    end, token = _end(tokenizer, thinking)
    found = {_from_answer_to(tokenizer, message, after, token, thinking) for message in _MESSAGES}
    between = None
    if len(found) == 1:
        between = found.pop()
    trimmed = after.rstrip()
    if trimmed.endswith(_OPENED):  # the model writes the tag itself, so that its whole answer is its own
        after = trimmed.removesuffix(_OPENED)
    return Chat(
        tokenizer,
        before,
        after,
        between,
        end,
        thinking,
    )


def chat_wanted(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    wanted: Wanted,
    *,
    thinking: bool,
) -> Chat | None:
    """The chat in which this model is asked, where that is its node's own choice; None: in plain text.

    wanted: `auto` is a chat for an instruct model, and plain text for a base model and for a template that is nothing
    but the question.

    Raises:
        UsageError: a chat is wanted in any case, and there is none.
    """
    if wanted == "never" or (wanted == "auto" and template == "{question}"):
        return None
    try:
        chat = chat_of(tokenizer, thinking=thinking)
    except NoChat as error:
        if wanted == "always":
            raise UsageError(
                f"This model cannot be asked in a chat: {error}.", "Leave out chat=always, or use an instruct model."
            ) from None
        return None
    if wanted == "always" or instructed(tokenizer, chat):
        return chat
    return None


def chat_with(tokenizer: PreTrainedTokenizerBase, digest: str, turns: int = 1) -> Chat:
    """The chat of that digest, with its switch as it must be, for episodes of so many turns.

    Raises:
        UsageError: this model's chats are others.
    """
    why = "its chat template makes other prompts"
    for thinking in (False, True):
        try:
            chat = chat_of(tokenizer, thinking=thinking)
            if chat.digest(turns) == digest:
                return chat
        except NoChat as error:
            why = str(error)
            break
        except UsageError as error:
            why = error.what.rstrip(".")
            break
    raise UsageError(
        f"The run's questions are put in a chat of digest {digest[:16]}…, which this model has not: {why}.",
        "Use the instruct model that the run was made for (see `ftis-node run show`), or join a run for models of any "
        "tokenizer, in which each model is asked in its own way.",
    )


def instructed(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> bool:
    """Whether the model was trained to end its turns. Base models may have a family's template, and another EOS."""
    ends = (tokenizer.eos_token_id, *declared_ends(tokenizer))
    return chat.end in ends or tokenizer.convert_ids_to_tokens(chat.end) in TURN_ENDS


def _around(tokenizer: PreTrainedTokenizerBase, message: str, thinking: bool) -> tuple[str, str]:
    """What a template puts before a message and after it, up to where the model writes.

    Raises:
        NoChat: it does not put the message there as it is, or writes a date that no node can set.
    """
    turn = [{"role": "user", "content": message}]
    text = _rendered(tokenizer, turn, thinking, prompt=True)
    dated = "strftime_now" in str(tokenizer.chat_template)
    if dated and _rendered(tokenizer, turn, thinking, prompt=True, day=_ANOTHER_DAY) == text:
        raise NoChat("its chat template writes today's date, and cannot be told another")
    if text.count(message) != 1:
        raise NoChat("its chat template does not put a message into the text as it is")
    before, _, after = text.partition(message)
    return before, after


def _from_answer_to(
    tokenizer: PreTrainedTokenizerBase,
    message: str,
    after: str,
    end: str,
    thinking: bool,
) -> str | None:
    """What stands between an answer's end token and this message; None where something else is after that.

    after: what must follow the message. end: the end token's text.
    """
    turns = [
        {"role": "user", "content": "A first question"},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": message},
    ]
    try:
        text = _rendered(tokenizer, turns, thinking, prompt=True)
    except NoChat:  # some refuse a second message
        return None
    answered, found, rest = text.rpartition(message)
    between = answered.rpartition(_ANSWER)[2].lstrip()
    if found and rest == after and between.startswith(end):
        return between.removeprefix(end)
    return None


def _end(tokenizer: PreTrainedTokenizerBase, thinking: bool) -> tuple[int, str]:
    """The first token after an answer, its id and its text; where a template writes none, the one that begins the next
    turn (GLM).

    Raises:
        NoChat: no special token is there.
    """
    question = {"role": "user", "content": _MESSAGES[0]}
    answer = {"role": "assistant", "content": _ANSWER}
    later = {"role": "user", "content": _MESSAGES[1]}
    for turns in ([question, answer], [question, answer, later]):
        text = _rendered(tokenizer, turns, thinking, prompt=False)
        rest = text.rpartition(_ANSWER)[2].lstrip()
        if rest:
            break
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    for content in sorted(special, key=len, reverse=True):
        if rest.startswith(content):
            return int(special[content]), content
    raise NoChat("its chat template ends an answer with no token of its own")


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    thinking: bool,
    *,
    prompt: bool,
    day: str = _DAY,
) -> str:
    """The text that a template makes of messages. prompt: with what begins the model's turn. day: of its date.

    Raises:
        NoChat: it fails, or makes no text.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=prompt,
            enable_thinking=thinking,
            date_string=day,
        )
    except Exception as error:  # a template may fail in any way
        raise NoChat(f"its chat template fails ({type(error).__name__})") from error
    if not isinstance(text, str):
        raise NoChat("its chat template gives no text")
    return text
