"""Honest daemons on loopback, and what can be seen of them from outside while somebody attacks."""

import atexit
import contextlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ftis_node.config.run import RunFile, dump_run_file, load_run_file
from ftis_node.demo import text_run
from ftis_node.errors import UserError
from ftis_node.observe.api import ask
from ftis_node.observe.metrics import read_events
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.invitation import Invitation, invite
from tests.hostile.heavy import widened
from tests.hostile.peer import autogroup
from tests.support.daemons import Daemon, kind_of

MODELS = ("tiny-a", "tiny-b", "tiny-c")
MIXED = ("tiny-chars", "tiny-numbers", "tiny-bpe")
FLAGS = ("--set", "batch_groups=6", "--set", "eval_prompts=16", "--set", "eval_every=50", "--set", "quic=false")
START_SECONDS = 240.0
GROWTH = 1.1
GROWTH_MB = 20.0


@dataclass
class Sample:
    """What the processes of all nodes took, by (node, kind). cpu: seconds of them all since they started."""

    memory_mb: dict[tuple[str, str], float] = field(default_factory=dict)
    files: dict[tuple[str, str], int] = field(default_factory=dict)
    cpu: float = 0.0


@dataclass
class Phase:
    """A stretch of time, quiet or under attack."""

    began: float
    ended: float
    samples: list[Sample]

    @property
    def cpu(self) -> float:
        """Seconds of all processes."""
        return self.samples[-1].cpu - self.samples[0].cpu

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def files(self) -> int:
        """Open files of all processes at its end."""
        return sum(self.samples[-1].files.values())


class Arena:
    """Daemons that know one another; the first is everybody's bootstrap."""

    def __init__(
        self,
        path: Path,
        nodes: int,
        *,
        work: int = 1,
        mixed: bool = False,
        private: bool = False,
    ):
        """
        Args:
            mixed: a text run, and models of three tokenizers. private: a run of invited members, attackers too.
            work: times that the models' feed-forward layers are as wide as they are; they say the same, and steps last.
        """
        self.daemons: dict[str, Daemon] = {}
        self.addresses: list[str] = []
        self._path = path
        self._nodes = nodes
        self._work = work
        self._models = MIXED if mixed else MODELS
        self.private = private
        self._log_read: Counter[str] = Counter()
        self._restarts: dict[str, tuple[int, int]] = {}

    def start(self):
        """Returns when every node has taken a step and has met all others."""
        for number in range(self._nodes):
            peers = self._named() if self.addresses else self._founding()
            model = self._model(self._models[number % len(self._models)])
            home = self._path / f"node-{number}"
            # In a session of its own, as on a machine of its own: Linux shares cores among sessions first.
            daemon = Daemon(home, "--model", model, *peers, *FLAGS, prefix=("setsid",))
            self.daemons[f"node-{number}"] = daemon.start()
            if number == 0:
                self.addresses.append(self._address(daemon))
        self.addresses = [self._address(daemon) for daemon in self.daemons.values()]
        for name, daemon in self.daemons.items():
            daemon.wait(
                lambda status: (status.get("step") or 0) >= 2 and status.get("peers") == self._nodes - 1,
                f"{name} has taken its first steps among all",
                START_SECONDS,
            )
        self.ids = {name: Identity.load_or_create(daemon.home.key).peer_id for name, daemon in self.daemons.items()}

    def ticket(self) -> Invitation | None:
        """An invitation of the first node's; None to an open run."""
        if not self.private:
            return None
        first = self.daemons["node-0"]
        home = first.home
        first.wait(lambda status: home.run_file.exists(), "it has begun its run", START_SECONDS)
        founder = Identity.load(home.key)
        run = load_run_file(home.run_file).run
        return invite(founder, run.id, self.addresses[:1], now=time.time(), seconds=86400, membership=86400)

    def _named(self) -> list[str]:
        """Words with which a further node meets the first."""
        ticket = self.ticket()
        return [ticket.text] if ticket is not None else ["--peers", self.addresses[0]]

    def _founding(self) -> list[str]:
        """Flags with which the first node begins the run."""
        if self.private:
            return ["--private"]
        if self._models is not MIXED:
            return []
        file = self._path / "run.toml"
        file.write_text(dump_run_file(RunFile(run=text_run())), encoding="utf-8")
        return ["--run", str(file)]

    def _model(self, name: str) -> str:
        return name if self._work == 1 else str(widened(name, self._work, self._path / "models" / name))

    @staticmethod
    def _address(daemon: Daemon) -> str:
        """TCP's: a stream that is reset loses nothing there."""
        found = daemon.wait(lambda status: status.get("addresses"), "an address", START_SECONDS)["addresses"]
        return next(str(address) for address in found if "/tcp/" in address)

    def spread(self, compute: Sequence[int], rest: Sequence[int]):
        """Has the compute processes use some cores, by number, and the others some.

        Of the latter this process and its attackers take what the nodes' leave, from now on.
        """
        for daemon in self.daemons.values():
            for process in daemon.pids():
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, compute if kind_of(process) == "compute" else rest)
        os.sched_setaffinity(0, rest)
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        if (group := autogroup()) is not None:
            atexit.register(autogroup, nice=group)
            autogroup(nice=19)

    def sample(self) -> Sample:
        found = Sample()
        for name, daemon in self.daemons.items():
            for process in daemon.pids():
                with contextlib.suppress(psutil.Error):
                    key = (name, kind_of(process))
                    times = process.cpu_times()
                    found.memory_mb[key] = process.memory_info().rss / 2**20
                    found.files[key] = process.num_fds()
                    found.cpu += times.user + times.system
        return found

    def statuses(self) -> dict[str, dict[str, Any]]:
        return {name: daemon.status() for name, daemon in self.daemons.items()}

    def peers(self) -> dict[str, dict[str, Any]]:
        """What each node says of its peers; {} while it does not answer."""
        found = {}
        for name, daemon in self.daemons.items():
            found[name] = {}
            with contextlib.suppress(UserError):
                found[name] = ask(daemon.home.api_socket(), "/peers", dict)
        return found

    def innocents_blamed(self) -> list[str]:
        """Honest nodes that another honest one has refused something of, banned or left out."""
        honest = {id: name for name, id in self.ids.items()}
        found = []
        for judge, report in self.peers().items():
            for peer in report.get("peers", []):
                bad = peer["refused"] or peer["lies"] or peer["standing"].startswith(("banned", "doubted"))
                if peer["id"] in honest and bad:
                    said = f"{peer['standing']}, {peer['refused']}, {peer['lies']}"
                    found.append(f"{judge} of {honest[peer['id']]}: {said}")
            for peer in report.get("left_out", []):
                if peer["id"] in honest:
                    found.append(f"{judge} left out {honest[peer['id']]}: {peer['reason']}")
        return found

    def new_tracebacks(self) -> list[str]:
        """Unforeseen errors in the logs of all nodes since the last call, each kind once."""
        found = Counter()
        for name, daemon in self.daemons.items():
            log = daemon.log()
            lines = iter(log[self._log_read[name] :].splitlines())
            for line in lines:
                if line.startswith("Traceback"):
                    error = next((after for after in lines if not after.startswith(" ")), "")
                    found[f"{name}: {error.partition(':')[0]}: {error.partition(':')[2][:120]}"] += 1
            self._log_read[name] = len(log)
        return [f"{count} × {text}" for text, count in found.most_common(5)]

    def dead(self) -> list[str]:
        """Nodes that have ended, or have started their compute process or p2pd anew since the last call."""
        found = []
        for name, daemon in self.daemons.items():
            if daemon.process is None or daemon.process.poll() is not None:
                found.append(f"{name} has ended: {daemon.log()[-500:]}")
                continue
            status = daemon.status()
            restarts = status.get("worker_restarts", 0), status.get("network", {}).get("p2pd_restarts", 0)
            if restarts != self._restarts.get(name, (0, 0)):
                found.append(f"{name} has restarted its compute process {restarts[0]}, its p2pd {restarts[1]} times")
            self._restarts[name] = restarts
        return found

    def pace(self, phase: Phase) -> float:
        """Steps a second, all nodes together."""
        return self.steps(phase) / phase.seconds

    def cost(self, phase: Phase) -> float:
        """CPU-seconds a step, of all processes of all nodes."""
        return phase.cpu / max(1, self.steps(phase))

    def steps(self, phase: Phase) -> int:
        """How many all nodes took together."""
        times = []
        for daemon in self.daemons.values():
            times += [event["time"] for event in read_events(daemon.home.metrics, "step")]
        return sum(phase.began <= time < phase.ended for time in times)

    def clean_up(self):
        for daemon in self.daemons.values():
            daemon.clean_up()


@contextlib.contextmanager
def arena(path: Path, nodes: int, *, work: int = 1, mixed: bool = False, private: bool = False) -> Iterator[Arena]:
    """Running daemons, ended with the block."""
    started = Arena(path, nodes, work=work, mixed=mixed, private=private)
    try:
        started.start()
        yield started
    finally:
        started.clean_up()


def grown(before: Sequence[Sample], after: Sequence[Sample]) -> dict[str, list[float]]:
    """Processes whose memory grew by more than a tenth and 20 MB: [MB before, MB after]."""
    found = {}
    for key in before[-1].memory_mb:
        was, became = (
            statistics.median(sample.memory_mb[key] for sample in samples if key in sample.memory_mb)
            for samples in (before[-5:], after[-5:])
        )
        if became > GROWTH * was + GROWTH_MB:
            found[" ".join(key)] = [round(was, 1), round(became, 1)]
    return found
