"""A daemon's training once more, from its step log and its stored packets, to the same weights.

On a CPU every figure and every weight is the same bit for bit. The home is only read.
"""

import fcntl
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ftis_node.config.run import CODE, Run, load_run_file
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.host.doing import doing
from ftis_node.lab.replaying.compared import Differences, identical, max_difference
from ftis_node.lab.replaying.lineage import EVENTS, Lineage, Link, LoggedStep, Start, lineage
from ftis_node.lab.replaying.stored import StoredPackets
from ftis_node.node.step_batch import StepBatch, describe, step_groups
from ftis_node.observe.metrics import each_event, older_parts
from ftis_node.observe.provenance import versions
from ftis_node.observe.terminal import shown_work
from ftis_node.packet import Group
from ftis_node.store.checkpoints import CheckpointError, labelled, verify
from ftis_node.store.home import Home
from ftis_node.swarm.admission import AdmissionContext, Rejection, admit
from ftis_node.swarm.identity import peer_id
from ftis_node.swarm.parts import key_of
from ftis_node.swarm.pool import Scored
from ftis_node.tasks import source_of
from ftis_node.worker.checkpoint import OPTIMISER, WEIGHTS
from ftis_node.worker.engine import Engine

NO_GPU_IS_EXACT = (
    "A GPU adds up in another order each time: expect losses and norms to agree to three or four digits in fp32 and "
    "to two in bfloat16 at first, and to fewer as the differences of many steps add up; never bit for bit."
)


def replay(home: Path, *, task: str | None = None) -> dict[str, Any]:
    """Takes the steps of the daemon of `home` again and compares with what it logged and saved. A step
    costs its training again, but no generation; no daemon can start on the home meanwhile.

    Args:
        task: that of the home, if it is Python code: nothing is imported that nobody here has named.

    Returns what `ftis-node lab replay --json` prints.

    Raises:
        UsageError: there is no such home, or a daemon is running on it.
        UserError: the log, a packet, the data or the model are not there any more, or damaged. If packets of a later
            step are missing, those before it were replayed.
    """
    began = time.monotonic()
    place = Home(home)
    if not place.metrics.exists() and not older_parts(place.metrics):
        raise UsageError(f"{home} is no home of a daemon that has trained: it has no metrics.jsonl.", "Name another.")
    with _unused(place):
        _refuse_dropped(place.metrics)
        line = lineage(each_event(place.metrics, *EVENTS))
        packets = StoredPackets(place.store)
        try:
            gap = _first_gap(line, packets)
            links = line.links
            if gap is not None:
                links = line.links[: gap.before]
                if not any(link.logged for link in links):
                    raise gap.error(place.store, None)
            replaying = _Replay(place, packets, links[0].start, task)
            report = replaying.go(links, whole=gap is None)
        finally:
            packets.close()
    report["void_steps"] = line.void
    report["seconds"] = time.monotonic() - began
    if gap is not None:
        raise gap.error(place.store, report)
    return report


@dataclass(frozen=True)
class _Gap:
    """The first step whose groups are not all there. before: links that can be followed. own_data: so many were of the
    owner's own rows."""

    before: int
    step: int
    digests: Sequence[bytes]
    packets: int
    own_data: int

    def error(self, store: Path, report: dict[str, Any] | None) -> UserError:
        """The error to raise, with what came of the steps before. report: theirs; None: there were none."""
        what = f"Step {self.step} cannot be replayed: "
        if self.digests:
            first = self.digests[0].hex()[:16]
            what += f"{len(self.digests)} of its {self.packets} packets are no longer in {store} ({first}…)."
            quota = "Give `join` a larger packet_quota_mb for a training that is to be replayed."
        else:
            what += f"{self.own_data} of its groups were made of its owner's own data, and those are kept nowhere."
            quota = "Only training without --own-data can be replayed to its end."
        if report is None:
            return UserError(what, quota)
        agree = f"differ first at {report['first_difference']}"
        if report["identical"]:
            agree = "agree with the log"
        return UserError(what, f"The {report['steps']} steps before it were replayed and {agree}. {quota}")


def _first_gap(line: Lineage, packets: StoredPackets) -> _Gap | None:
    """The first step that cannot be replayed; None where everything is there."""
    for place, link in enumerate(line.links):
        if link.logged is None:
            continue
        digests = link.logged.batch.digests
        missing = [digest for digest in digests if not packets.holds(digest)]
        own_data = link.logged.own_data_groups
        if missing or own_data:
            return _Gap(place, link.step, missing, len(digests), own_data)
    return None


class _Replay:
    """One replay: an engine, and what came of it so far."""

    def __init__(self, home: Home, packets: StoredPackets, start: Start, task: str | None) -> None:
        """
        Args:
            start: what the first process of the daemon began with.
            task: what the owner names, see `replay`.
        """
        self._home = home
        self._packets = packets
        self._task = task
        self._run: Run = load_run_file(home.run_file).run
        self._engine = Engine()
        self._context: AdmissionContext
        self._start = start
        self._updates = 0  # as the engine counts them
        self._differences = Differences()
        self._compared: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._checkpoints = self._on_disk(home.checkpoints)

    def go(self, links: Sequence[Link], *, whole: bool) -> dict[str, Any]:
        """Follows the links, and reports, see `_report`. Call it once: it closes the engine. whole: they lead to the
        daemon's last step, so a checkpoint of another step has no place."""
        threads = torch.get_num_threads()
        try:
            self._load(self._start)
            self._compare_checkpoint(links[0].step)
            with shown_work():
                for link in links[1:]:
                    if link.logged is None:
                        self._go_over(link)
                    else:
                        with doing(f"replaying step {link.step} of {links[-1].step}"):
                            self._step(link.logged)
                    self._compare_checkpoint(link.step)
        finally:
            self._engine.close()
            torch.set_num_threads(threads)
        return self._report(links, whole)

    # --- the engine -----------------------------------------------------------------------------------------------

    def _load(self, start: Start) -> None:
        """Makes a new engine what that start had, with the model's own weights.

        Raises:
            UserError: it cannot be had, or its data, code or tokenizer are not those that were trained with.
        """
        if self._task not in (None, start.task):
            raise UsageError(f"The task of this home is {start.task}, not {self._task}.", "Name that one, or none.")
        if start.run != self._run.id.hex():
            raise UserError(f"{self._home.run_file} is of another run than the log.", "Restore it as it was.")
        directory = Path(start.directory)
        settings = start.settings.model_dump(mode="json")
        settings["device"] = self._device(start)
        settings["sharded"] = None
        settings["engine"] = "native"  # nothing is sampled here, and no server is to be disturbed
        if (directory / start.settings.model).is_dir():
            settings["model"] = str(directory / start.settings.model)
        data = start.data
        file = source_of(start.task).file
        if not data and file is not None:
            data = str(directory / file)
        reward = None
        if not self._run.reward.startswith(CODE):
            reward = self._run.reward
        facts = self._engine.load(
            Settings(**settings),
            start.task,
            data=data,
            eval_data=start.eval_data,
            caps=self._run.caps,
            reward=reward,
            code=self._task is not None,
        )
        trained_with = (self._run.data, self._run.reward, self._run.tokenizer)
        if (facts.data, facts.reward, facts.tokenizer) != trained_with:
            raise UserError(
                f"The data or the code of {start.task}, or the tokenizer of {start.settings.model}, are not what they "
                "were.",
                "Put back the file, the code or the model that the daemon was started with.",
            )
        opened = self._engine.open(self._run)
        self._context = AdmissionContext(run=self._run, prompt_digests=opened.prompt_digests)
        self._start = start
        self._updates = 0

    def _device(self, start: Start) -> str:
        """The daemon's device, or the CPU where there is no GPU, which a note says."""
        if start.device == "cpu" or torch.cuda.is_available():
            return start.device
        self._note(f"The daemon trained on {start.device}, which is not to be had here; replayed on the CPU.")
        return "cpu"

    def _go_over(self, link: Link) -> None:
        """Goes on to another process's settings, or another count of steps, with the same weights, optimiser and level
        of the gate (`Objective.next_gate`)."""
        other = _made_of(link.start) != _made_of(self._start)
        if not other and link.step == self._updates:
            return
        with tempfile.TemporaryDirectory(prefix="ftis-") as directory:
            self._engine.save(directory)
            if other:
                self._engine.close()
                self._engine = Engine()  # first: two models may be too many
                self._load(link.start)
            self._engine.restore(directory, steps=link.step)
        self._start = link.start
        self._updates = link.step

    # --- a step ---------------------------------------------------------------------------------------------------

    def _step(self, logged: LoggedStep) -> None:
        """Takes a logged step again and compares its figures."""
        own = self._read(logged.batch.own)
        replaced = self._read(logged.batch.replaced)
        foreign = self._read(logged.batch.foreign)
        weights = {}
        for one in foreign:
            author = one.group.author
            weights[author] = logged.weights.get(peer_id(author), 1.0)
        batch = StepBatch(own, foreign)
        if self._run.common:
            batch = batch._replace(key=key_of)
        groups = step_groups(batch, weights)
        torch.set_num_threads(logged.threads or self._start.threads)  # the order of sums depends on it
        report = self._engine.step(groups, micro_batch_tokens=logged.micro_batch_tokens)
        self._updates += 1
        rewards = describe([*own, *replaced], foreign)
        found = {
            "loss": report.loss,
            "gradient_norm": report.gradient_norm,
            "own_reward": rewards.own_reward,
            "foreign_reward": rewards.foreign_reward,
            "skipped": report.skipped,
        }
        self._differences.compare(logged, found)

    def _read(self, digests: Sequence[str]) -> list[Scored]:
        """Stored groups in this order, with rewards by the packets' own text; what the daemon once gave is not asked
        for. Raises UserError if one is damaged."""
        groups = []
        for digest in digests:
            group = self._group(bytes.fromhex(digest))
            groups.append(Scored(group, tuple(self._engine.rewards(group.row, group.data)), 0.0))
        return groups

    def _group(self, digest: bytes) -> Group:
        """A stored packet as a group. Raises UserError if it is damaged."""
        found = self._packets.read(digest)
        why = ""
        if found is not None:
            verdict = admit(self._context, *found)
            if isinstance(verdict, Rejection):
                why = f": {verdict.reason}, {verdict.detail}"
            elif verdict.digest == digest:
                return verdict
            else:
                why = ": it has the wrong hash"
        what = f"The packet {digest.hex()[:16]}… in {self._home.store} is damaged{why}."
        raise UserError(what, "Replay a sound copy of the home.")

    # --- weights --------------------------------------------------------------------------------------------------

    def _on_disk(self, path: Path) -> dict[int, Path]:
        """The folders of whole checkpoints by step. Not by `Checkpoints`, which clears up as it opens."""
        found = {}
        for entry in sorted(path.glob("step-*")):
            if not entry.is_dir() or entry.suffix:
                continue
            try:
                step = int(verify(entry)["progress"]["step"])
            except CheckpointError as error:
                self._note(f"{error} It was not compared.")
                continue
            found[step] = entry
        return found

    def _compare_checkpoint(self, step: int) -> None:
        """Compares the present weights with what the daemon saved after that step, if it still lies there; once for a
        step, for the comparison takes it out of the list."""
        directory = self._checkpoints.pop(step, None)
        if directory is None:
            return
        with tempfile.TemporaryDirectory(prefix="ftis-") as scratch:
            self._engine.save(scratch)
            weights = load_file(Path(scratch) / WEIGHTS)
            optimiser = load_file(Path(scratch) / OPTIMISER)
        saved = load_file(directory / WEIGHTS)
        same = identical(saved, weights) and identical(load_file(directory / OPTIMISER), optimiser)
        self._compared.append({"step": step, "identical": same, "max_difference": max_difference(saved, weights)})

    # --- the report -----------------------------------------------------------------------------------------------

    def _note(self, sentence: str) -> None:
        """Adds a sentence to the report, once."""
        if sentence not in self._notes:
            self._notes.append(sentence)

    def _report(self, links: Sequence[Link], whole: bool) -> dict[str, Any]:
        """What is printed as JSON, but for the seconds and the steps that were lost."""
        starts = [link.start for link in links]
        steps = 0
        own = 0
        foreign = 0
        for link in links:
            if link.logged is not None:
                steps += 1
                own += len(link.logged.batch.own)
                foreign += len(link.logged.batch.foreign)
        others = self._other_versions(starts)
        exact = self._is_exact(starts)
        if not self._compared:
            self._note("None of these steps' checkpoints is on disk any more: compared by the log's figures alone.")
        stray = [step for step in self._checkpoints if whole or step <= links[-1].step]
        for step in stray:
            self._note(f"The checkpoint of step {step} is of no step that the log tells of.")
        same_figures = self._differences.first is None
        same_weights = all(entry["identical"] for entry in self._compared)
        return {
            "home": str(self._home.path),
            "run": self._run.id.hex(),
            "model": labelled(self._start.settings.model, self._start.kind),
            "steps": steps,
            "last_step": links[-1].step,
            "packets": own + foreign,
            "foreign_packets": foreign,
            "identical": same_figures and same_weights and not stray,
            "max_differences": self._differences.largest,
            "first_difference": self._differences.first,
            "checkpoints": self._compared,
            "exact": exact,
            "device": self._start.device,
            "threads": self._start.threads,
            "other_versions": others,
            "notes": self._notes,
        }

    def _other_versions(self, starts: Sequence[Start]) -> dict[str, list[str]]:
        """What the daemon ran with where that is not what runs here: its versions, then ours."""
        found = {}
        for name, version in versions().items():
            theirs = dict.fromkeys(start.versions.get(name, "?") for start in starts)
            if list(theirs) != [version]:
                found[name] = [*theirs, version]
                self._note(f"{name} was {', '.join(theirs)} and is {version}: the last bits may differ.")
        return found

    def _is_exact(self, starts: Sequence[Start]) -> bool:
        """Whether the same bits are to be expected; if not, a note says why."""
        if any(len(start.settings.devices) > 1 for start in starts):
            self._note("The daemon had several devices, whose sums have another order: the last bits may differ.")
            return False
        if any(start.device != "cpu" for start in starts):
            self._note(NO_GPU_IS_EXACT)
            return False
        return True


@contextmanager
def _unused(home: Home) -> Iterator[None]:
    """While no daemon runs on the home; none can start meanwhile. Several replays may run at once.

    Raises:
        UsageError: a daemon is running on it.
    """
    try:
        lock = (home.path / "lock").open("rb")
    except FileNotFoundError:  # a copy of a home
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            what = f"A daemon is running on the home {home.path}."
            raise UsageError(what, f"Stop it first: `ftis-node stop{home.flag}`.") from None
        yield


def _refuse_dropped(log: Path) -> None:
    """Raises UserError if the beginning of the log is there no more."""
    older = older_parts(log)
    if older and older[0].number > 1:
        raise UserError(
            f"The log of this home begins with its part {older[0].number}: the parts before were dropped, to keep to "
            "its place on the disk, and a replay has to begin at the first step.",
            "Give `join` a larger disk_gb for a training that is to be replayed, or put back the parts from a copy.",
        )


def _made_of(start: Start) -> tuple[Any, ...]:
    """What an engine is loaded for: a link with another one needs another engine."""
    return start.task, start.data, start.eval_data, start.settings, start.device
