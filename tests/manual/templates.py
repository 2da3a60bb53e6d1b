r"""Templates × models: in which words a small model reasons, and ends in the form that earns.

    python -m tests.manual.templates MODEL --into FILE.jsonl [--best NAME,…] [--rows 100] [--samples 2]
    python -m tests.manual.templates --table FILE.jsonl

MODEL (a folder) is asked held-out questions in its own chat, in fp32 on the CPU, at temperature 1, in the words of each
template: GSM8K's test rows, evenly spread, and word problems of one step that are made here from a seed. Each line of
FILE is one template, task and row; the same command goes on where it was.

Written before the first run (29 November 2026):

* Claim: for instruct models asked in a chat another wording than `paper` gets more of its samples right.
* All templates are tried on the first 10 rows of each task. `paper` and the two others with the largest share of right
  samples, of both tasks together, go on to all rows of that model, some rows of each in turn; the rest stays there.
  (It was 20 rows, until the machine turned out to be too slow: 40 samples of `paper` were all that was known then.)
* The best is the one with the largest share right over both tasks at all rows, each task counting half; ties (the
  interval of the difference of shares has 0 in it) go to groups with a signal, then to the template without an
  example, which is shorter, then to the form `tags`, whose rule is every run's that exists. None with a placeholder in
  the answer's place is taken.
* Shares of groups have Wilson's intervals at 95 %; the samples of a row are not independent, so intervals of shares of
  samples are bootstrapped over rows (2,000 draws). Of the larger model only those named with `--best` are tried, on
  fewer rows: it may veto a choice (its share right below `paper`'s, interval of the difference without 0), and makes
  none.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from ftis_node.config.settings import Settings
from ftis_node.evaluate.intervals import wilson
from ftis_node.evaluate.judging import judge
from ftis_node.evaluate.learnable import TriedRow
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.tasks import Example, Score, Scorer, load_evaluation, score, scoring
from ftis_node.tasks.rewards import parse_integer
from ftis_node.tasks.templates import TEMPLATES, instruction
from ftis_node.tokenizer.asking import end_ids, prompt_ids
from ftis_node.tokenizer.chat import chat_of
from ftis_node.worker.restore import load_trained

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
TASKS = ("gsm8k", "words")
FIRST, GO_ON = 10, 2  # rows on which all are tried; how many others go on beside `paper`
TURN = 20  # rows of each template and task that are generated together, and written down when all are done
TOKENS = 200
AT_ONCE = 256  # completions side by side: small batches waste a CPU
_HASHES = (
    "Please reason step by step, one step a line. The last line is #### and then the final answer, an integer, and "
)
_HASHES += "nothing else."


def candidates() -> dict[str, tuple[str, str]]:
    """Each template's rule and text, by its name; also those that were tried and are no part of the product."""
    tags = TEMPLATES["tags-example"]["integer"]
    boxed = TEMPLATES["boxed-example"]["integer-boxed"]
    paper = TEMPLATES["paper"]["integer"]
    reply = re.search(r"<think>(.*)</think> <answer>7</answer>\n", tags)
    asked = re.search(r"Question: (.*)\n", tags)
    assert reply is not None and asked is not None
    shown = f"\nUser: {asked[1]}\nAssistant: <think> {reply[1]} </think> <answer> 7 </answer>"
    hashes = tags.replace(instruction("integer"), _HASHES).replace(reply[0], f"{reply[1]}\n#### 7\n")
    return {
        "paper": ("integer", paper),
        "paper-example": ("integer", paper.replace("\nUser: {question}", f"{shown}\nUser: {{question}}")),
        "tags": ("integer", f"{{question}}\n\n{instruction('integer')}\n"),
        "tags-example": ("integer", tags),
        "boxed": ("integer-boxed", TEMPLATES["boxed"]["integer-boxed"]),
        "boxed-example": ("integer-boxed", boxed),
        "hashes": ("hashes", f"{{question}}\n\n{_HASHES}\n"),
        "hashes-example": ("hashes", hashes),
    }


def last_line(text: str, answer: str) -> Score:
    """The verdict of the form `hashes`: #### and the integer on the last line."""
    _, _, last = text.strip().rpartition("\n")
    given = parse_integer(last.removeprefix("####")) if last.startswith("####") else None
    right = given == int(answer)
    return Score(float(right), given is not None, right or score("integer", text, answer).lenient)


def word_problems(count: int) -> list[Example]:
    """Questions of one step with numbers from 2 to 20, all different; the answer is positive."""
    rng = random.Random("word problems of one step")
    things = ("apples", "pens", "books", "coins", "stamps", "eggs", "shells", "cards")
    names = ("Ann", "Ben", "Carla", "Dan", "Eva", "Farid", "Gita", "Hugo")
    found: dict[str, int] = {}
    while len(found) < count:
        a = rng.randint(2, 20)
        b = rng.randint(2, 20)
        thing, name, other = rng.choice(things), *rng.sample(names, 2)
        more = f"{name} has {a} {thing} and {other} gives {name} {b} more. How many {thing} does {name} have now?"
        fewer = f"{name} has {a + b} {thing} and gives {b} of them to {other}. How many {thing} does {name} have left?"
        times = f"{name} has {a} boxes with {b} {thing} in each. How many {thing} does {name} have in all?"
        shares = f"{name} shares {a * b} {thing} equally among {b} friends. How many {thing} does each friend get?"
        question, answer = rng.choice(((more, a + b), (fewer, a), (times, a * b), (shares, a)))
        found[question] = answer
    return [Example(question, str(answer)) for question, answer in found.items()]


def rows_of(task: str, count: int) -> list[Example]:
    """So many questions of the task, in the order in which they are asked."""
    if task == "words":
        return word_problems(count)
    every = load_evaluation("gsm8k", data=DATA / "gsm8k_test.jsonl").held_out
    spread = [every[index * len(every) // count] for index in range(count)]
    random.Random("the order of the rows").shuffle(spread)  # so that the first of them are spread, too
    return spread


class Job(NamedTuple):
    """A template that is to be tried on a row."""

    task: str
    name: str
    row: int
    example: Example


class Subject:
    """A model that is asked in its own chat."""

    def __init__(self, model: str):
        self.policy = load_trained(Settings(model=model, device="cpu", dtype="float32"), None)
        self.chat = chat_of(self.policy.tokenizer)
        self.ends = end_ids(self.policy.tokenizer, self.chat)

    def tried(self, jobs: Sequence[Job], samples: int, seed: int) -> Iterator[tuple[Job, TriedRow]]:
        """Yield the figures of each job's samples, which are generated side by side."""
        sampling = Sampling(TOKENS, 1.0, self.ends)
        texts = candidates()
        tokenizer = self.policy.tokenizer
        prompts = [prompt_ids(tokenizer, texts[job.name][1], job.example.question, self.chat) for job in jobs]
        noise = torch.Generator().manual_seed(seed)
        groups = generate(self.policy, prompts, group=samples, sampling=sampling, generator=noise, batch=AT_ONCE)
        for job, group in zip(jobs, groups, strict=True):
            rule = texts[job.name][0]
            with Scorer(last_line) if rule == "hashes" else scoring(rule) as scorer:
                yield job, TriedRow.of(job.row, [judge(tokenizer, one, job.example, scorer) for one in group])


def measure(model: str, into: Path, best: Sequence[str], rows: int, samples: int):
    """Try what is not tried yet, and write it down."""
    subject = Subject(model)
    questions = {task: rows_of(task, rows) for task in TASKS}

    def up_to(names: Sequence[str], limit: int):
        done = {(one["task"], one["template"], one["row"]) for one in read(into)}
        every = [(task, name, row) for row in range(limit) for task in TASKS for name in names]
        jobs = [Job(*key, questions[key[0]][key[2]]) for key in every if key not in done]
        began = time.monotonic()
        with into.open("a", encoding="utf-8") as file:
            for job, one in subject.tried(jobs, samples, seed=limit) if jobs else ():
                told = {"model": Path(model).name, "task": job.task, "template": job.name}
                file.write(json.dumps(told | msgspec.to_builtins(one)) + "\n")
        print(f"up to row {limit}: {len(jobs)} rows, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    if not best:
        up_to(list(candidates()), min(FIRST, rows))
    names = best or going_on(read(into))
    for limit in range(FIRST + TURN, rows + TURN, TURN):
        up_to(names, min(limit, rows))


def read(into: Path) -> list[dict[str, Any]]:
    """The lines of a file that are whole."""
    lines = into.read_text(encoding="utf-8").splitlines(keepends=True) if into.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def going_on(found: Sequence[dict[str, Any]]) -> list[str]:
    """`paper`, and the others with the largest share right on the first rows."""
    first = [one for one in found if one["row"] < FIRST]

    def right(name: str) -> int:
        return sum(int(one["right"]) for one in first if one["template"] == name)

    others = sorted((name for name in candidates() if name != "paper"), key=right, reverse=True)
    return ["paper", *others[:GO_ON]]


# --- the table --------------------------------------------------------------------------------------------------------


def bootstrapped(rows: Sequence[dict[str, Any]], what: str) -> tuple[float, float, float]:
    """A share of samples, and its interval at 95 % over rows."""
    rng = random.Random(what)
    shares = [row[what] / row["samples"] for row in rows]
    means = sorted(sum(rng.choices(shares, k=len(shares))) / len(shares) for _ in range(2000))
    return sum(shares) / len(shares), means[50], means[1949]


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each model, task and template."""
    heads = [
        "model",
        "task",
        "template",
        "rows × samples",
        "formatted",
        "right",
        "right in any form",
        "groups with a signal",
        "tokens",
        "cut off",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    keys = dict.fromkeys((one["model"], one["task"], one["template"]) for one in found)
    for model, task, name in sorted(keys):
        rows = [one for one in found if (one["model"], one["task"], one["template"]) == (model, task, name)]
        samples = sum(one["samples"] for one in rows)
        cells = []
        for what in ("formatted", "right", "lenient"):
            share, low, high = bootstrapped(rows, what)
            cells.append(f"{share:.2f} [{low:.2f}, {high:.2f}]")
        signals = sum(one["signal"] for one in rows)
        low, high = wilson(signals, len(rows))
        cells.append(f"{signals / len(rows):.2f} [{low:.2f}, {high:.2f}]")
        cells.append(f"{sum(one['tokens'] for one in rows) / samples:.0f}")
        cells.append(f"{1 - sum(one['finished'] for one in rows) / samples:.2f}")
        each = rows[0]["samples"]
        lines.append(f"| {model} | {task} | `{name}` | {len(rows)} × {each} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None):
    """Measure, or print the table of what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="A folder.")
    parser.add_argument("--into", type=Path, help="Where to keep what was tried.")
    parser.add_argument("--best", default="", help="Only these templates, on all rows.")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--table", type=Path, help="Print the table of this file.")
    asked = parser.parse_args(arguments)
    if asked.table is not None:
        print(table(read(asked.table)))
    else:
        measure(asked.model, asked.into, [name for name in asked.best.split(",") if name], asked.rows, asked.samples)


if __name__ == "__main__":
    main()
