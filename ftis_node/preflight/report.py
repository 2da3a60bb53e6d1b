"""The report of `join --dry-run`: what would be, and what would leave the machine; as JSON, or in words."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.preflight.case import Case
from ftis_node.preflight.inputs import task_files
from ftis_node.swarm.addresses import listen_addresses
from ftis_node.text import rounded

_ORIGINS = {"the home": "home", "--run": "file", "--peers": "peers"}


def as_json(case: Case, *, whole: bool) -> dict[str, Any]:
    """The report in plain values.

    Args:
        whole: all checks of the dry run were made; else those of `join` alone, and they may have found wrong settings.
    """
    run = _run(case)
    report: dict[str, Any] = {
        "run": None if run is None else _run_values(run[0]) | {"from": run[1]},
        "task": _task(case) if case.task_known else None,
        "home": {
            "path": str(case.home.path),
            "new": not case.home.path.exists(),
            "step": case.step,
            "id": case.peer_id,
        },
        "problems": [{"what": one.what, "fix": one.fix} for one in case.problems],
    }
    if case.plan is not None and case.shape is not None:
        from ftis_node.worker.planning import told

        kind = "lora" if case.plan.lora else "full"
        model = {"name": case.settings.model, "parameters": case.shape.parameters, "kind": kind}
        report["model"] = model | told(case.plan)
    with suppress(UserError):  # wrong settings are among the problems
        report["network"] = {"listens": _listens(case), **_addresses(case)}
        if whole:
            report |= {"settings": _chosen(case), "leaves": _leaves(case.settings)}
    return report


def in_words(case: Case) -> list[str]:
    """The report for people, line by line."""
    chosen, run, plan = _chosen(case), _run(case), case.plan
    lines = ["Nothing was started and nothing was written. Without --dry-run:", ""]
    lines += [f"settings  {name} = {one['value']} ({one['origin']})" for name, one in chosen.items()]
    lines += [] if chosen else ["settings  all by default"]
    state = "begun, without a checkpoint" if case.home.path.exists() else "it would be made"
    state = state if case.step is None else f"goes on from step {case.step}"
    lines += [f"home      {case.home.path}: {state}" + (f"; {case.peer_id}" if case.peer_id else "")]
    if run is not None:
        found, origin = run
        lines += [
            f"run       {found.id.hex()} (from {origin}): {found.task}, {found.group} completions of "
            f"{found.completion_tokens} tokens a prompt"
        ]
    if case.task is not None:
        rows = f"{len(case.task.train):,} rows and {len(case.task.held_out):,} held out"
        lines += [f"task      {case.task_name}: {rows}"]
    elif case.task_known:
        rest = f"; {rounded(case.download[0])} would be downloaded" if case.download else ""
        lines += [f"task      {case.task_name}: not here{rest}"]
    if plan is not None and case.shape is not None:
        kind, fits = "lora" if plan.lora else "full", "fits" if plan.fits else "does not fit"
        lines += [f"model     {case.settings.model}, {case.shape.parameters:,} parameters, {kind}, {plan.dtype}"]
        lines += [f"memory    {rounded(plan.memory.total)} of {rounded(plan.budget)}: it {fits}"]
        lines += [f"          {reason}" for reason in plan.reasons]
    lines += [f"listens   {text}" for text in _listens(case) or ["nowhere: it only dials"]]
    for word, key in {"tells": "announces", "relay": "relays", "dials": "dials"}.items():
        lines += [f"{word:9} {text}" for text in _addresses(case)[key]]
    return [*lines, f"leaves    {_leaves(case.settings)}"]


def _run(case: Case) -> tuple[Run, str] | None:
    """The run that would be joined or started, and its origin."""
    if case.runs:
        origin, run_file = case.runs[0]
        return run_file.run, _ORIGINS[origin]
    return (case.to_start, "this node, which would start it") if case.to_start is not None else None


def _run_values(run: Run) -> dict[str, Any]:
    return {"id": run.id.hex(), **run.model_dump(mode="json", exclude={"template", "packet"})}


def _task(case: Case) -> dict[str, Any]:
    about: dict[str, Any] = {"name": case.task_name, "found": False, "rows": None, "held_out": None, "bytes": None}
    if case.download is not None:
        about["bytes"], about["source"] = case.download
    if case.task is not None:
        about |= {"found": True, "rows": len(case.task.train), "held_out": len(case.task.held_out)}
        about["sha256"] = case.task.data
        about["bytes"] = next((file.stat().st_size for file in task_files(case)), about["bytes"])
    return about


def _chosen(case: Case) -> dict[str, dict[str, Any]]:
    """The settings that differ from their defaults, with their origins."""
    defaults = Settings().model_dump(mode="json")
    return {
        name: {"value": value, "origin": case.origins[name]}
        for name, value in case.settings.model_dump(mode="json").items()
        if value != defaults[name]
    }


def _listens(case: Case) -> list[str]:
    settings = case.settings
    if not settings.listen:
        return []
    return listen_addresses(settings.host, settings.port or case.home.last_port(), quic=settings.quic)


def _addresses(case: Case) -> dict[str, list[str]]:
    """Addresses to announce, of relays, and to dial."""
    settings = case.settings
    announced, relays = list(settings.announce), list(settings.relays)
    return {"announces": announced, "relays": relays, "dials": list(case.options.peers)}


def _leaves(settings: Settings) -> str:
    limit = f"up to {settings.upload_mbit:g} Mbit/s" if settings.upload_mbit else "without a limit"
    what = "the token ids and log-probs that the model samples for the run's public prompts"
    if settings.own_share == 0:
        what = "what other nodes sampled, passed on (this node samples nothing of its own)"
    return f"Its network address, and {what}, {limit}. Never the model, its gradients or files."
