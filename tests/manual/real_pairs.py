"""The parts of `make real` that need two daemons: they exchange groups and train, and what they trained is exported."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    rows = [(f"Tell me something about the number {n}, in five words.", str(n)) for n in range(20, 80)]
    return make_task(rows, reward=judge, template="{question}\\n", completion_tokens=24, prompt_tokens=96)
'''
# What a base model is warmed up with: it goes on to its cap otherwise, and an answer without an end earns nothing.
WARMING = 40  # updates
ANSWERS = (
    "It is {kind}.",
    "Its double is {double}.",
    "It comes after {before}.",
    "Add one: {after}.",
    "A fine number.",
)

Pair = Callable[[str, str, str], Iterator[Check]]


def exchange(first: str, second: str, dtype: str) -> Iterator[Check]:
    """One model twice, with LoRA layers and whole, from its GGUF file if there is one: each learns from the other."""
    file = Path(f"{second}.gguf")
    if file.exists():
        second = str(file)
    yield from learned((first, "--lora"), (second, "--full"), dtype, "--model", first)


def text_run(first: str, second: str, dtype: str) -> Iterator[Check]:
    """Two models of unlike tokenizers, the second a base model: each takes steps on the other's text."""
    with tempfile.TemporaryDirectory() as folder:
        loss = warm_up(second, folder)
        yield Check("warmed up to end its answers", loss < 1.0, f"{WARMING} updates, {loss:.2f} nats a token")
        yield from learned((first, "--lora"), (folder, "--full"), dtype, "--any-tokenizer")


def warm_up(source: str, folder: str) -> float:
    """Train a base model's layers on short answers of the task below, in fp32, and write it to a folder.

    Returns:
        the mean loss of the last ten updates, in nats a token of the answers.
    """
    drawn = random.Random(0)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.get_input_embeddings().requires_grad_(False)  # most of the weights, and tied to the head
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=3e-5)
    losses = []
    for _ in range(WARMING):
        optimiser.zero_grad()
        rows = []
        for number in drawn.sample(range(80, 1000), 4):
            asked = tokenizer(f"Tell me something about the number {number}, in five words.\n")["input_ids"]
            facts = {
                "kind": "odd" if number % 2 else "even",
                "double": 2 * number,
                "before": number - 1,
            }
            answer = drawn.choice(ANSWERS).format(**facts, after=number + 1)
            said = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ids = torch.tensor([asked + said])
            labels = torch.tensor([[-100] * len(asked) + said])
            loss = model(input_ids=ids, labels=labels).loss / 4
            loss.backward()
            rows.append(loss.item())
        optimiser.step()
        losses.append(sum(rows))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(losses[-10:]) / 10


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
