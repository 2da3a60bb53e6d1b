"""Checks of the model: its download, its memory, its home's checkpoints, its tokens."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis_node.config.run import RUN_DEFAULTS, check_fit, run_for
from ftis_node.fit.memory import Workload
from ftis_node.host.proxy import refused_proxy
from ftis_node.policy.names import resolve
from ftis_node.preflight.case import Case, Checked, Finding, Findings, fail, noted, ok, warn
from ftis_node.preflight.machine import memory_limit
from ftis_node.tasks.task import CAPS
from ftis_node.text import rounded

if TYPE_CHECKING:
    from ftis_node.config.settings import Settings
    from ftis_node.fit.plan import Plan
    from ftis_node.policy.availability import Hub


def hub(case: Case) -> Findings:
    """The model: whether it is here, and if not, whether the hub would give it."""
    from ftis_node.policy.availability import Hub, ask_hub, cached, offered
    from ftis_node.policy.gguf.folder import told_of

    source = resolve(case.settings.model)
    case.hub = Hub(False, trouble="it did not answer in time")  # for later checks, if this one hangs
    case.hub = seen = ask_hub()
    why = f"the hub does not answer ({seen.trouble})"
    advice = "Mend the network (or HF_ENDPOINT, or the proxy)"
    if seen.switched_off:
        why = "HF_HUB_OFFLINE is set"
        advice = "Unset HF_HUB_OFFLINE"
    if Path(source).is_dir():
        yield ok(f"{case.settings.model} is {told_of(Path(source)) or 'a folder'} here; no hub is needed.")
        return
    if cached(source) is not None:
        text = f"{source} is in the local cache"
        if seen.answers:
            yield ok(f"{text}, and the hub answers.")
        else:
            yield warn(f"{text}; {why}.", "Nothing, as long as no other model is wanted.")
        return
    if seen.answers:
        offered(source)
        yield ok(f"{source} is not here yet; the hub answers, and gives it.")
        return
    proxy = refused_proxy()
    if proxy is not None:
        yield fail(f"{source} is not in the local cache. {proxy.what}", proxy.fix)
        return
    advice += "; or download the model elsewhere, copy the folder here and pass --model FOLDER."
    yield fail(f"{source} is not in the local cache, and {why}.", advice)


def memory(case: Case) -> Checked:
    """The memory: whether the model can be trained in it, by the plan that `join` would make."""
    from ftis_node.fit.context import refuse_run
    from ftis_node.fit.plan import slow_parts
    from ftis_node.node.remembered import settled
    from ftis_node.policy.availability import described
    from ftis_node.policy.load import choose_device
    from ftis_node.policy.measure import geometry
    from ftis_node.worker.planning import asked_in_chat, chat_expected, settle
    from ftis_node.worker.shortage import refuse_shortage

    settings = case.settings
    load = workload(case)
    with described(settings.model, _hub(case)) as folder:
        case.shape = shape = replace(geometry(folder), name=settings.model)
    yield from noted(lambda: refuse_run(settings.model, shape.context, load.completion_tokens))
    remembered = settled(case.home.checkpoints, settings.model)

    def planned(cap: int) -> tuple[Settings, Plan]:
        return settle(settings, replace(load, completion_tokens=cap), remembered, shape)

    if case.task is not None and not case.runs and chat_expected(settings):
        case.task, case.settled, case.plan = asked_in_chat(case.task, shape.context, planned)
    else:
        case.settled, case.plan = planned(load.completion_tokens)
    chosen = case.plan
    if case.status and case.status.plan:  # its own model is no longer free memory
        running = case.status.plan
        yield Finding(
            "memory",
            "ok" if running.fits else "warn",
            f"The running daemon planned with {rounded(running.memory_bytes)} of {rounded(running.budget)}.",
        )
        return
    device = choose_device(settings.devices[0])
    what = "LoRA" if chosen.lora else "full training"
    text = f"{settings.model}, {what}: {rounded(chosen.memory.total)} of {rounded(chosen.budget)} on "
    if len(settings.devices) == 1:
        text += f"the {device}."
    else:
        text += f"each of {settings.device}."
    limit = None
    if device.type == "cpu":
        limit = memory_limit()
    if not chosen.fits:
        refuse_shortage(settings, chosen)
        yield warn(
            f"{text} {chosen.reasons[-1]}",
            "Use a smaller model, LoRA or shorter completions: `ftis-node fit` says what fits.",
        )
    elif limit is not None and chosen.memory.total > limit:
        text = f"{text} But its control group may use only {rounded(limit)}."
        yield fail(text, "Give the container more memory, or use a smaller model.")
    else:
        yield ok(f"{text} {chosen.reasons[0]}")
    for slow in slow_parts(shape):
        yield warn(slow, "Fine if that is fast enough; else take a Llama, Qwen2.5 or Qwen3.")


def _hub(case: Case) -> Hub:
    """The hub's answers; it is asked once."""
    from ftis_node.policy.availability import ask_hub

    case.hub = case.hub or ask_hub()
    return case.hub


def workload(case: Case) -> Workload:
    """The caps to plan with: those of the run, else of the task; a task that peers are still to name may be long."""
    batch_groups = case.settings.batch_groups
    if case.run_file is not None:
        return Workload(**case.run_file.run.caps, batch_groups=batch_groups)
    caps = CAPS["gsm8k"]  # also those of a file
    if case.task is not None:
        caps = (case.task.prompt_tokens, case.task.completion_tokens)
    elif case.task_known:
        caps = CAPS.get(case.task_name, caps)
    return Workload(*caps, RUN_DEFAULTS["group"], batch_groups)


def tokenizer(case: Case) -> Findings:
    """The tokenizer: whether the model's token ids are the run's, and whether every prompt has room."""
    from ftis_node.policy.availability import described
    from ftis_node.policy.load import load_tokenizer
    from ftis_node.tasks.rewards import TAGS
    from ftis_node.tokenizer.asking import facts_for, refuse_rows
    from ftis_node.tokenizer.codec import text_refusal
    from ftis_node.worker.facts import facts_before
    from ftis_node.worker.formats import chat_in

    if case.starting and case.plan is None:
        return  # a model that cannot be planned is refused already, and may have no tokenizer of ours
    with described(case.settings.model, _hub(case), tokenizer=True) as folder:
        words = load_tokenizer(folder)
    if case.shape is not None:
        refuse_rows(words, case.shape.vocabulary, case.settings.model)
    task = case.task
    chat = chat_in(None, words, getattr(task, "template", ""), case.settings)
    if task is None:
        facts = facts_for(words, chat, 1)  # raises if no completion could end
        facts["turns"] = None
        facts["text_refusal"] = text_refusal(words, (), "".join(TAGS))
    else:
        if chat is not None and not case.runs:
            task = task.in_chat()
        facts = facts_before(words, task, case.settings)
    if not case.runs:
        head = f"Its fingerprint is {facts['tokenizer'][:16]}…"
        why = facts["text_refusal"] or "It can also take part in runs for models of any tokenizer."
        yield ok(f"{head}; there is no run to compare it with. {why}")
        if task is not None and case.options.bootstraps == case.options.on_lan:
            founder = ""
            if case.options.private:
                founder = case.peer_id or ""
            case.to_start = run_for(facts, founder=founder)
    ids = {}
    for origin, run_file in case.runs:
        run = run_file.run
        ids[run.id] = origin
        of_task = {"task": run.task, "data": run.data, "reward": run.reward}
        check_fit(run, of_task | facts, case.settings.model, begun=origin == "the home")
        chat = chat_in(run, words, run.template, case.settings)
        asked = "in plain text"
        if chat is not None:
            asked = "in its chat template"
        fits = f"It is that of the run of {origin}, {run.id.hex()}."
        if run.text:
            fits = f"It fits the run of {origin}, {run.id.hex()}: for models of any tokenizer."
        yield ok(f"{fits} Questions are asked {asked}.")
    if len(ids) > 1:
        yield Finding(
            "run",
            "fail",
            f"{' and '.join(ids.values())} are of different runs.",
            "A node is in one run: name another --home, or other peers.",
        )
    _refuse_rows(case, words)


def _refuse_rows(case: Case, words: Any) -> None:
    """Raise UsageError if the model has no room for a row that the run could ask. Without a task nothing is known."""
    from ftis_node.worker.formats import packets_of, prompts_of

    run = case.to_start
    if case.run_file is not None:
        run = case.run_file.run
    if case.task is None or case.shape is None or run is None:
        return
    where = (run, packets_of(run, words, case.settings, case.shape.vocabulary), case.settings.model, case.shape.context)
    for rows in filter(None, (case.task, case.own_task)):
        prompts_of(*where, rows, case.settings.eval_prompts, own=rows is case.own_task)


def weights(case: Case) -> None:
    """Load the weights, where they are here and have room, and compare what they compute with their own forward pass.

    Raises:
        UserError: they do not load, differ, or the vLLM server of the settings cannot be used.
    """
    from ftis_node.policy.availability import cached
    from ftis_node.policy.generate.vllm import KEY, Server
    from ftis_node.policy.load import load_policy

    settings = case.settled
    source = resolve(case.settings.model)
    if settings is None or case.plan is None or not case.plan.fits or case.plan.sharded:
        return
    if settings.engine == "vllm":
        Server.of(settings.vllm_url, str(case.home.vllm), os.environ.get(KEY))
    if Path(source).is_dir() or cached(source) is not None:
        load_policy(settings)
