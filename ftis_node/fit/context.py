"""The tokens that a model takes, and the prompts of a task that do not fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ftis_node.errors import UsageError

_BEGINNING = 80  # letters of a question that a message shows
_LONGER = (
    "Take the long rows out of the data; or write a run file (`ftis-node run new`), set a larger {} in it, and begin "
    "that run with `ftis-node join --run FILE` in a fresh --home."
)


@dataclass(frozen=True)
class Context:
    """The tokens that a prompt and its completion may have together; `why` says what limits the model.

    rows: ids from this one on have no row in the embedding.
    """

    tokens: float
    why: str = ""
    rows: float = float("inf")


def context_of(config: Any) -> Context:
    """The context of the model that `config` describes.

    transformers computes the rotary frequencies of `dynamic` and `longrope` anew from the longest sequence of a batch,
    and `dynamic` remembers it. Beyond the length at which they begin to change, a log-prob would depend on the rest of
    its batch, on earlier computations, and on padding. So the context of such a model ends there.
    """
    text = config.get_text_config()
    tokens = getattr(text, "max_position_embeddings", None) or float("inf")
    limits = [Context(tokens, f"has room for {tokens}")]
    for rotary in rotaries(text):
        if rotary.get("rope_type") == "longrope":
            steady = rotary.get("original_max_position_embeddings") or tokens
            limits.append(Context(steady, f"changes its rotary frequencies beyond {steady} tokens (longrope)"))
    least = min(limits, key=lambda limit: limit.tokens)
    return replace(least, rows=getattr(text, "vocab_size", None) or float("inf"))


def rotaries(config: Any) -> list[Mapping[str, Any]]:
    """The parameters of each rotary embedding of a model of text: one for all layers, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [one for one in parameters.values() if isinstance(one, Mapping)]
    return by_kind or [parameters]


def refuse_run(name: str, context: Context, completion_tokens: int) -> None:
    """Refuse a run whose completions alone fill the context, before any weights are loaded.

    Raises:
        UsageError: a completion alone may be as long as the context.
    """
    if completion_tokens >= context.tokens:
        raise UsageError(
            f"The run has completions of up to {completion_tokens} tokens, but {name} {context.why}.",
            "Use a model with a longer context, or start a run with a smaller completion_tokens.",
        )


class Row(Protocol):
    """A row of data; place: where it is from, or ""."""

    @property
    def question(self) -> str: ...

    @property
    def place(self) -> str: ...


def refuse_long_prompts(prompts: Sequence[str], prompt_bytes: int, rows: Sequence[Row], data: str) -> None:
    """Refuse a prompt that is longer in UTF-8 than a text run allows. rows, data: as for `refuse_prompts`.

    Raises:
        UsageError: one is; the longest is named.
    """
    sizes = [len(prompt.encode()) for prompt in prompts]
    if sizes and max(sizes) > prompt_bytes:
        raise UsageError(
            f"{_named(rows, sizes.index(max(sizes)), data)} is a prompt of {max(sizes)} bytes, and the run allows "
            f"{prompt_bytes}.",
            _LONGER.format("prompt_bytes"),
        )


def refuse_prompts(
    name: str,
    context: Context,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Row],
    data: str,
    completion_tokens: int,
    prompt_tokens: float = float("inf"),
    *,
    shown: bool = True,
    spelled: Callable[[int], str] = str,
    shorter: str = "Use a model with a longer context, or start a run with a smaller completion_tokens.",
) -> None:
    """Refuse prompts that cannot be answered. None is cut or left out: rows are the same on every node.

    Args:
        name, context: of the model.
        prompts: token ids; rows: what they were made of; data: what these are, in words.
        shown: a message may quote a row. spelled: a token id for people.
        completion_tokens, prompt_tokens: caps.
        shorter: what to do about prompts that have no room in the context.

    Raises:
        UsageError: one has an id without a row, is empty, or longer than its cap, or has no room for a completion; the
            first, or the longest one is named.
    """
    if not prompts:
        return
    for row, prompt in enumerate(prompts):
        highest = max(prompt, default=0)
        if highest >= context.rows:
            token = f"the token {spelled(highest)!r} (id {highest})"
            raise UsageError(
                f"{_named(rows, row, data)} has {token}, for which {name} has no row.",
                "Take such rows out of the data, or use another model.",
            )
    lengths = [len(prompt) for prompt in prompts]
    row = lengths.index(0) if 0 in lengths else lengths.index(max(lengths))
    longest = lengths[row]
    named = _named(rows, row, data)
    told = ""
    if shown:
        beginning = rows[row].question
        if len(beginning) > _BEGINNING:
            beginning = beginning[:_BEGINNING] + "…"
        told = f": {beginning!r}"
    if longest == 0:
        raise UsageError(
            f"{named} has no token in the tokenizer of {name}{told}.",
            "Take such rows out of the data, or use a model with another tokenizer.",
        )
    if longest > prompt_tokens:
        raise UsageError(
            f"{named} is a prompt of {longest} tokens, and the run allows {prompt_tokens}{told}.",
            _LONGER.format("prompt_tokens"),
        )
    if longest + completion_tokens > context.tokens:
        raise UsageError(
            f"{named} is a prompt of {longest} tokens and a completion may have {completion_tokens}, but "
            f"{name} {context.why}{told}.",
            shorter,
        )


def _named(rows: Sequence[Row], row: int, data: str) -> str:
    place = rows[row].place
    return f"{place} ({data})" if place else f"Row {row + 1} of {data}"
