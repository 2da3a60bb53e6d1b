"""Facts about a loaded model and task, for the node."""

from dataclasses import replace
from typing import Any

import torch

from ftis_node.config.settings import Settings
from ftis_node.fit.plan import Plan
from ftis_node.policy.load import load_tokenizer
from ftis_node.policy.policy import Policy
from ftis_node.tasks import Task
from ftis_node.tasks.rewards import TAGS, tags_of
from ftis_node.tokenizer.asking import facts_for, refuse_special
from ftis_node.tokenizer.chat import Wanted, chat_wanted
from ftis_node.tokenizer.codec import text_refusal
from ftis_node.tokenizer.fingerprint import backend_of, refuse_unwritable, unwritable
from ftis_node.worker.formats import chat_in
from ftis_node.worker.messages import ModelFacts


def facts_of_run(task: Task, model: str, wanted: Wanted = "auto", *, thinking: bool = False) -> dict[str, Any]:
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


def facts_of(policy: Policy, task: Task, own: Task | None, settings: Settings, plan: Plan) -> ModelFacts:
    """The facts of a policy and a task; own: of the owner's rows. Raises UsageError as `chat_in`, or as
    `refuse_unwritable`."""
    tokenizer = policy.tokenizer
    tags = "".join(TAGS)
    prompts = [task.prompt(row) for row in task.train]
    backend = backend_of(tokenizer)
    refuse_unwritable(backend, policy.name, prompts)
    refuse_special(tokenizer, tags_of(task.reward), policy.name)
    letters = "".join(sorted({letter for row in task.train for letter in row.question}))
    asking = task.template.replace("{question}", "")
    chat = chat_in(None, tokenizer, task.template, settings)
    return ModelFacts(
        **task.facts(),
        **facts_for(tokenizer, chat, task.turns),
        unwritable=unwritable(backend, letters) + unwritable(backend, asking + tags),
        text_refusal=text_refusal(tokenizer, prompts, tags),
        parameters=policy.parameters(),
        checkpoint_bytes=4 * policy.trainable() + plan.memory.optimiser,
        kind=policy.kind,
        device=str(policy.device),
        threads=torch.get_num_threads(),
        settings=settings,
        rows=len(task.train),
        held_out=len(task.held_out),
        own_rows=len(own.train) if own is not None else 0,
        plan=replace(plan, reasons=(*plan.reasons, policy.way)),
    )
