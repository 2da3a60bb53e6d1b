"""What is wrong with a `join` and can be told at once: all that needs neither PyTorch nor libp2p, whose import takes
seconds. Nothing is written, no port is kept, no code of a task is run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftis_node.config.run import Run, RunFile
from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError, UserError, one_by_one, raise_all
from ftis_node.node.checkpointing import refuse_other_settings
from ftis_node.node.options import JoinOptions, check_foreseen, check_run, known_run
from ftis_node.node.task_files import with_remembered
from ftis_node.policy.names import resolve
from ftis_node.preflight.place import check_page, standing
from ftis_node.store.checkpoints import newest_facts
from ftis_node.swarm.addresses import check_port, listen_addresses, listening_mistakes, parse_address
from ftis_node.swarm.identity import Identity
from ftis_node.tasks import Task, check_files
from ftis_node.tasks.gsm8k import to_be_downloaded

LARGE_BYTES = 64 << 20  # of a task's file; reading it takes seconds, and where it is used it is read again

Settle = Callable[[str], tuple[Settings, Mapping[str, str]]]


class Early:
    """`report` is what is known so far of what would be; `problems` what `join` would end with, in the order in which
    they were found."""

    def __init__(self, options: JoinOptions, settle: Settle) -> None:
        """
        Args:
            settle: settings and their origins for a task.
        """
        self.home = options.home
        self.options = options
        self.settle = settle
        self.settings: Settings | None = None  # None: they are wrong
        self.origins: Mapping[str, str] = {}
        self.run_file: RunFile | None = None
        self.refused = False  # the run asks for what its owner has to name: it is not opened
        self.task: Task | None = None
        self.report: dict[str, Any] = {"run": None, "task": None}
        self.problems: list[UserError] = []

    def look(self) -> Early:
        """Looks at everything."""
        looks = (self._look_at_home, self._look_for_run, self._settle, self.look_for_data, self._look_at_network)
        for look in looks:
            with self.noting():
                look()
        self.report["problems"] = told(self.problems)
        return self

    def sound(self) -> Settings:
        """The settings. Raises UserError if anything is wrong, all of it."""
        raise_all(self.problems)
        if self.settings is None:
            raise FtisError("Settings that cannot be read are a problem.")
        return self.settings

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A mistake is a problem, each once."""
        try:
            yield
        except UserError as error:
            known = told(self.problems)
            self.problems += [one for one in one_by_one(error) if told([one])[0] not in known]

    def _look_at_home(self) -> None:
        self.report["home"] = {
            "path": str(self.home.path),
            "new": not self.home.path.exists(),
            "step": None,
            "id": None,
        }
        parent = standing(self.home.path)
        if not parent.is_dir() or not os.access(parent, os.R_OK | os.W_OK | os.X_OK):
            why = "not yours" if parent.is_dir() else "no folder"
            raise UserError(f"The home {self.home.path} cannot be used: {parent} is {why}.", "Name another --home.")
        with self.noting():
            self.options = with_remembered(self.options, self.home)
        facts = newest_facts(self.home.checkpoints)
        if facts is not None:
            self.report["home"]["step"] = facts["progress"]["step"]
        if self.home.key.exists():
            self.report["home"]["id"] = Identity.load(self.home.key).peer_id
        if self.home.in_use():
            raise self.home.taken()

    def _look_for_run(self) -> None:
        found, origin = known_run(self.home, self.options.run), "home" if self.home.run_file.exists() else "file"
        self.take_run(found, origin)

    def take_run(self, found: RunFile | None, origin: str) -> None:
        """Takes up a run, if it is one for this node.

        Args:
            origin: where it is from; a home's own may name what others' may not.

        Raises:
            UsageError: it is not.
        """
        self.run_file = found
        self.report["run"] = None if found is None else run_report(found.run) | {"from": origin}
        if found is not None:
            self.refused = True
            check_run(found, self.options, ours=origin == "home")
            self.refused = False
            check_foreseen(found, self.options)

    def _settle(self) -> None:
        self.settings, self.origins = self.settle(self.options.task_of(self.run_file))
        resolve(self.settings.model)
        refuse_other_settings(self.home.checkpoints, self.settings)

    def look_for_data(self) -> None:
        """Reads the task's files, if they are here and not large."""
        options = self.options
        if self.run_file is None and options.peers and options.task is None:
            return  # it is the peers' run that says which task
        name = options.task_of(self.run_file)
        self.report["task"] = about = {"name": name, "found": False, "rows": None, "held_out": None, "bytes": None}
        if self.refused:
            return
        if name == "gsm8k" and (missing := to_be_downloaded(options.data, options.eval_data)):
            about |= {"bytes": sum(one.size for one in missing), "source": missing[0].url}
        if max((path.stat().st_size for path in self._files(name) if path.is_file()), default=0) > LARGE_BYTES:
            return
        code = options.task is not None
        reward = options.reward_of(self.run_file) if name.endswith(".jsonl") else options.reward
        task = check_files(name, data=options.data, eval_data=options.eval_data, reward=reward, code=code)
        if task is not None:
            self.take_task(task)

    def _files(self, name: str) -> list[Path]:
        """The training file, if the task is of one here, and the file of what is held out, if one was named."""
        own = Path(name) if name.endswith(".jsonl") else None
        return [path for path in (self.options.data or own, self.options.eval_data) if path is not None]

    def take_task(self, task: Task) -> None:
        """Takes up a task that was loaded."""
        self.task = task
        self.report["task"] |= {"found": True, "rows": len(task.train), "held_out": len(task.held_out)}
        self.report["task"]["sha256"] = task.data
        files = self._files(self.report["task"]["name"])
        if files:
            self.report["task"]["bytes"] = files[0].stat().st_size

    def _look_at_network(self) -> None:
        for text in self.options.peers:
            with self.noting():
                parse_address(text)
        if self.settings is None:
            return
        settings = self.settings
        port = settings.port or self.home.last_port()
        listening = listen_addresses(settings.host, port, quic=settings.quic) if settings.listen else []
        self.report["network"] = {
            "listens": listening,
            "announces": list(settings.announce),
            "relays": list(settings.relays),
            "dials": list(self.options.peers),
        }
        with self.noting():
            raise_all(listening_mistakes(settings))
        with self.noting():
            if settings.page:
                check_page(settings)
        if settings.listen and not self.home.in_use():  # or it is that daemon's port that is taken
            check_port(settings.host, settings.port)


def run_report(run: Run) -> dict[str, Any]:
    """A run in plain values, for people."""
    return {"id": run.id.hex(), **run.model_dump(mode="json", exclude={"template", "packet"})}


def told(problems: list[UserError]) -> list[dict[str, str]]:
    """Problems in plain values."""
    return [{"what": one.what, "fix": one.fix} for one in problems]
