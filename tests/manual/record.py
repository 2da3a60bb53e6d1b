"""Groups that a model samples once for many trials: `make record ARGS="MODEL ROWS.jsonl --output FILE"`.

Each row of the task is answered in the template `tags-example`, by whole groups. The file has a line a group, as
`lab.scripts.read_samples` reads it, with what each completion earned. The same command goes on where it was stopped.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ftis_node.worker.messages import ScoredPacket
from tests.manual.readers import CAPS, opened

AT_ONCE = 4  # rows
TEMPLATE = "tags-example"


def recorded(output: Path) -> Counter[str]:
    """How many groups a file has of each question; a line that was cut off is removed."""
    if not output.exists():
        return Counter()
    lines = output.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    output.write_text("".join(whole))
    return Counter(json.loads(line)["question"] for line in whole)


def line_of(question: str, group: ScoredPacket) -> str:
    """A group's line of the file, its end included."""
    line = {
        "question": question,
        "packet": group.packet.hex(),
        "rewards": group.rewards,
    }
    return json.dumps(line) + "\n"


def record(model: str, task: str, held_out: str, groups: int, output: Path) -> Iterator[float]:
    """Sample what is missing until each row has so many groups; yields each new group's mean reward."""
    done = recorded(output)
    with closing(opened(model, False, task, eval_data=held_out, template=TEMPLATE)) as engine, output.open("a") as file:
        rows = engine.task.train
        for number in range(groups):
            missing = [row for row, example in enumerate(rows) if done[example.question] <= number]
            for begin in range(0, len(missing), AT_ONCE):
                some = missing[begin : begin + AT_ONCE]
                made = engine.generate(some, seeds=[number * len(rows) + row + 1 for row in some])
                for row, group in zip(some, made.groups, strict=True):
                    file.write(line_of(rows[row].question, group))
                    yield sum(group.rewards) / len(group.rewards)
                file.flush()


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.manual.record", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    groups = options.samples // CAPS["group"]
    for reward in record(options.model, options.task, options.held_out, groups, options.output):
        print(f"{reward:.2f}", flush=True)


if __name__ == "__main__":
    main()
