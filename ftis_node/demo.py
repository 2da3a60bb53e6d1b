"""The demo: it runs real daemons on this machine, shows them live, and sums up their results.

There are three (or four) with small models, or two with a model of the owner's.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.live import Live

from ftis_node.config.run import Run, RunFile, dump_run_file, run_for
from ftis_node.errors import UsageError, UserError
from ftis_node.host.loops import PARENT
from ftis_node.node.step_batch import mean
from ftis_node.observe.answers import Status
from ftis_node.observe.api import ask
from ftis_node.observe.live import nodes_view
from ftis_node.observe.metrics import read_events
from ftis_node.observe.plot import TO_DRAW, can_draw, plot_pass_at_1
from ftis_node.observe.terminal import console, words
from ftis_node.store.home import Home
from ftis_node.swarm.addresses import free_port
from ftis_node.swarm.identity import Identity
from ftis_node.tasks import load_task
from ftis_node.text import duration, number

POLL_SECONDS = 0.5
SPEAK_SECONDS = 5.0
TIME_LIMIT = 280.0  # seconds: on a slow machine the demo ends with fewer steps rather than late
OWN_LIMIT = 1800.0  # of an own model, which takes minutes a step on a slow CPU
STOP_SECONDS = 40.0
LAST_SECONDS = 900.0  # that an own model has for its last step and evaluation
TASK = "arithmetic"
ALIKE = ("tiny-a", "tiny-b", "tiny-c")
MIXED = ("tiny-chars", "tiny-numbers", "tiny-bpe")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEPS, OWN_STEPS = 80, 12
# Two nodes share the machine; a step is small enough that the first comes within minutes without a GPU.
OWN_SETTINGS = {"vram_share": 0.45, "batch_groups": 4, "eval_prompts": 16, "max_age": 3600}
SUMS = 600
SUM_TOKENS = 24
# Few tokens are read and written, so that a step is short on a CPU; small instruct models forget the box at first.
SUM_TEMPLATE = "{question} Reply with \\boxed{} around the number, and nothing else.\n"
SUM_RULE = "integer-boxed"
LATEST = 3  # steps whose rewards are a mean
STARTING = "Importing PyTorch and libp2p."
_MARK = ".ftis-node-demo"


@dataclass
class _Member:
    """One daemon of the demo."""

    name: str
    model: str
    flags: tuple[str, ...]
    home: Home
    role: str
    status: Status
    process: subprocess.Popen[bytes] | None = None

    def poll(self) -> None:
        """Read the daemon's status; keep the last one if it does not answer."""
        with suppress(UserError):
            self.status = ask(self.home.api_socket(), "/status", Status, timeout=2.0)

    @property
    def steps(self) -> int:
        return self.status.step or 0

    @property
    def tokenizer(self) -> str:
        return self.status.tokenizer or ""

    def curve(self) -> list[tuple[float, float]]:
        return [(e["since_start"], e["pass_at_1"]) for e in read_events(self.home.metrics, "evaluation")]


class NodeSummary(msgspec.Struct, frozen=True):
    """One node's results. pass_at_1_…: greedy, 0 to 1; reward_…: means of own samples in the first and the last steps.
    foreign_weight_share: foreign samples' part of the loss.

    tokenizer: its fingerprint. foreign_tokenizers: how many others the authors had whose groups it used.
    """

    name: str
    model: str
    role: str
    tokenizer: str
    foreign_tokenizers: int
    steps: int
    pass_at_1_before: float
    pass_at_1_after: float
    reward_before: float | None
    reward_after: float | None
    own_groups_used: int
    foreign_groups_used: int
    foreign_groups_by_author: dict[str, int]
    foreign_weight_share: float
    bytes_in: int
    bytes_out: int


class Summary(msgspec.Struct, frozen=True):
    """All nodes' results. complete: every node took its steps. picture: the file with the curves, None without one."""

    nodes: list[NodeSummary]
    seconds: float
    complete: bool
    picture: str | None


class Demo:
    """Starts the daemons, watches them until each has taken its steps, ends them, and sums up."""

    def __init__(
        self, output: Path, *, listener: bool, steps: int, quiet: bool, mixed: bool = False, model: str | None = None
    ) -> None:
        """
        Args:
            output: directory for the homes and results; a previous demo's is replaced, any other is refused.
            model: the owner's, by name or place: two nodes train LoRA layers of it on sums in words.
            mixed: take models with different tokenizers.
            steps: the steps that every node takes.
            quiet: draw nothing (for ``--json``).

        Raises:
            UserError: the output is not a demo's, or the owner's model cannot be found or asked.
        """
        self.output = output
        self.steps = steps
        self.console = console(stderr=True, quiet=quiet)
        self._interrupted, self._on_terminal = False, os.isatty(0)
        _prepare(output)
        self.task = TASK
        self._settings: Mapping[str, float] = {}
        self._run_file: Path | None = None
        self._limit = TIME_LIMIT
        self._title = "different models learning from one another (F-TIS)"
        if model is not None:
            self.members = [self._member(name, model, "lora", "--lora") for name in ("A", "B")]
            self._title = "nodes with one model learning from one another (F-TIS)"
            self._limit = OWN_LIMIT
            self._settings = OWN_SETTINGS
            sums = output / "sums.jsonl"
            sums.write_text(sums_in_words(), encoding="utf-8")
            self.task = str(sums)
            self._write_run(run_of_sums(model, self.task))
            return
        models = MIXED if mixed else ALIKE
        self.members = [
            self._member("A", models[0], "full", "--full"),
            self._member("B", models[1], "full", "--full"),
            self._member("C", models[2], "lora", "--lora"),
        ]
        if listener:
            self.members.append(self._member("D", models[1], "listener", "--full", "--own-share", "0"))
        if mixed:
            self._write_run(text_run())

    def _write_run(self, run: Run) -> None:
        self._run_file = self.output / "run.toml"
        self._run_file.write_text(dump_run_file(RunFile(run=run)), encoding="utf-8")

    def run(self) -> Summary:
        """Run the demo and return its summary. Ctrl-C, SIGTERM and a closed terminal end it early. However this process
        ends, it leaves none behind.

        Raises:
            UserError: a daemon ended by itself.
        """
        began = time.monotonic()
        if self.task != TASK:
            pace = "A step takes seconds on a GPU, and up to some minutes on a CPU"
            told = (
                f"Two nodes take {self.steps} steps on sums in words. {pace}; after {duration(self._limit)} they end."
            )
            self._say(told)
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # by nohup
        before = {number: signal.signal(number, self._interrupt) for number in ENDING[: 2 if ignored else 3]}
        try:
            self._start()
            self._watch(self._rounds(began))
            if self.task != TASK:
                self._watch(self._last_rounds(began))
        except KeyboardInterrupt:
            self._say("Interrupted; ending the nodes.")
            self._say(f"What they have learned stays in {self.output}.")
            raise
        finally:
            self._stop()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._sum_up(time.monotonic() - began)

    def _say(self, text: str) -> None:
        """Print a text, in which a command can be copied whole."""
        self.console.print(words(text), soft_wrap=True)

    def _interrupt(self, *_: object) -> None:
        """Note Ctrl-C for the next round. asyncio's own handler loses it if it comes while an answer is arriving."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def _member(self, name: str, model: str, role: str, *flags: str) -> _Member:
        status = Status(name=name, model=model, state="STARTING", reason=STARTING)
        return _Member(name, model, flags, Home(self.output / name.lower()), role, status)

    def _start(self) -> None:
        """Start all nodes at once. A gets a free port, so that its address is known before it runs."""
        first = self.members[0]
        first.home.path.mkdir(parents=True)
        port = free_port("127.0.0.1")
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.load_or_create(first.home.key).peer_id}"
        threads = 1
        if self.task != TASK:
            threads = max(1, len(os.sched_getaffinity(0)) // len(self.members))  # more than there are cost most of all
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "FTIS_PATIENCE": "90"}
        environment[PARENT] = str(os.getpid())
        for index, member in enumerate(self.members):
            place = ("--port", str(port)) if member is first else ("--peers", address)
            command = [
                sys.executable,
                "-m",
                "ftis_node",
                "join",
                f"--model={member.model}",
                f"--home={member.home.path}",
                "--host=127.0.0.1",
                f"--name={member.name}",
                f"--seed={index}",
                f"--task={self.task}",
                *place,
                *member.flags,
            ]
            for name, value in {"min_peers": len(self.members) - 1, **self._settings}.items():
                command.append(f"--set={name}={value}")
            if member is first and self._run_file is not None:
                command += ["--run", str(self._run_file)]
            member.home.path.mkdir(parents=True, exist_ok=True)
            with (member.home.path / "output.log").open("wb") as log:
                member.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches only the demo, which then ends the nodes in order
                )

    def _watch(self, rounds: Iterator[str]) -> None:
        """Draw all nodes under the headlines of these rounds; without a terminal, print one every few seconds."""
        if not self.console.is_terminal:
            spoken = 0.0
            for headline in rounds:
                if time.monotonic() - spoken >= SPEAK_SECONDS:
                    spoken = time.monotonic()
                    self._say(headline)
            return
        with Live(console=self.console, refresh_per_second=2, transient=False) as live:
            for headline in rounds:
                live.update(nodes_view([member.status for member in self.members], headline))

    def _rounds(self, began: float) -> Iterator[str]:
        """Poll all nodes repeatedly; yield a line about their progress each time."""
        while (elapsed := time.monotonic() - began) < self._limit:
            self._end_if_asked()
            for member in self.members:
                self._check_alive(member)
                member.poll()
            done = min(member.steps for member in self.members)
            scores = ", ".join(f"{m.name} {number(m.status.pass_at_1, '.2f')}" for m in self.members)
            where = f"slowest at step {min(done, self.steps)} of {self.steps}{self._left()} · pass@1 {scores}"
            yield f"{elapsed:3.0f} s · {where if done else self._waiting_for()}"
            if done >= self.steps:
                return
            time.sleep(POLL_SECONDS)

    def _last_rounds(self, began: float) -> Iterator[str]:
        """As `_rounds`, while the nodes end with an evaluation; a large model needs longer for it than `_stop` has."""
        for member in self.members:
            with suppress(UserError):  # it has ended by itself
                ask(member.home.api_socket(), "/finish", Status, order={})
        ends = time.monotonic() + LAST_SECONDS
        while time.monotonic() < ends:
            self._end_if_asked()
            for member in self.members:
                member.poll()
            running = [m.name for m in self.members if m.process is not None and m.process.poll() is None]
            if not running:
                return
            elapsed = time.monotonic() - began
            yield f"{elapsed:3.0f} s · {', '.join(running)}: the last step, then pass@1 once more"
            time.sleep(POLL_SECONDS)

    def _end_if_asked(self) -> None:
        """Raise KeyboardInterrupt after Ctrl-C, or once the terminal is gone."""
        # A closed terminal tells its first process only: make, in `ssh -t HOST make demo`, which waits for it.
        if self._interrupted or (self._on_terminal and not os.isatty(0)):
            raise KeyboardInterrupt

    def _left(self) -> str:
        """About how long the slowest node needs for its steps yet, by its latest; empty where that is seconds."""
        seconds = max((self.steps - one.steps) * (one.status.step_seconds or 0.0) for one in self.members)
        return f", about {duration(seconds)} yet" if seconds > 60 else ""

    def _waiting_for(self) -> str:
        """The states of nodes without a step yet; nodes with the same state share one sentence."""
        doing: dict[str, list[str]] = {}
        for member in self.members:
            if not member.steps:
                now = member.status.doing
                reason = member.status.reason if now is None else f"{member.status.reason} {now.sentence()}."
                doing.setdefault(reason, []).append(member.name)
        return " ".join(f"{', '.join(names)}: {reason}" for reason, names in doing.items())

    def _check_alive(self, member: _Member) -> None:
        if member.process is not None and member.process.poll() is not None:
            log = member.home.path / "output.log"
            last = " | ".join(log.read_text(errors="replace").splitlines()[-5:])
            raise UserError(f"Node {member.name} ended by itself: {last}", f"Its whole log is {member.home.log}.")

    def _stop(self) -> None:
        """Send SIGTERM to all, so that each takes its last evaluation and checkpoint; then SIGKILL to the rest."""
        running = [m.process for m in self.members if m.process is not None and m.process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
                process.wait()

    def _sum_up(self, seconds: float) -> Summary:
        authors = {Identity.load_or_create(m.home.key).peer_id: m.tokenizer for m in self.members}
        nodes = [self._node_summary(member, authors) for member in self.members]
        picture = self.output / "curves.png" if can_draw() else None
        complete = all(node.steps >= self.steps for node in nodes)
        summary = Summary(nodes, seconds, complete, str(picture) if picture is not None else None)
        if picture is not None:
            plot_pass_at_1(
                {f"{member.name} ({member.model}, {member.role})": member.curve() for member in self.members},
                picture,
                f"{len(nodes)} {self._title}",
            )
        (self.output / "summary.json").write_text(json.dumps(msgspec.to_builtins(summary), indent=1))
        for node in nodes:
            self._say(result_of(node))
        for line in self._what_now(nodes):
            self._say(line)
        curves = f"curves in {picture}" if picture is not None else f"for a picture of the curves: {TO_DRAW}"
        self._say(f"{seconds:.0f} s; {curves}; logs under {self.output}")
        return summary

    def _what_now(self, nodes: Sequence[NodeSummary]) -> Iterator[str]:
        """Tell the owner of a model how to talk to it, and first what kept it from learning if it has not learned."""
        if self.task == TASK:
            return
        done = min(node.steps for node in nodes)
        if done < self.steps:
            slow = "this machine is slow for this model. Take a smaller one, or a GPU"
            yield f"The time was over after {done} of {self.steps} steps: {slow}."
        if all(node.pass_at_1_after <= node.pass_at_1_before for node in nodes):
            advice = next((member.status.advice for member in self.members if member.status.advice), "")
            yield f"It answers no more questions right than before. {advice}".rstrip()
            flags = f"--reward {SUM_RULE} --template '{SUM_TEMPLATE.strip()}' --completion-tokens {SUM_TOKENS}"
            yield f"Why: ftis-node task check {self.task} --model {nodes[0].model} {flags}"
        flags = '--trained --compare "What is 47 plus 38?"'
        yield f"Ask it: ftis-node ask --checkpoint {self.members[0].home.path} {flags}"

    def _node_summary(self, member: _Member, authors: dict[str, str]) -> NodeSummary:
        """authors: the tokenizer of each, by peer id."""
        none_yet = {"step": member.steps, "pass_at_1": 0.0}
        evaluations = read_events(member.home.metrics, "evaluation") or [none_yet]
        status = member.status
        by_author = status.foreign_groups_used
        rewards = [e["own_reward"] for e in read_events(member.home.metrics, "step") if e["own_reward"] is not None]
        others = {authors[author] for author, groups in by_author.items() if groups and author in authors}
        return NodeSummary(
            name=member.name,
            model=member.model,
            role=member.role,
            tokenizer=member.tokenizer,
            foreign_tokenizers=len(others - {member.tokenizer}),
            steps=max(member.steps, evaluations[-1]["step"]),
            pass_at_1_before=evaluations[0]["pass_at_1"],
            pass_at_1_after=evaluations[-1]["pass_at_1"],
            reward_before=mean(rewards[:LATEST]),
            reward_after=mean(rewards[-LATEST:]),
            own_groups_used=status.own_groups_used or 0,
            foreign_groups_used=sum(by_author.values()),
            foreign_groups_by_author=by_author,
            foreign_weight_share=status.foreign_weight_share or 0.0,
            bytes_in=status.bytes_in or 0,
            bytes_out=status.bytes_out or 0,
        )


def _prepare(output: Path) -> None:
    """Make an empty directory with our mark; replace a previous demo's, refuse any other."""
    if output.exists():
        if not (output / _MARK).exists() and (not output.is_dir() or any(output.iterdir())):
            raise UsageError(f"{output} exists and is not a demo's.", "Name another --output.")
        shutil.rmtree(output)
    output.mkdir(parents=True)
    (output / _MARK).touch()


def result_of(node: NodeSummary) -> str:
    """A node's results in a sentence."""
    tokenizers = f" with {node.foreign_tokenizers} other tokenizers" if node.foreign_tokenizers else ""
    return (
        f"{node.name} ({node.model}, {node.role}): pass@1 {node.pass_at_1_before:.2f} → "
        f"{node.pass_at_1_after:.2f} and reward {number(node.reward_before, '.2f')} → "
        f"{number(node.reward_after, '.2f')} in {node.steps} steps, with {node.foreign_groups_used} groups of "
        f"{len(node.foreign_groups_by_author)} others{tokenizers}, which had "
        f"{node.foreign_weight_share:.0%} of the weight in its training"
    )


def sums_in_words() -> str:
    """JSON Lines of sums and differences of two numbers below 100, the same at each call."""
    drawn = random.Random(0)
    rows = []
    for _ in range(SUMS):
        first, second = drawn.randrange(10, 100), drawn.randrange(10, 100)
        if drawn.random() < 0.5:
            rows.append({"question": f"What is {first} plus {second}?", "answer": str(first + second)})
        else:
            rows.append({"question": f"What is {first} minus {second}?", "answer": str(first - second)})
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def run_of_sums(model: str, task: str) -> Run:
    """The run of such sums for a model, asked in its chat if it has one. Raises UserError as `load_tokenizer`."""
    from ftis_node.worker.facts import facts_of_run

    asked = load_task(task, reward=SUM_RULE, template=SUM_TEMPLATE)
    return run_for(facts_of_run(asked, model), group=8, completion_tokens=SUM_TOKENS)


def text_run() -> Run:
    """The run of the demo's task for models of any tokenizer."""
    return run_for(load_task(TASK).facts(), any_tokenizer=True)
