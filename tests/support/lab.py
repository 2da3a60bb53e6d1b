"""Small trials of built-in models."""

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ftis_node.lab.experiment import Experiment
from ftis_node.lab.participant import run_of
from ftis_node.lab.scripts import Scripted
from ftis_node.lab.spec import TrialSpec, trials
from ftis_node.lab.trial import Interrupted, Trial
from ftis_node.packet import Completion
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import Generate, Load, Open, ScoredPacket
from tests.support.small_models import completions_of

SETTINGS = {
    "device": "cpu",
    "batch_groups": 4,
    "eval_prompts": 40,
    "eval_every": 2,
}
A = {"name": "A", "model": "tiny-a"}
B = {"name": "B", "model": "tiny-b"}


def experiment(cell: dict[str, Any] | None = None, **parts: Any) -> Experiment:
    """Two built-in models, four groups of four a step, and one cell."""
    whole = {
        "name": "small",
        "seeds": [3],
        "steps": 3,
        "keep": False,
        "run": {"group": 4},
        "settings": SETTINGS,
        "nodes": [A, B],
        "cells": [{"name": "cell"} | (cell or {})],
    }
    return Experiment.model_validate(whole | parts)


def spec(cell: dict[str, Any] | None = None, **parts: Any) -> TrialSpec:
    """The trial of such an experiment."""
    return trials(experiment(cell, **parts))[0]


def run(spec: TrialSpec, directory: Path, **options: Any) -> list[dict[str, Any]]:
    """Runs a trial to its end and returns its events."""
    Trial(spec, directory, directory / "models", **options).run()
    return events(directory)


def cut(spec: TrialSpec, directory: Path, *stopping: bool):
    """A trial that is interrupted; stopping: what it hears, one time after another, when it asks whether to go on."""
    asked = iter(stopping)
    with pytest.raises(Interrupted):
        run(spec, directory, stopping=lambda: next(asked))


@cache
def opened(model: str, run: tuple[tuple[str, Any], ...]) -> Engine:
    """An engine with this model in such a run, which is not to be changed."""
    engine = Engine()
    nodes = [
        {"name": "A", "model": model},
        {"name": "X", "script": "lying"},
    ]
    made = spec(nodes=nodes, run=dict(run))
    settings = made.settings_of(made.members[0]).model_copy(update={"model": model})
    facts = Load(settings=settings, task="arithmetic").answered_by(engine)
    Open(run_of(made, facts)).answered_by(engine)
    return engine


def scripted_group(script: str, model: str = "tiny-a", **run: Any) -> tuple[Scripted, ScoredPacket]:
    """A scripted partner that writes as this built-in model, and its group for row 0."""
    scripted = Scripted(script, 0)
    scripted.engine = opened(model, tuple(run.items()))
    return scripted, asyncio.run(scripted.call(Generate([0]))).groups[0]


def partner(script: str, group: int, **run: Any) -> tuple[Scripted, list[tuple[str, Completion, float]]]:
    """A scripted partner, and text, completion and reward of each completion of its group for row 0."""
    scripted, answer = scripted_group(script, group=group, **run)
    tokenizer = scripted.engine.policy.tokenizer
    completions = completions_of(answer)
    texts = [tokenizer.decode(c.token_ids.tolist(), skip_special_tokens=True) for c in completions]
    return scripted, list(zip(texts, completions, answer.rewards, strict=True))


def events(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return list(map(json.loads, lines))


def kind(found: list[dict[str, Any]], event: str, node: str | None = None) -> list[dict[str, Any]]:
    """The events of a kind, of one node or of all."""
    of_kind = [e for e in found if e["event"] == event]
    if node is None:
        return of_kind
    return [e for e in of_kind if e["node"] == node]


def timeless(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what hangs on the machine: CPU seconds, and the last line's durations."""
    kept = []
    for e in found:
        kept.append({key: value for key, value in e.items() if key not in ("cpu", "seconds")})
    return kept
