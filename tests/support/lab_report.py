"""Writes what the lab's runner would have left on disk, with effects that a test knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STEPS = 20
EVERY = 5
TAIL = 2


class Laboratory:
    """An experiment in the making; `write` puts it on disk."""

    def __init__(self, out: Path, *, seeds: int = 8, target: float = 0.7, steps: int = STEPS):
        self.out = out
        self.seeds = list(range(seeds))
        self.target = target
        self.steps = steps
        self.cells: list[dict[str, Any]] = []
        self.claims: list[dict[str, Any]] = []
        self.trials: list[dict[str, Any]] = []
        self.nodes: dict[str, None] = {}

    def cell(
        self,
        name: str,
        finals: Mapping[str, float | Sequence[float]],
        *,
        harder: bool = False,
        said: Mapping[str, float] | None = None,
        absent: Sequence[int] = (),
        unfinished: Sequence[int] = (),
        **facts: Any,
    ) -> Laboratory:
        """A cell whose seeds end at exactly these pass@1 (one for all, or one a seed).

        said: of every step, see `lab.payloads.Watch.take`.
        """
        named = {
            "name": name,
            "label": name.upper(),
            "collaboration": "vertical",
            "pace": "lockstep",
        }
        self.cells.append(named | facts)
        self.nodes |= dict.fromkeys(finals)
        for seed in self.seeds:
            directory = Path("trials") / f"{name}-{seed}"
            self.trials.append(
                {
                    "id": f"{name}{seed}",
                    "cell": name,
                    "seed": seed,
                    "directory": str(directory),
                }
            )
            if seed in absent:
                continue
            ends = {node: value if isinstance(value, float) else value[seed] for node, value in finals.items()}
            (self.out / directory).mkdir(parents=True)
            lines = [line for node, end in ends.items() for line in self._node(node, end, harder, said)]
            lines += [] if seed in unfinished else [{"event": "end", "seconds": 60.0, "cpu": 50.0}]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.out / directory / "events.jsonl").write_text(text + '{"event": "cut sho')
        return self

    def claim(self, compare: str, a: str, b: str, **facts: Any) -> Laboratory:
        said = {
            "text": f"{a} {compare} {b}",
            "source": "paper",
            "family": "one",
            "compare": compare,
        }
        self.claims.append(said | facts | {"a": a, "b": b})
        return self

    def write(self) -> Path:
        nodes = [{"name": node, "model": f"tiny-{node.lower()}", "kind": "full"} for node in self.nodes]
        manifest = {
            "schema": 1,
            "name": "made-up",
            "title": "Made up",
            "about": "Of *no* import.",
            "commit": "abc",
            "versions": {"torch": "2"},
            "file_sha256": "",
            "started": "2026-01-01T00:00:00",
            "tail": TAIL,
            "seeds": self.seeds,
            "target": self.target,
            "nodes": nodes,
            "cells": self.cells,
            "trials": self.trials,
            "claims": self.claims,
        }
        self.out.mkdir(exist_ok=True)
        (self.out / "manifest.json").write_text(json.dumps(manifest))
        return self.out

    def _node(self, node: str, end: float, harder: bool, said: Mapping[str, float] | None) -> list[dict[str, Any]]:
        lines = []
        flat = self.steps - (TAIL - 1) * EVERY  # from here on at its end, so that the mean of the tail is the end
        for step in range(self.steps + 1):
            spent = {
                "time": 2.0 * step,
                "cpu": 1.5 * step,
                "generated": 144 * step,
                "trained": 288 * step,
            }
            head = {"node": node, "step": step, **spent}
            if step % EVERY == 0:
                right = 0.2 + (end - 0.2) * min(1.0, step / flat)
                rates = {
                    "pass_at_1": right,
                    "formatted": 0.9,
                    "lenient": right,
                    "prompts": 500,
                }
                lines.append({"event": "evaluation", **head, "set": "held-out", **rates})
            if harder and step in (0, self.steps):
                lines.append(
                    {
                        "event": "evaluation",
                        **head,
                        "set": "harder",
                        "pass_at_1": end / 2,
                    }
                )
            if step:
                payloads = {"payloads": {**said, "completions": 36}} if said else {}
                lines.append({"event": "step", **head, **payloads, "groups": {}})
        return lines
