"""What models of a trial start from: built-in ones, warmed up anew for every seed and kept for all methods."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from ftis_node.lab.experiment import NodeSpec, WarmUp
from ftis_node.lab.recipes import NAMED, Recipe
from ftis_node.lab.scripts import MODEL
from ftis_node.lab.spec import TrialSpec
from ftis_node.lab.warmup import save, warm_up
from ftis_node.tasks import load_task

START_SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Start:
    """A warm-up to be done: of which recipe, from which seed, on which task. `name` is what its folder is called.

    The recipe's later fields are no part of it where they are as usual, so that names stay what they were.

    seed: a text, "trial's seed/node's name"; equal ones give the same weights.
    """

    recipe: Recipe
    seed: str
    task: str = "arithmetic"

    @property
    def name(self) -> str:
        """Recipe and a hash of all that decides the weights, so one folder serves all trials that need the same."""
        recipe = dataclasses.asdict(self.recipe)
        for later, usual in (("batch", 64), ("rise", 1)):
            if recipe[later] == usual:
                del recipe[later]
        facts = json.dumps([START_SCHEMA, recipe, self.seed, self.task])
        digest = hashlib.sha256(facts.encode()).hexdigest()
        return f"{self.recipe.name}-{digest[:12]}"


def start_of(spec: TrialSpec, member: NodeSpec) -> Start | None:
    """The warm-up that a member starts from; None if it starts from a model by name, or has none."""
    warm = member.warm
    if warm is None:
        return None
    task = "arithmetic"
    if ":" in spec.task:  # a function of the lab
        task = spec.task
    return Start(_recipe(warm), f"{spec.seed}/{warm.like or member.name}", task)


def starts(specs: list[TrialSpec]) -> list[Start]:
    """Every warm-up that the trials need, each once, in the order of their need."""
    found = {}
    for spec in specs:
        for member in spec.members:
            start = start_of(spec, member)
            if start is not None:
                found[start.name] = start
    return list(found.values())


def model_of(spec: TrialSpec, member: NodeSpec, models: Path) -> str:
    """What `Settings.model` is to be: a name, or the folder of the warm-up under `models`."""
    start = start_of(spec, member)
    if start is not None:
        return str(models / start.name)
    return member.model or MODEL


def make_start(start: Start, models: Path, *, stopping: Callable[[], bool] = lambda: False) -> None:
    """Warms a model up into its folder under `models`, which appears whole, on one thread; half a CPU-minute for a
    built-in model. A folder that is there already is left as it is. Call it under the lock of that folder (`Crew`).

    Args:
        stopping: asked before each step; if it says so, no folder appears, and the next call begins anew.
    """
    folder = models / start.name
    if folder.exists():
        return
    task = load_task(start.task, code=True)
    if start.recipe.style == "spelled":
        longer = max(task.completion_tokens, 32)
        task = dataclasses.replace(task, completion_tokens=longer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = warm_up(start.recipe, task, start.seed, stopping=stopping)
    torch.set_num_threads(threads)
    if made is None:
        return
    partial = models / f"{start.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        facts = save(start.recipe, *made, task, partial)
        facts["seed"] = start.seed
        written = partial / start.recipe.name
        (written / "start.json").write_text(json.dumps(facts))
        written.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _recipe(warm: WarmUp) -> Recipe:
    """The recipe that a node names, with what the node changes in it."""
    recipe = NAMED[warm.recipe]
    changes = warm.model_dump(exclude={"recipe", "like"}, exclude_none=True)
    if not warm.tokenizer:
        del changes["tokenizer"]
    return dataclasses.replace(recipe, **changes)
