"""The report of `join --dry-run`: what would be, and what would leave the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftis_node.config.settings import Settings
from ftis_node.preflight.case import Case
from ftis_node.text import rounded


def completed(case: Case) -> dict[str, Any]:
    """The case's report with the settings that differ from their defaults, and what leaves the machine."""
    defaults = Settings().model_dump(mode="json")
    case.report["settings"] = {
        name: {"value": value, "origin": case.origins[name]}
        for name, value in case.settings.model_dump(mode="json").items()
        if value != defaults[name]
    }
    case.report["leaves"] = _leaves(case.settings)
    return case.report


def _leaves(settings: Settings) -> str:
    limit = f"up to {settings.upload_mbit:g} Mbit/s" if settings.upload_mbit else "without a limit"
    what = "the token ids and log-probs that the model samples for the run's public prompts"
    if settings.own_share == 0:
        what = "what other nodes sampled, passed on (this node samples nothing of its own)"
    return f"Its network address, and {what}, {limit}. Never the model, its gradients or files."


def in_words(report: Mapping[str, Any]) -> list[str]:
    """The report for people, line by line."""
    home, run, task = report.get("home"), report.get("run"), report.get("task")
    model, network = report.get("model"), report.get("network")
    lines = ["Nothing was started and nothing was written. Without --dry-run:", ""]
    lines += [f"settings  {name} = {one['value']} ({one['origin']})" for name, one in report["settings"].items()]
    lines += [] if report["settings"] else ["settings  all by default"]
    if home is not None:
        state = "it would be made" if home["new"] else "begun, without a checkpoint"
        state = state if home["step"] is None else f"goes on from step {home['step']}"
        lines += [f"home      {home['path']}: {state}" + (f"; {home['id']}" if home["id"] else "")]
    if run is not None:
        lines += [
            f"run       {run['id']} (from {run['from']}): {run['task']}, {run['group']} completions of "
            f"{run['completion_tokens']} tokens a prompt"
        ]
    if task is not None:
        rows = f"{task['rows']:,} rows and {task['held_out']:,} held out" if task["found"] else "not here"
        rest = "" if task["found"] or task["bytes"] is None else f"; {rounded(task['bytes'])} would be downloaded"
        lines += [f"task      {task['name']}: {rows}{rest}"]
    if model is not None:
        fits = "fits" if model["fits"] else "does not fit"
        lines += [f"model     {model['name']}, {model['parameters']:,} parameters, {model['kind']}, {model['dtype']}"]
        lines += [f"memory    {rounded(model['memory_bytes'])} of {rounded(model['budget'])}: it {fits}"]
        lines += [f"          {reason}" for reason in model["reasons"]]
    if network is not None:
        lines += [f"listens   {text}" for text in network["listens"] or ["nowhere: it only dials"]]
        lines += [f"tells     {text}" for text in network["announces"]]
        lines += [f"relay     {text}" for text in network["relays"]]
        lines += [f"dials     {text}" for text in network["dials"]]
    return [*lines, f"leaves    {report['leaves']}"]
