"""The parts of `make real` that need two daemons: they exchange groups and train, and what they trained is exported."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ftis_node.observe.metrics import read_events
from tests.manual.real_parts import Check
from tests.support.daemons import Daemon, run_cli

STEPS = 3
TOKENS = 24
SMALL = ("batch_groups=2", "eval_prompts=2", "eval_every=1000", "max_age=3600", "wait=600", "patience=900")
# Which of a model's answers earn hangs on their letters alone: so any model has groups with a signal from the start.
TASK = '''
"""Questions whose answers earn by chance: by the sha256 of their letters."""

import hashlib

from ftis_node.tasks import Score, make_task


def judge(text, answer):
    drawn = hashlib.sha256(f"{answer}/{text}".encode()).digest()[0] % 4 == 0
    return Score(float(drawn), formatted=True, lenient=drawn)


def task():
    rows = [(f"Tell me something about the number {n}.", str(n)) for n in range(20, 80)]
    return make_task(rows, reward=judge, template="{question}\\n", completion_tokens=24, prompt_tokens=96)
'''

Pair = Callable[[str, str, str], Iterator[Check]]


def exchange(first: str, second: str, dtype: str) -> Iterator[Check]:
    """One model twice, with LoRA layers and whole, from its GGUF file if there is one: each learns from the other."""
    file = Path(f"{second}.gguf")
    if file.exists():
        second = str(file)
    yield from learned((first, "--lora"), (second, "--full"), dtype, "--model", first)


def text_run(first: str, second: str, dtype: str) -> Iterator[Check]:
    """Two models of unlike tokenizers: each takes steps on the other's text."""
    yield from learned((first, "--lora"), (second, "--full"), dtype, "--any-tokenizer")


PAIR_PARTS: dict[str, Pair] = {"exchange": exchange, "text-run": text_run}


def learned(first: tuple[str, str], second: tuple[str, str], dtype: str, *kind: str) -> Iterator[Check]:
    """Start both daemons and wait until each has taken steps on the other's groups; then export the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lettered.py").write_text(TASK)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        task = ("--task", "lettered:task")
        run_file = folder / "run.toml"
        made = run_cli("run", "new", *kind, *task, "--group", "4", "--chat", "auto", "-o", str(run_file), "--json")
        if made.returncode != 0:
            yield Check("run new", False, made.stderr[-300:])
            return
        yield Check("run new", True, f"run {json.loads(made.stdout)['id'][:8]}")
        settings = [word for one in (*SMALL, f"dtype={dtype}") for word in ("--set", one)]
        one, other = (
            Daemon(folder / f"node-{number}", "--model", model, way, *task, *settings)
            for number, (model, way) in enumerate((first, second))
        )
        try:
            one.flags += ("--run", str(run_file))
            one.start()
            other.flags += ("--peers", one.address())
            other.start()
            for daemon in (one, other):
                status = daemon.wait(lambda status, daemon=daemon: steps_taken(daemon, status), "steps", seconds=1500)
                foreign = sum(step["foreign_groups"] for step in read_events(daemon.home.metrics, "step"))
                refused = status["refused_packets"]
                figure = f"{status['step']} steps, {foreign} foreign groups, refused {refused or 'none'}"
                yield Check(f"trained on the other's groups, {daemon.flags[2]}", not refused, figure)
            codes = [daemon.stop() for daemon in (one, other)]
            yield Check("stopped", codes == [0, 0], f"exit codes {codes}")
            yield exported(one.home.path, folder / "export")
        finally:
            one.clean_up()
            other.clean_up()


def steps_taken(daemon: Daemon, status: dict[str, Any]) -> bool:
    """Whether so many steps are done, and foreign groups were in some."""
    if status.get("step", 0) < STEPS:
        return False
    return any(step["foreign_groups"] for step in read_events(daemon.home.metrics, "step"))


def exported(home: Path, to: Path) -> Check:
    """The command that takes a trained model out of a home."""
    done = run_cli("export", "--checkpoint", str(home), "--to", str(to), "--json")
    what = f"{json.loads(done.stdout)['kind']} of step {json.loads(done.stdout)['step']}" if not done.returncode else ""
    return Check("export of the home", done.returncode == 0, what or done.stderr[-300:])
