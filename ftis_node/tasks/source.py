"""A kind of task: where its rows are from, what it needs, and what only the owner of a node may allow of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ftis_node.errors import UsageError
from ftis_node.tasks.judge import refuse_unjailed
from ftis_node.tasks.rewards import check_rule, kind_of
from ftis_node.tasks.task import Task
from ftis_node.tasks.templates import chosen


@dataclass(frozen=True)
class Source(ABC):
    """A task by its name, with what the owner of this machine said of it; each kind is a subclass (`tasks.KINDS`).

    data: a local training file, or for `test` one of the questions. eval_data: one of the same layout to hold out.
    reward: the rule; None: the task's, or `integer`. template: a name or a text; None: that of the rule. code: the
    owner wrote the name, so what it names may be imported.
    """

    name: str
    data: Path | None = None
    eval_data: Path | None = None
    reward: str | None = None
    template: str | None = None
    code: bool = False

    names: ClassVar[tuple[str, ...]] = ()  # of a kind with names of its own
    has_files: ClassVar[bool] = False  # whether data and eval_data are files of its rows
    editable: ClassVar[bool] = True  # whether a person can correct its rows
    does: ClassVar[str] = ""  # what only a node's owner may agree to

    @classmethod
    def mine(cls, name: str) -> bool:
        """Whether a task of that name is of this kind."""
        return name in cls.names

    def load(self) -> Task:
        """The task to train on. Raises UsageError where the name, the files or the rule are not usable."""
        return self._allowed(self._load)  # type: ignore[return-value]

    def test(self) -> Task:
        """The task to evaluate on: `train` is empty, and no training file is looked for. Raises UsageError."""
        return self._allowed(self._test)  # type: ignore[return-value]

    def check(self) -> Task | None:
        """Refuse what `load` would, as far as that needs no download and no code; the task, if it needs neither.

        Raises:
            UsageError: as `load`, and where this machine has no jail for a rule that needs one.
        """
        if self.reward is not None:
            refuse_unjailed(self.reward)
        return self._allowed(self._check)

    def foreseen(self) -> tuple[str | None, str | None]:
        """The sha256 (hex) of the data and the rule, as `load` will find them; None: not known before."""
        return None, None

    def download(self) -> tuple[int, str] | None:
        """Bytes of what `load` would download, and from where; None: nothing. Raises UsageError."""
        return None

    @property
    def rule(self) -> str:
        """By which answers are judged, where that can be chosen."""
        return self.reward or "integer"

    @property
    def file(self) -> Path | None:
        """The file that the name itself is."""
        return None

    @property
    def files(self) -> list[Path]:
        """The training file, if there is one here, and the file of held-out questions, if one was named."""
        return [path for path in (self.data or self.file, self.eval_data) if path is not None]

    def empty(self) -> int:
        """Blank rows of the file; 0 where there is none."""
        return 0

    def in_run(self, run_task: str | None) -> str:
        """The task's name as the run has it."""
        return self.name

    def with_columns(self, question: str | None, answer: str | None) -> str:
        """The name with these columns. Raises UsageError where it has none."""
        raise UsageError("--question and --answer name columns of a dataset of a hub.", "Leave them out.")

    def refuse_stranger(self, *, ours: bool) -> None:
        """Raise UsageError where a run may not name this task, as long as the owner of this machine has not.

        Args:
            ours: the owner joined or began that run before.
        """
        if self.does and not self.code and not ours:
            raise UsageError(
                f"The run's task is {self.name!a}, which {self.does}.",
                f"If that is acceptable to you, start with --task '{self.name}'.",
            )

    @abstractmethod
    def _load(self) -> Task: ...

    def _test(self) -> Task:
        return replace(self._load(), train=())

    def _check(self) -> Task | None:
        return self._load()

    def _allowed(self, made: Callable[[], Task | None]) -> Task | None:
        """The task that is made, if it has these files and this rule."""
        if not self.has_files and (self.data is not None or self.eval_data is not None):
            raise UsageError(f"The task {self.name} makes its own data.", "Leave out --data and --eval-data.")
        task = made()
        if task is None:
            return None
        return self._asked(task)

    def _asked(self, task: Task) -> Task:
        """The task by the rule and in the template that were named. Raises UsageError for those that it cannot have."""
        if self.reward is not None and self.reward != task.reward:
            check_rule(self.reward)
            if task.scorer is not None or kind_of(self.reward) != kind_of(task.reward):
                raise UsageError(
                    f"The task {task.name} has the reward rule {task.reward!r}, not {self.reward!r}.",
                    "Leave out --reward, which is for a file or an hf: task.",
                )
            task = task.under(self.reward)
        if self.reward is not None:
            task = replace(task, chosen=task.chosen | {"reward"})
        if self.template is not None:
            text, rule = chosen(self.template, task.reward, fixed=self.reward is not None)
            task = replace(task, template=text, reward=rule, chosen=task.chosen | {"template"})
        return task
