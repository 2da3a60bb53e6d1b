"""The part `learn` of `make gpu`: the sources' own experiment on real models, through the lab, in pieces."""

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftis_node.lab.experiment import Experiment, NodeSpec
from ftis_node.lab.loading import find_experiment, load_experiment
from ftis_node.lab.runner import Runner
from ftis_node.lab.spec import trial_of, trials
from ftis_node.lab.trial import finished
from tests.manual.gpu_page import Figures, line

PIECE = 400.0  # seconds; the steps under way, and the checkpoint after them (25 GB), take a minute or two more
FILE = find_experiment("real/gsm8k")
TINY: dict[str, Any] = {
    "task": "arithmetic",
    "data": "",
    "eval_data": "",
    "steps": 3,
    "seeds": (0,),
}


def run_piece(device: str, out: Path, models: str, *, small: bool, seconds: float = PIECE) -> Figures:
    """Go on for so many seconds with the trials in `out`; return what all of them found so far.

    Args:
        models: a folder of models' folders or GGUF files, and of gsm8k_train.jsonl and gsm8k_test.jsonl where these
            cannot be fetched.
        small: in place of that with built-in models and the task `arithmetic`.

    Raises:
        FileNotFoundError: a model is not there.
    """
    experiment = _tiny(device) if small else _real(device, Path(models).resolve())
    runner = Runner(experiment, FILE, out, cache=None, jobs=1, processes=False)
    timer = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT])
    try:
        timer.start()
        runner.run()
    except KeyboardInterrupt:
        pass  # the trial has kept where it was
    finally:
        timer.cancel()
    every = trials(experiment)
    left = sum(not finished(runner.directory(spec)) for spec in every)
    ended = {"state": "done"}
    if left:
        ended = {"state": "unfinished", "why": f"{left} of {len(every)} trials are left"}
    told = list(_told(experiment, runner))
    return {"ended": ended, "lines": [_line(one) for one in told], "trials": told}


def _line(one: dict[str, Any]) -> Figures:
    what = f"{one['cell']}, seed {one['seed']}, {one['node']}: pass@1 after {one['step']} steps; first, before them"
    return line(what, one["pass_at_1"][one["step"]], one["pass_at_1"][0])


def _tiny(device: str) -> Experiment:
    experiment = load_experiment(FILE)
    settings = {"device": device, "batch_groups": 4, "eval_prompts": 16}
    nodes = [NodeSpec(name=name, model=f"tiny-{name.lower()}") for name in "AB"]
    return experiment.model_copy(
        update={
            **TINY,
            "run": {"group": 4},
            "settings": settings,
            "nodes": tuple(nodes),
        }
    )


def _real(device: str, models: Path) -> Experiment:
    experiment = load_experiment(FILE)
    nodes = []
    for node in experiment.nodes:
        name = Path(node.model).name
        found = [place for place in (models / name, models / f"{name}.gguf") if place.exists()]
        if not found:
            raise FileNotFoundError(f"there is no {name} in {models}; name a folder of real models in MODELS")
        nodes.append(node.model_copy(update={"model": str(found[0])}))
    rows = {"data": models / "gsm8k_train.jsonl", "eval_data": models / "gsm8k_test.jsonl"}
    data = {name: str(file) for name, file in rows.items() if file.exists()}
    settings = {**experiment.settings, "device": device}
    return experiment.model_copy(update={**data, "settings": settings, "nodes": tuple(nodes)})


def _told(experiment: Experiment, runner: Runner) -> Iterator[dict[str, Any]]:
    """Of each node of each trial that has begun: pass@1 by step, and the mean rewards of its steps, own and foreign."""
    for seed in experiment.seeds:
        for cell in experiment.all_cells():
            directory = runner.directory(trial_of(experiment, cell, seed))
            file = directory / "events.jsonl"
            events = [json.loads(row) for row in file.read_text().splitlines()] if file.exists() else []
            for node in experiment.nodes:
                mine = [event for event in events if event.get("node") == node.name]
                seen = {event["step"]: event["pass_at_1"] for event in mine if event["event"] == "evaluation"}
                steps = [event for event in mine if event["event"] == "step"]
                if not seen:
                    continue
                yield {
                    "cell": cell.name,
                    "seed": seed,
                    "node": node.name,
                    "step": max(seen),
                    "pass_at_1": seen,
                    "own_reward": [step["own_reward"] for step in steps],
                    "foreign_reward": [step["foreign_reward"] for step in steps],
                }
