"""What `ftis-node join` was told beside the settings, and which run that means. Light: it is read before anything is
started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftis_node.config.run import CODE, RunFile, check_named, check_task, load_run_file, refuse_horizontal
from ftis_node.errors import UsageError, raise_all
from ftis_node.store.home import Home
from ftis_node.tasks import foreseen


@dataclass(frozen=True)
class JoinOptions:
    """What `ftis-node join` was told, beside the settings. paused: it starts so; output: a file for what its processes
    print, else stderr."""

    home: Home
    task: str | None = None
    data: Path | None = None
    eval_data: Path | None = None
    reward: str | None = None
    peers: tuple[str, ...] = ()
    run: Path | None = None
    name: str = ""
    paused: bool = False
    output: Path | None = None

    def files(self) -> dict[str, str | None]:
        """The task's files, where they were named."""
        files = {"data": self.data, "eval_data": self.eval_data}
        return {name: str(path.resolve()) if path else None for name, path in files.items()}

    def task_of(self, run_file: RunFile | None) -> str:
        """The task that was named, or the run's."""
        return self.task or (run_file.run.task if run_file is not None else "arithmetic")

    def reward_of(self, run_file: RunFile | None) -> str | None:
        """The rule that was named, or the run's; code comes with the task."""
        run = run_file.run if run_file is not None else None
        return self.reward or (None if run is None or run.reward.startswith(CODE) else run.reward)


def known_run(home: Home, file: Path | None) -> RunFile | None:
    """The run of a file that was named, or of a previous start of the home; None if there is neither.

    Raises:
        UsageError: they are two different runs, or a file cannot be read.
    """
    known = load_run_file(home.run_file) if home.run_file.exists() else None
    named = load_run_file(file) if file is not None else None
    if known is not None and named is not None and known.run.id != named.run.id:
        raise UsageError(
            f"The home {home.path} belongs to run {known.run.id.hex()}, not to {named.run.id.hex()}.",
            "Name another --home for the other run.",
        )
    return named or known


def check_run(found: RunFile, options: JoinOptions, *, ours: bool) -> None:
    """Refuses a run that a daemon does not open.

    Args:
        ours: the run is the home's own.

    Raises:
        UsageError: it is for the lab, or names what only the owner of this node may.
    """
    refuse_horizontal(found.run)
    check_named(found.run, task=options.task, reward=options.reward, ours=ours, data=options.data)


def check_foreseen(found: RunFile, options: JoinOptions) -> None:
    """Refuses a task or files that are not the run's, as far as that can be told before they are downloaded or loaded.

    Raises:
        UsageError: the data or the rule are others.
    """
    task = options.task_of(found)
    data, reward = foreseen(task, data=options.data, reward=options.reward_of(found))
    raise_all(check_task(found.run, {"task": task, "data": data, "reward": reward}))
