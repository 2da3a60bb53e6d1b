"""A whole grid: warm-ups, then trials, some at a time in processes of their own; told, interruptible, resumable."""

import datetime
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from ftis_node.fit.memory import trained_part
from ftis_node.host.doing import advance, doing
from ftis_node.host.files import replace_text
from ftis_node.lab.crew import Crew
from ftis_node.lab.experiment import CellSpec, Experiment, NodeSpec
from ftis_node.lab.manifest import Cell, Manifest, Node, TrialEntry
from ftis_node.lab.spec import TrialSpec, trial_of, trials
from ftis_node.observe.provenance import commit, versions
from ftis_node.observe.terminal import shown_work
from ftis_node.policy.names import built_in

WARM_UP_STEPS = 200  # a warm-up takes about as long as so many steps of one node


class Runner:
    """Runs the trials of an experiment that are not finished yet. One object is one run."""

    def __init__(
        self,
        experiment: Experiment,
        file: Path,
        out: Path,
        *,
        cache: Path | None,
        jobs: int | None,
        processes: bool,
    ) -> None:
        """
        Args:
            file: the lab file, which is kept beside the results.
            cache: where trials and warm-ups lie, by default in `out`; experiments that share it share what is equal.
            jobs: how many trials run side by side; by default one a core, or one where models are on a GPU.
            processes: each node of a trial has a process of its own.
        """
        self.experiment = experiment
        self.out = out.resolve()
        self._file = file
        self._cache = (cache or out).resolve()
        self.models = self._cache / "models"
        self._jobs = jobs or _side_by_side(experiment)
        self._processes = processes

    def directory(self, spec: TrialSpec) -> Path:
        """Where a trial lies, by its id; it may not be there yet."""
        return self._cache / "trials" / spec.id

    def run(self) -> dict[str, Any]:
        """Runs what is left and returns a summary: what `ftis-node lab run --json` prints. All warm-ups end before the
        first trial begins. A second run with the same `out` and `cache` goes on.

        Raises:
            KeyboardInterrupt: Ctrl-C; every trial that was running has saved where it was, if it can.
            UserError: a trial failed, for a reason that a person can mend; the others were stopped.
        """
        from ftis_node.lab.starts import starts
        from ftis_node.lab.trial import finished

        self.models.mkdir(parents=True, exist_ok=True)
        self._write_manifest()
        began = time.monotonic()
        specs = {spec.id: spec for spec in trials(self.experiment)}
        left = []
        steps = {}
        for name, spec in specs.items():
            if not finished(self.directory(spec)):
                left.append(spec)
                steps[name] = spec.steps * len(spec.learners)
        warm_ups = []
        for start in starts(left):
            if not (self.models / start.name).exists():
                warm_ups.append(start)
                steps[start.name] = WARM_UP_STEPS
        done = dict.fromkeys(steps, 0)

        def progressed(job: str, count: int) -> None:
            advance(count - done[job])
            done[job] = count

        threads = 1
        if not self._processes:
            threads = max(1, (os.cpu_count() or 1) // self._jobs)
        everything = doing(f"running {self.experiment.name}", sum(steps.values()), "steps")
        with Crew(self._jobs, threads) as crew, shown_work(), everything:
            jobs = {}
            for start in warm_ups:
                job = crew.warm_up(start, self.models)
                jobs[job] = start.name
            crew.finish(jobs, steps, progressed)
            jobs = {}
            for spec in left:
                job = crew.run(spec, self.directory(spec), self.models, self._processes)
                jobs[job] = spec.id
            crew.finish(jobs, steps, progressed)
        checkpoints = []
        for spec in specs.values():
            if spec.keep:
                kept = self.directory(spec) / "checkpoints"
                checkpoints += sorted(kept.glob("*"))
        return {
            "experiment": self.experiment.name,
            "trials": len(specs),
            "finished_before": len(specs) - len(left),
            "seconds": time.monotonic() - began,
            "out": str(self.out),
            "checkpoints": list(map(str, checkpoints)),
        }

    # --- the manifest ---------------------------------------------------------------------------------------------

    def _write_manifest(self) -> None:
        """Writes the manifest, which the report reads, and a copy of the lab file, before anything runs."""
        self.out.mkdir(parents=True, exist_ok=True)
        text = self._file.read_bytes()
        (self.out / "experiment.toml").write_bytes(text)
        experiment = self.experiment
        cells = experiment.all_cells()
        entries = []
        for seed in experiment.seeds:
            for cell in cells:
                spec = trial_of(experiment, cell, seed)
                entry = TrialEntry(
                    id=spec.id,
                    cell=cell.name,
                    seed=seed,
                    directory=Path(os.path.relpath(self.directory(spec), self.out)),
                )
                entries.append(entry)
        manifest = Manifest(
            name=experiment.name,
            title=experiment.title,
            about=experiment.about,
            task=experiment.task,
            steps=experiment.steps,
            tail=experiment.tail,
            target=experiment.target,
            seeds=list(experiment.seeds),
            commit=commit(),
            versions=versions(),
            file_sha256=hashlib.sha256(text).hexdigest(),
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            nodes=[_node_facts(experiment, node) for node in experiment.nodes],
            cells=[self._cell_facts(cell) for cell in cells],
            trials=entries,
            claims=list(experiment.claims),
        )
        facts = manifest.model_dump(mode="json", by_alias=True)
        replace_text(self.out / "manifest.json", json.dumps(facts, indent=1))

    def _cell_facts(self, cell: CellSpec) -> Cell:
        """What the report reads of a cell. Which nodes take part does not depend on the seed, so the first does."""
        spec = trial_of(self.experiment, cell, self.experiment.seeds[0])
        trained = spec.learners
        fastest = max(member.speed for member in trained)
        return Cell(
            name=cell.name,
            label=cell.label or cell.name,
            collaboration=cell.collaboration,
            pace=cell.pace,
            nodes=[member.name for member in spec.members],
            slower=[member.name for member in trained if member.speed < fastest],
            values={**cell.settings, **cell.values},
        )


def _node_facts(experiment: Experiment, node: NodeSpec) -> Node:
    """What the report reads of a node."""
    model = node.model or node.script
    if not model and node.warm is not None:
        model = node.warm.recipe
    settings = {**experiment.settings, **node.settings}
    lora = bool(settings.get("lora"))
    return Node(name=node.name, model=model, kind=trained_part(lora))


def _side_by_side(experiment: Experiment) -> int:
    """How many trials run side by side by default. Built-in models are so small that each trial has a core; a large
    model wants the machine to itself."""
    small = ("", *built_in())
    if all(node.model in small for node in experiment.nodes):
        return os.cpu_count() or 1
    return 1
