"""Partners that follow a script: they generate by rule, never train, and are there to be learned from at one's peril.

Their answers are right half of the time, after reasoning that has nothing to do with it. `random-reasoning` claims the
log-probs of its own rule; `lying` claims e⁻⁵ for every token, so that importance weights are cut at C and no divergence
seems large. The packets are sound either way, and admission takes them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ftis_node.lab.compute import InProcess
from ftis_node.packet import Completion
from ftis_node.worker.messages import pack_completions

MODEL = "tiny-a"  # whose tokenizer a script writes in; its weights are not used
RIGHT = 0.5
CLAIMED = -5.0
_REASONING = {value: 1 / 19 for value in range(19)}
_WRONG = range(27)


class Scripted(InProcess):
    """The compute of such a partner: an engine for everything but sampling."""

    def __init__(self, script: str, seed: int) -> None:
        super().__init__()
        self._lies = script == "lying"
        self._seed = seed

    async def call(self, op: str, **args: Any) -> dict[str, Any]:
        if op != "generate":
            return await super().call(op, **args)
        return self._generate(args["rows"])

    def _generate(self, rows: Sequence[int]) -> dict[str, Any]:
        answers, rng = [], random.Random(f"{self._seed}/{rows}")
        for row in rows:
            gold = self.engine.task.train[row].answer
            completions = [self._completion(int(gold), rng) for _ in range(self.engine.run.completions)]
            packed = pack_completions(completions)
            rewards = self.engine.score(row, packed)["rewards"]
            answers.append(packed | {"rewards": rewards, "prompt_ids": self.engine.prompts[row]})
        return {"groups": answers, "seconds": 0.0, "generation_batch": len(rows)}

    def _completion(self, gold: int, rng: random.Random) -> Completion:
        answers = {value: (1 - RIGHT) / len(_WRONG) for value in _WRONG}
        answers[gold] = answers.get(gold, 0.0) + RIGHT
        first, second = rng.choices(list(_REASONING), k=2)
        answer = rng.choices(list(answers), weights=list(answers.values()))[0]
        text = f"<think>{first} {second}</think><answer>{answer}</answer>"
        tokenizer = self.engine.policy.tokenizer
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        honest = [
            0.0,
            *_spelled(first, _REASONING),
            *_spelled(second, _REASONING),
            0.0,
            *_spelled(answer, answers),
            0.0,
        ]
        logprobs = [CLAIMED] * len(ids) if self._lies else honest
        return Completion(np.asarray(ids, np.uint32), np.asarray(logprobs, np.float32), True)


def _spelled(value: int, chances: Mapping[int, float]) -> list[float]:
    """Log-probs of a number's digits, and of its end, where numbers have these chances."""
    digits, left, found = str(value), sum(chances.values()), []
    for place in range(len(digits)):
        going_on = sum(chance for other, chance in chances.items() if str(other).startswith(digits[: place + 1]))
        found.append(math.log(going_on / left))
        left = going_on
    return [*found, math.log(chances[value] / left)]
