"""A base model's first lessons in the form that a run asks for: `make warm-up ARGS="MODEL SOLUTIONS --output FOLDER"`.

It learns what follows the prompt of the template `tags-example`, from solutions that somebody wrote: each line of the
file has a `question`, the `solution` that is to be reasoned, and the `answer`. Its embeddings stay as they are. The
folder that is written is a model like any other.
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from ftis_node.lab.recipes import RECIPES
from ftis_node.lab.warmup import teach
from ftis_node.tasks.templates import TEMPLATES
from tests.manual.record import TEMPLATE

RULE = "integer"

Lesson = tuple[str, str]


def lessons_of(solutions: Path) -> list[Lesson]:
    """Prompts with what is to follow them, one a line of the file."""
    lessons = []
    for line in solutions.read_text().splitlines():
        row = json.loads(line)
        prompt = TEMPLATES[TEMPLATE][RULE].replace("{question}", row["question"])
        lessons.append((prompt, f" <think>{row['solution']}</think> <answer>{row['answer']}</answer>"))
    return lessons


def batches(lessons: list[Lesson], size: int, seed: int) -> Iterator[list[Lesson]]:
    """Batches without end, each epoch in another order; says on standard output how many were drawn."""
    rng = random.Random(seed)
    drawn = 0
    while True:
        rng.shuffle(lessons)
        for begin in range(0, len(lessons) - size + 1, size):
            yield lessons[begin : begin + size]
            drawn += 1
            print(f"{drawn} steps", flush=True)


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m tests.manual.warm_up", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("solutions", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    lessons = lessons_of(options.solutions)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.get_input_embeddings().requires_grad_(False)
    schedule = dataclasses.replace(
        RECIPES[0],
        steps=options.epochs * (len(lessons) // options.batch),
        rate=options.rate,
        rise=10,
    )
    drawn = batches(lessons, options.batch, options.seed)
    # A cached copy of a weight would never see a step.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        teach(model, tokenizer, lambda: next(drawn), schedule)
    model.to(torch.bfloat16).save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
