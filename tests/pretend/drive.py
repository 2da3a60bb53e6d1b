"""The product's compute side on the pretend device, phase after phase; prints one JSON object for each case,
after a list of what a GPU refuses and the device too.

    python -m tests.pretend.drive 'LAYERS [--lora] [--bf16] [--checkpointing]'…

It runs in a process of its own, because the device changes torch for the whole process.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.pretend import counts, device

device.install()

from transformers import Qwen2ForCausalLM  # noqa: E402

from ftis_node.worker.engine import Engine  # noqa: E402
from ftis_node.worker.messages import ScoredPacket  # noqa: E402
from tests.support import small_models  # noqa: E402

SHORT = 9
LONG = 17
ROWS = 3


class Drive:
    """An engine with a random model, and what each phase counted."""

    def __init__(self, folder: Path, asked: argparse.Namespace):
        torch.manual_seed(0)
        Qwen2ForCausalLM(small_models.tiny_config(num_hidden_layers=asked.layers)).save_pretrained(folder)
        small_models.tiny_tokenizer().save_pretrained(folder)
        self.flags: dict[str, Any] = {"model": str(folder), "lora": asked.lora, "eval_prompts": 8}
        self.flags |= {"dtype": "bfloat16" if asked.bf16 else "float32", "gradient_checkpointing": asked.checkpointing}
        self.told: dict[str, Any] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens within under this name."""
        with counts.counting() as counted:
            yield
        launches = sum(counted.launches.values())
        of_device = {"captures": counted.captures, "current": counted.current}
        self.told[name] = {
            "launches": launches,
            "kernels": counted.kernels,
            "waits": dict(counted.waits),
            **of_device,
        }

    def opened(self, place: str) -> Engine:
        """An engine with the model."""
        return small_models.opened_engine(run={"completion_tokens": LONG}, **self.flags, device=place)

    def run(self, directory: str):
        """Load, generate, score, step, evaluate, save, restore on the device and on the CPU."""
        with self.phase("load"):
            engine = self.opened(f"{device.NAME}:0")
        self.told["way"] = engine.policy.way
        rows = list(range(ROWS))
        with self.phase("generate"):
            made = engine.generate(rows).groups
        for tokens in (SHORT, LONG):
            engine.open(engine.run.model_copy(update={"eos": (), "completion_tokens": tokens}))
            state = engine.random.get_state()
            policy = engine.policy
            with self.phase(f"{tokens} tokens"):
                replayed = engine.generate(rows).groups
            with self.phase(f"{tokens} tokens again"):
                engine.generate(rows)
            engine.random.set_state(state)
            engine.policy = replace(policy, graphs=False)
            with self.phase(f"{tokens} tokens launched one by one"):
                launched = engine.generate(rows).groups
            engine.policy = policy
            same = all(map(_same_tokens, replayed, launched))
            self.told["same without graphs"] = policy.graphs and same and self.told.get("same without graphs", True)
        with self.phase("score"):
            for row, group in zip(rows, made, strict=True):
                engine.score(row, group.packet)
        for step in ("first step", "step"):
            with self.phase(step):
                report = engine.step(small_models.batch_of(rows, made, uneven=True))
            assert report.skipped is None, report.skipped
        with self.phase("after a step"):
            engine.generate(rows)
        engine._crowded = True  # as by a plan that has no room for both
        engine.step(small_models.batch_of(rows, made, uneven=True))
        with self.phase("after a step that needed the memory"):
            engine.generate(rows)
        with self.phase("evaluate"):
            engine.evaluate()
        with self.phase("save"):
            engine.save(directory)
        expected = engine.generate(rows[:2]).groups
        with self.phase("restore"):
            engine.restore(directory, 2)
        again = engine.generate(rows[:2]).groups
        self.told["same after restoring"] = [one.packet for one in again] == [one.packet for one in expected]
        on_cpu = self.opened("cpu")
        on_cpu.restore(directory, 2)
        on_cpu.save(directory)
        engine.restore(directory, 2)


def _same_tokens(some: ScoredPacket, others: ScoredPacket) -> bool:
    pairs = zip(small_models.completions_of(some), small_models.completions_of(others), strict=True)
    return all(one.token_ids.tolist() == other.token_ids.tolist() for one, other in pairs)


def _refused() -> list[bool]:
    """Whether the device refuses each of four operations on tensors of two devices, and one that is none."""

    def refuses(what: Callable[[], object]) -> bool:
        try:
            what()
        except counts.PretendError:
            return True
        return False

    with device.pretending():
        here = torch.ones(2, device=device.NAME)
        there = torch.ones(2)
        drawn = partial(torch.rand, 2, device=device.NAME, generator=torch.Generator())
        return [*map(refuses, (lambda: here + there, lambda: here @ there, here.numpy, drawn, lambda: here + 1.0))]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("layers", type=int)
    for flag in ("--lora", "--bf16", "--checkpointing"):
        parser.add_argument(flag, action="store_true")
    torch.set_num_threads(1)
    print(json.dumps(_refused()))
    for case in sys.argv[1:]:
        counts.faults.clear()
        with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as saved, device.pretending():
            drive = Drive(Path(model), parser.parse_args(case.split()))
            drive.run(saved)
        print(json.dumps({**drive.told, "faults": counts.faults}))


if __name__ == "__main__":
    main()
