"""A whole grid: warm-ups, then trials, some at a time in processes of their own; told, interruptible, resumable."""

import contextlib
import datetime
import hashlib
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ftis_node.fit.memory import trained_part
from ftis_node.host.files import replace_text
from ftis_node.lab.crew import Crew, Progressed
from ftis_node.lab.experiment import CellSpec, Experiment, NodeSpec
from ftis_node.lab.manifest import Cell, Manifest, Node, TrialEntry
from ftis_node.lab.spec import TrialSpec, trial_of, trials
from ftis_node.observe.provenance import commit, versions
from ftis_node.observe.terminal import console, words
from ftis_node.policy.names import built_in
from ftis_node.text import duration, escaped

SPEAK_SECONDS = 10.0
ESTIMATED_FROM = 3600.0  # seconds of work, the last ones, that the time left is told from
WARM_UP_UNITS = 200  # a warm-up takes about as long as so many steps of one node


class Runner:
    """Runs the trials of an experiment that are not finished yet."""

    def __init__(
        self, experiment: Experiment, file: Path, out: Path, *, cache: Path | None, jobs: int | None, processes: bool
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
        self._console = console(stderr=True)

    def directory(self, spec: TrialSpec) -> Path:
        """Where a trial lies."""
        return self._cache / "trials" / spec.id

    def run(self) -> dict[str, Any]:
        """Runs what is left and returns a summary.

        Raises:
            KeyboardInterrupt: Ctrl-C; every trial that was running has saved where it was, if it can.
            UserError: a trial failed, for a reason that a person can mend.
        """
        from ftis_node.lab.starts import starts
        from ftis_node.lab.trial import finished

        self.models.mkdir(parents=True, exist_ok=True)
        self._write_manifest()
        began = time.monotonic()
        specs = {spec.id: spec for spec in trials(self.experiment)}
        left = {name: spec for name, spec in specs.items() if not finished(self.directory(spec))}
        warm_ups = [start for start in starts(list(left.values())) if not (self.models / start.name).exists()]
        units = {start.name: WARM_UP_UNITS for start in warm_ups}
        for name, spec in specs.items():
            units[name] = spec.steps * len(spec.members)
        threads = max(1, (os.cpu_count() or 1) // self._jobs)
        if self._processes:
            threads = 1
        crew_of = Crew(self._jobs, threads, lambda line: self._console.print(words(line)))
        with crew_of as crew, self._shown(units, specs.keys() - left.keys()) as progressed:
            warming = {crew.warm_up(start, self.models): start.name for start in warm_ups}
            crew.finish(warming, units, progressed)
            running = {
                crew.run(spec, self.directory(spec), self.models, self._processes): name for name, spec in left.items()
            }
            crew.finish(running, units, progressed)
        return {
            "experiment": self.experiment.name,
            "trials": len(specs),
            "finished_before": len(specs) - len(left),
            "seconds": time.monotonic() - began,
            "out": str(self.out),
            "checkpoints": [str(path) for spec in specs.values() for path in self._checkpoints(spec)],
        }

    def _checkpoints(self, spec: TrialSpec) -> list[Path]:
        """The checkpoints of a trial's nodes, where they are kept."""
        if not spec.keep:
            return []
        return sorted((self.directory(spec) / "checkpoints").glob("*"))

    # --- what is drawn --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _shown(self, units: Mapping[str, int], finished: Collection[str]) -> Iterator[Progressed]:
        """A bar on a terminal, else a line now and then; yields what is told of progress.

        Args:
            units: of each job by name, how much work it is: node steps, or those that a warm-up counts as.
            finished: jobs that were done before.
        """
        done = {name: units[name] for name in finished}
        name = self.experiment.name
        by_line = not self._console.is_terminal
        title = TextColumn("{task.description}", markup=False)
        share = TextColumn("{task.percentage:3.0f} %", markup=False)
        columns = (title, share, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        spoken = time.monotonic()
        with Progress(*columns, console=self._console, disable=by_line, speed_estimate_period=ESTIMATED_FROM) as bar:
            task = bar.add_task(escaped(name), total=sum(units.values()), completed=sum(done.values()))

            def progressed(job: str, count: int) -> None:
                nonlocal spoken
                done[job] = count
                bar.update(task, completed=sum(done.values()))
                if by_line and time.monotonic() - spoken > SPEAK_SECONDS:
                    spoken = time.monotonic()
                    shown = bar.tasks[0]
                    line = f"{name}: {shown.percentage:.0f} %"
                    if shown.time_remaining is not None:
                        line += f" {duration(shown.time_remaining)} left"
                    self._console.print(words(line))

            yield progressed

    # --- the manifest ---------------------------------------------------------------------------------------------

    def _write_manifest(self) -> None:
        """The manifest, which the report reads."""
        self.out.mkdir(parents=True, exist_ok=True)
        text = self._file.read_bytes()
        (self.out / "experiment.toml").write_bytes(text)
        experiment = self.experiment
        cells = experiment.all_cells()
        manifest = Manifest(
            **{key: getattr(experiment, key) for key in ("name", "title", "about", "task", "steps", "tail", "target")},
            seeds=list(experiment.seeds),
            commit=commit(),
            versions=versions(),
            file_sha256=hashlib.sha256(text).hexdigest(),
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            nodes=[_node_facts(experiment, node) for node in experiment.nodes],
            cells=[self._cell_facts(cell) for cell in cells],
            trials=[
                TrialEntry(id=spec.id, cell=cell.name, seed=seed, directory=self._relative(spec))
                for seed in experiment.seeds
                for cell in cells
                for spec in [trial_of(experiment, cell, seed)]
            ],
            claims=list(experiment.claims),
        )
        replace_text(self.out / "manifest.json", json.dumps(manifest.model_dump(mode="json", by_alias=True), indent=1))

    def _cell_facts(self, cell: CellSpec) -> Cell:
        spec = trial_of(self.experiment, cell, self.experiment.seeds[0])
        trained = [member for member in spec.members if not member.script]
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

    def _relative(self, spec: TrialSpec) -> Path:
        return Path(os.path.relpath(self.directory(spec), self.out))


def _node_facts(experiment: Experiment, node: NodeSpec) -> Node:
    model = node.model or node.script
    if not model and node.warm is not None:
        model = node.warm.recipe
    lora = node.settings.get("lora", experiment.settings.get("lora", False))
    return Node(name=node.name, model=model, kind=trained_part(lora))


def _side_by_side(experiment: Experiment) -> int:
    """Built-in models are so small that each trial has a core; a large model wants the machine to itself."""
    if all(node.model == "" or node.model in built_in() for node in experiment.nodes):
        return os.cpu_count() or 1
    return 1
