"""The model: whether it can be had, whether it fits, whether its tokens are the run's; and the clock, by the hub's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.config.run import RUN_DEFAULTS, check_fit, load_run_file
from ftis_node.fit.memory import Workload
from ftis_node.policy.names import resolve
from ftis_node.preflight.finding import Case, Finding
from ftis_node.preflight.machine import memory_limit
from ftis_node.tasks.task import CAPS

if TYPE_CHECKING:
    from ftis_node.policy.hub import Hub

CLOCK_SECONDS = 60.0  # of difference, before it is worth a word


def hub(case: Case) -> Iterator[Finding]:
    """Whether the model is here, and if not, whether the hub would give it."""
    from ftis_node.policy.hub import ask_hub, cached, offered

    source = resolve(case.settings.model)
    case.hub = seen = ask_hub()
    why = "HF_HUB_OFFLINE is set" if seen.switched_off else f"the hub does not answer ({seen.trouble})"
    if Path(source).is_dir():
        text = f"{case.settings.model} is a folder here; no hub is needed."
        yield Finding("hub", "ok", text)
    elif cached(source) is not None:
        text = f"{source} is in the local cache"
        if seen.answers:
            yield Finding("hub", "ok", f"{text}, and the hub answers.")
        else:
            yield Finding("hub", "warn", f"{text}; {why}.", "Nothing, as long as no other model is wanted.")
    elif not seen.answers:
        advice = "Unset HF_HUB_OFFLINE" if seen.switched_off else "Mend the network (or HF_ENDPOINT, or the proxy)"
        advice += "; or download the model elsewhere, copy the folder here and pass --model FOLDER."
        yield Finding("hub", "fail", f"{source} is not in the local cache, and {why}.", advice)
    else:
        offered(source)
        yield Finding("hub", "ok", f"{source} is not here yet; the hub answers, and gives it.")


def clock(case: Case) -> Iterator[Finding]:
    """This machine's clock beside the hub's: announcements are refused if their author's is hours off."""
    from ftis_node.swarm.gossip import REPLAY_FENCE

    behind = case.hub.behind if case.hub is not None else None
    if behind is None:
        text = "Not known: only the hub could be asked for the time, and it did not tell."
        yield Finding("clock", "warn", text, "Make sure that this machine keeps its time (`timedatectl`).")
        return
    seconds = f"{abs(behind):.0f} s {'behind' if behind > 0 else 'ahead of'} the hub's clock"
    if abs(behind) <= CLOCK_SECONDS:
        yield Finding("clock", "ok", f"It agrees with the hub's ({seconds}).")
        return
    far = abs(behind) >= REPLAY_FENCE
    text = f"It is {seconds}; peers refuse what a node announces that is {REPLAY_FENCE / 3600:g} hours off."
    yield Finding("clock", "fail" if far else "warn", text, "Set it, or turn on NTP (`timedatectl set-ntp true`).")


def memory(case: Case) -> Iterator[Finding]:
    """Whether the model can be trained in the memory that there is: the plan that `join` would make."""
    from ftis_node.fit.context import refuse_run
    from ftis_node.node.checkpointing import LearnedSizes, settled
    from ftis_node.policy.hub import described
    from ftis_node.policy.load import choose_device
    from ftis_node.policy.measure import geometry
    from ftis_node.text import rounded
    from ftis_node.worker.planning import settle
    from ftis_node.worker.shortage import refuse_shortage

    settings, home = case.settings, case.home
    device = choose_device(settings.device)
    with described(settings.model, _hub(case)) as folder:
        case.shape = replace(geometry(folder), name=settings.model)
    refuse_run(settings.model, case.shape.context, workload(case).completion_tokens)
    remembered = LearnedSizes(home.plan, settings.model).sizes | settled(home.checkpoints, settings.model)
    _, case.plan = settle(settings, workload(case), remembered, case.shape)
    chosen = case.plan
    if case.status and case.status.get("plan"):  # what is free now is what it left
        running = case.status["plan"]
        need, budget = rounded(running["memory_bytes"]), rounded(running["budget"])
        text = f"The running daemon planned with {need} of {budget}."
        yield Finding("memory", "ok" if running["fits"] else "warn", text)
        return
    what = "LoRA" if chosen.lora else "full training"
    need, budget = rounded(chosen.memory.total), rounded(chosen.budget)
    text = f"{settings.model}, {what}: {need} of {budget} on the {device}."
    limit = memory_limit() if device.type == "cpu" else None
    if not chosen.fits:
        refuse_shortage(settings, workload(case), remembered, chosen, case.shape)
        advice = "Use a smaller model, LoRA or shorter completions: `ftis-node fit` says what fits."
        yield Finding("memory", "warn", f"{text} {chosen.reasons[-1]}", advice)
    elif limit is not None and chosen.memory.total > limit:
        text = f"{text} But its control group may use only {rounded(limit)}."
        yield Finding("memory", "fail", text, "Give the container more memory, or use a smaller model.")
    else:
        yield Finding("memory", "ok", f"{text} {chosen.reasons[0]}")


def _hub(case: Case) -> Hub:
    """What the hub's own check found out."""
    from ftis_node.policy.hub import Hub

    return case.hub or Hub(False, trouble="it was not asked")


def workload(case: Case) -> Workload:
    """What the plan is for: the caps of the run, if one is known, else of the task."""
    file = case.home.run_file if case.home.run_file.exists() else case.run
    if file is not None:
        run = load_run_file(file).run
        return Workload(run.prompt_tokens, run.completion_tokens, run.group, case.settings.batch_groups)
    caps = CAPS.get(case.task, CAPS["gsm8k"])  # a file's caps are its task's, and those are gsm8k's
    return Workload(*caps, RUN_DEFAULTS["group"], case.settings.batch_groups)


def tokenizer(case: Case) -> Iterator[Finding]:
    """Whether the model's token ids mean to others what they mean to it."""
    from ftis_node.policy.hub import described
    from ftis_node.policy.load import load_tokenizer
    from ftis_node.policy.tokenizer import end_ids, fingerprint

    with described(case.settings.model, _hub(case), tokenizer=True) as folder:
        words = load_tokenizer(folder)
    mark = fingerprint(words)
    end_ids(words)  # raises if a completion could never end
    for origin, file in (("the home", case.home.run_file), ("--run", case.run)):
        if file is not None and file.exists():
            case.runs.append((origin, load_run_file(file)))
    if not case.runs:
        yield Finding("tokenizer", "ok", f"Its fingerprint is {mark[:16]}…; there is no run to compare it with.")
    ids = {}
    for origin, run_file in case.runs:
        run = run_file.run
        ids[run.id] = origin
        facts = {"tokenizer": mark, "vocabulary": len(words), "data": run.data, "task": run.task}
        check_fit(run, facts | {"reward": run.reward}, case.settings.model)
        yield Finding("tokenizer", "ok", f"It is that of the run of {origin}, {run.id.hex()}.")
    if len(ids) > 1:
        advice = "A node is in one run: name another --home, or other peers."
        yield Finding("run", "fail", f"{' and '.join(ids.values())} are of different runs.", advice)
