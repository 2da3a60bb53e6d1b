"""The options of `ftis-node join` beside the settings. Imports little, because it is read before the start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ftis_node.config.run import RunFile
from ftis_node.store.home import Home
from ftis_node.swarm.invitation import Invitation
from ftis_node.tasks import Source, source_of


@dataclass(frozen=True)
class JoinOptions:
    """The options of `ftis-node join` beside the settings. paused: start paused. output: a file for what the processes
    print, else stderr. private: a new run is for members. peers: addresses that the owner named. invitation: to a run.
    on_lan: addresses of a run that mDNS named. own_data: rows that only this node trains on; own_reward: their rule.
    template: of a new run, a name or a text. name: "" for none, None for what the home keeps. kept: settings that the
    home keeps for later starts, by name. What is None its owner did not say: the home, the run or a default decides."""

    home: Home
    task: str | None = None
    data: Path | None = None
    eval_data: Path | None = None
    reward: str | None = None
    template: str | None = None
    own_data: Path | None = None
    own_reward: str | None = None
    peers: tuple[str, ...] = ()
    on_lan: tuple[str, ...] = ()
    run: Path | None = None
    name: str | None = None
    paused: bool = False
    output: Path | None = None
    private: bool = False
    invitation: Invitation | None = None
    kept: Mapping[str, object] = field(default_factory=dict)

    @property
    def given(self) -> tuple[str, ...]:
        """The addresses that the invitation brought; none without one."""
        if self.invitation is None:
            return ()
        return tuple(self.invitation.addresses)

    @property
    def bootstraps(self) -> tuple[str, ...]:
        """All addresses to begin with: those of the owner first. Empty: nobody to ask, so the node begins a run unless
        its home or a file names one."""
        return (*self.peers, *self.given, *self.on_lan)

    def files(self) -> dict[str, str | None]:
        """The task's named files, as absolute paths; None where none is named. `metrics.jsonl` and the home keep the
        names `data` and `eval_data`."""
        files = {"data": self.data, "eval_data": self.eval_data}
        return {name: str(path.resolve()) if path else None for name, path in files.items()}

    def task_of(self, run_file: RunFile | None) -> str:
        """The named task, with what the owner left out of it as the run has it; else the run's, else `arithmetic`.

        Args:
            run_file: None before the run is known, and for a new run.
        """
        run_task = run_file.run.task if run_file is not None else None
        if self.task:
            return source_of(self.task).in_run(run_task)
        return run_task or "arithmetic"

    def source(self, run_file: RunFile | None) -> Source:
        """The named task, or the run's, with what the owner says of it, or the run.

        Its rule is the named one, or the run's; None: the task decides, as it does where the run's is code or comes
        with a package (its name then has a colon). The owner's template is for a new run.

        Args:
            run_file: None before the run is known, and for a new run.
        """
        reward = self.reward
        template = self.template
        if run_file is not None:
            template = None
            if reward is None and ":" not in run_file.run.reward:  # that of code or of a package comes with the task
                reward = run_file.run.reward
        return source_of(
            self.task_of(run_file),
            data=self.data,
            eval_data=self.eval_data,
            reward=reward,
            template=template,
            code=self.task is not None,
        )
