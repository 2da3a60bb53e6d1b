"""Facts of a tokenizer and a task, for the node: a new run is made from them, before the model is loaded."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from ftis_node.config.settings import Settings
from ftis_node.policy.load import load_tokenizer
from ftis_node.tasks import Task
from ftis_node.tasks.rewards import TAGS, tags_of
from ftis_node.tokenizer.asking import facts_for, refuse_special
from ftis_node.tokenizer.chat import Wanted, chat_wanted
from ftis_node.tokenizer.codec import text_refusal
from ftis_node.tokenizer.fingerprint import backend_of, refuse_unwritable, unwritable
from ftis_node.worker.formats import chat_in


def facts_of_run(
    task: Task,
    model: str,
    wanted: Wanted = "auto",
    *,
    thinking: bool = False,
) -> dict[str, Any]:
    """What a new run of a task for this model's tokenizer is made from (`config.run.run_for`).

    Args:
        wanted, thinking: see `chat_wanted`.

    Raises:
        UserError: the model's tokenizer cannot be found, or not be asked in that way.
    """
    tokenizer = load_tokenizer(model)
    chat = chat_wanted(tokenizer, task.template, wanted, thinking=thinking)
    if chat is not None:
        task = task.in_chat()
    return task.facts() | facts_for(tokenizer, chat, task.turns)


def facts_before(tokenizer: PreTrainedTokenizerBase, task: Task, settings: Settings) -> dict[str, Any]:
    """What `ModelFacts` says of a tokenizer and a task, known before the model is loaded. Raises UsageError as
    `chat_in`, or as `refuse_unwritable`."""
    tags = "".join(TAGS)
    prompts = [task.prompt(row) for row in task.train]
    backend = backend_of(tokenizer)
    refuse_unwritable(backend, settings.model, prompts)
    refuse_special(tokenizer, tags_of(task.reward), settings.model)
    letters = "".join(sorted({letter for row in task.train for letter in row.question}))
    asking = task.template.replace("{question}", "")
    chat = chat_in(None, tokenizer, task.template, settings)
    return {
        **task.facts(),
        **facts_for(tokenizer, chat, task.turns),
        "unwritable": unwritable(backend, letters) + unwritable(backend, asking + tags),
        "text_refusal": text_refusal(tokenizer, prompts, tags),
    }
