"""The options of `ftis-node join` beside the settings, and the run that they name. Imports little, because it is read
before the start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftis_node.config.run import RunFile, check_named, check_task, load_run_file, refuse_horizontal
from ftis_node.errors import UsageError, raise_all
from ftis_node.store.home import Home
from ftis_node.swarm.invitation import Invitation
from ftis_node.tasks import as_in, foreseen


@dataclass(frozen=True)
class JoinOptions:
    """The options of `ftis-node join` beside the settings. paused: start paused. output: a file for what the processes
    print, else stderr. private: a new run is for members. peers: addresses that the owner named. invitation: to a run.
    on_lan: addresses of a run that mDNS named. own_data: rows that only this node trains on; own_reward: their rule."""

    home: Home
    task: str | None = None
    data: Path | None = None
    eval_data: Path | None = None
    reward: str | None = None
    own_data: Path | None = None
    own_reward: str | None = None
    peers: tuple[str, ...] = ()
    on_lan: tuple[str, ...] = ()
    run: Path | None = None
    name: str = ""
    paused: bool = False
    output: Path | None = None
    private: bool = False
    invitation: Invitation | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """The addresses that the owner was given."""
        return () if self.invitation is None else tuple(self.invitation.addresses)

    @property
    def bootstraps(self) -> tuple[str, ...]:
        """All addresses to begin with."""
        return (*self.peers, *self.given, *self.on_lan)

    def files(self) -> dict[str, str | None]:
        """The task's named files, as absolute paths."""
        files = {"data": self.data, "eval_data": self.eval_data}
        return {name: str(path.resolve()) if path else None for name, path in files.items()}

    def task_of(self, run_file: RunFile | None) -> str:
        """The named task, or the run's."""
        run_task = run_file.run.task if run_file is not None else None
        return as_in(run_task, self.task) if self.task else run_task or "arithmetic"

    def reward_of(self, run_file: RunFile | None) -> str | None:
        """The named reward rule, or the run's; that of code or of a package comes with the task."""
        run = run_file.run if run_file is not None else None
        return self.reward or (None if run is None or ":" in run.reward else run.reward)


def known_run(home: Home, file: Path | None) -> RunFile | None:
    """The run of the named file, or of a previous start of the home; None if there is neither.

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
    """Refuse a run that a daemon does not open.

    Args:
        ours: its owner agreed to this run before.

    Raises:
        UsageError: the run is for the lab, or names something that only this node's owner may name.
    """
    refuse_horizontal(found.run)
    if options.invitation is not None and options.invitation.run_id != found.run.id:
        raise UsageError(
            f"The invitation is to run {options.invitation.run_id.hex()}, this is run {found.run.id.hex()}.",
            "Name a fresh --home to join another run.",
        )
    if options.private and not found.run.founder:
        raise UsageError(
            "The run is open; who may take part is fixed when a run begins.",
            "Begin a private one in a fresh --home: `ftis-node join --private`, without --peers and --run.",
        )
    check_named(found.run, task=options.task, reward=options.reward, ours=ours, data=options.data)


def check_foreseen(found: RunFile, options: JoinOptions) -> None:
    """Refuse a task or files that differ from the run's, as far as this shows before a download.

    Raises:
        UsageError: the data or the rule differ.
    """
    task = options.task_of(found)
    data, reward = foreseen(task, data=options.data, reward=options.reward_of(found))
    raise_all(check_task(found.run, {"task": task, "data": data, "reward": reward, "turns": None}))
