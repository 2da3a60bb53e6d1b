"""Small trials of built-in models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ftis_node.lab.experiment import Experiment
from ftis_node.lab.spec import TrialSpec, trials
from ftis_node.lab.trial import Trial

SETTINGS = {"device": "cpu", "batch_groups": 4, "eval_prompts": 40, "eval_every": 2}
A = {"name": "A", "model": "tiny-a"}
B = {"name": "B", "model": "tiny-b"}


def experiment(cell: dict[str, Any] | None = None, **parts: Any) -> Experiment:
    """Two built-in models, four groups of four a step, and one cell."""
    whole: dict[str, Any] = {
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


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def kind(found: list[dict[str, Any]], event: str, node: str | None = None) -> list[dict[str, Any]]:
    """The events of a kind, of one node or of all."""
    return [e for e in found if e["event"] == event and node in (None, e["node"])]


def timeless(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what hangs on the machine: CPU seconds, and the last line's durations."""
    return [{key: value for key, value in e.items() if key not in ("cpu", "seconds")} for e in found]
