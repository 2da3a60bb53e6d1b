"""Partners that never train: those that follow a script, and those whose groups were recorded.

Scripts write by rule, and are there to be learned from at one's peril. Their answers are right half of the time. Those
of `random-reasoning` and `lying` come after reasoning that has nothing to do with them; all others put a payload (see
`payloads`) into what is right, and reason truly before a wrong answer, so that the payload is what pays. The packets
are sound, and admission takes them.

What they claim of their tokens is, by the second word of the script: nothing, the log-probs of their own rule; `low`,
e⁻⁵ for every token, so that importance weights are cut at C and no divergence seems large (`lying` too); `high`, 1 for
every token; `copied`, what the built-in model finds, so that a relative of it sees importance weights of about 1;
`careful`, twice that, so that the mean weight stays below 1 when the relative has learned more.

In a text run a script writes its text byte by byte, as a model of another tokenizer would, and each token's log-prob
stands at its first byte. A reader with the built-in model's tokenizer then has a chunk for each own token, and its
claim is the very one that the script chose.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ftis_node.errors import UsageError
from ftis_node.lab.compute import InProcess
from ftis_node.lab.payloads import CAREFUL, COPIED, HIGH, LOW, RANDOM, SCRIPTS, reasoning, room, true_reasoning
from ftis_node.packet import Completion, TextPacket, decode, encode
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.score import completion_logprobs
from ftis_node.tasks import Example
from ftis_node.worker.formats import Slot
from ftis_node.worker.messages import Answer, Generate, Generated, Request, ScoredPacket

MODEL = "tiny-a"  # whose tokenizer a script writes in, and whose log-probs it copies, unless its node names another
RIGHT = 0.5
CLAIMED = -5.0
_REASONING = {value: 1 / 19 for value in range(19)}
_WRONG = range(27)
_CARE = 2.0
_FLOOR = -20.0  # of copied log-probs; admission takes no much smaller ones
Ids: TypeAlias = NDArray[np.uint32]
Logprobs: TypeAlias = NDArray[np.float32]
Outcome = TypeVar("Outcome")
Written: TypeAlias = tuple[list[int], list[float]]
"""Token ids of a completion, and their log-probs by the script's own rule."""


class Partner(InProcess):
    """The compute of a partner that never trains: an engine for everything but sampling. What it gives for a row is
    `_group`'s.

    seed: the trial's; what is given follows from it and the rows asked for.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    async def call(self, request: Request[Answer]) -> Answer:
        """As `InProcess.call`, but nothing is sampled."""
        if isinstance(request, Generate):
            return cast(Answer, self._generate(request))
        return await super().call(request)

    def _generate(self, request: Generate) -> Generated:
        """Sound packets for these rows, in their order."""
        engine = self.engine
        rng = random.Random(f"{self._seed}/{list(request.rows)}")
        slots = request.slots or range(len(request.rows))
        answers = []
        for slot, row in zip(slots, request.rows, strict=True):
            place = Slot(request.author, request.round, slot, request.policy_step)
            prompt = engine.task.prompt(engine.task.train[row])
            packet = engine.packets.write(place, prompt, engine.prompts[row], self._group(row, rng))
            packet = _by_bytes(packet)
            answers.append(ScoredPacket(packet, engine.rewards(row, packet)))
        return Generated(answers, seconds=0.0, generation_batch=len(request.rows))

    def _group(self, row: int, rng: random.Random) -> list[Completion]:
        """The completions of one group for this row."""
        raise NotImplementedError


class Recorded(Partner):
    """A partner whose groups a model sampled before, so that many trials need its work once.

    samples: the file of them, see `read_samples`.
    """

    def __init__(self, samples: str, seed: int) -> None:
        """Raises UsageError, see `read_samples`."""
        super().__init__(seed)
        self._samples = samples
        self._groups = read_samples(samples)

    def _group(self, row: int, rng: random.Random) -> list[Completion]:
        """One of the groups of this row's question, by chance. Raises UsageError if there is none."""
        question = self.engine.task.train[row].question
        if question not in self._groups:
            raise UsageError(f"{self._samples} has no group for the row {question!r}.", "Record all rows of the task.")
        packet = decode(rng.choice(self._groups[question]))
        if isinstance(packet, TextPacket):
            raise UsageError(f"{self._samples} has groups of a text run.", "Record them in a run of one tokenizer.")
        return list(packet.completions())


def read_samples(path: str) -> dict[str, list[bytes]]:
    """Packets by their question. Each line of the file is a JSON object of `question` and `packet`, in hexadecimal.

    Raises:
        UsageError: the file cannot be read, or a line is none.
    """
    groups: dict[str, list[bytes]] = {}
    try:
        for line in Path(path).read_text().splitlines():
            recorded = json.loads(line)
            groups.setdefault(recorded["question"], []).append(bytes.fromhex(recorded["packet"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} has no recorded groups: {error}.", "Make it by `make record`.") from None
    return groups


class Scripted(Partner):
    """A partner that writes by rule. The task must be of arithmetic's kind, as `lab.sums` is too.

    script: a name of `payloads.SCRIPTS`.
    """

    _between = ""  # the tags of reasoning and of the answer

    def __init__(self, script: str, seed: int) -> None:
        super().__init__(seed)
        self._writes, self._claims = SCRIPTS[script]

    def _group(self, row: int, rng: random.Random) -> list[Completion]:
        """Completions that are written and claimed by the script."""
        write = self._payload
        if self._writes == RANDOM:
            write = self._at_random
        example = self.engine.task.train[row]
        written = [write(example, rng) for _ in range(self.engine.run.completions)]
        return self._claimed(row, written)

    def _claimed(self, row: int, written: Sequence[Written]) -> list[Completion]:
        """Completions with the log-probs that the script claims of them.

        Args:
            written: token ids, and their log-probs by the script's own rule, which only the claim `own` uses.
        """
        ids = []
        claims = []
        for chosen, logprobs in written:
            ids.append(np.asarray(chosen, np.uint32))
            claims.append(np.asarray(logprobs, np.float32))
        if self._claims == LOW:
            claims = [np.full_like(logprobs, CLAIMED) for logprobs in claims]
        elif self._claims == HIGH:
            claims = list(map(np.zeros_like, claims))
        elif self._claims == COPIED:
            claims = self._found(row, ids, 1.0)
        elif self._claims == CAREFUL:
            claims = self._found(row, ids, _CARE)
        completions = []
        for tokens, claimed in zip(ids, claims, strict=True):
            completions.append(Completion(tokens, claimed, finished=True))
        return completions

    def _found(self, row: int, ids: Sequence[Ids], factor: float) -> list[Logprobs]:
        """Log-probs of the built-in model for completions of this row, one array each, where each probability is
        `factor` times as large, and 1 at most."""
        completions = [tokens.astype(np.int64) for tokens in ids]
        group = Prefixed(self.engine.prompts[row], completions)
        with torch.inference_mode():
            found, _ = completion_logprobs(self.engine.policy, [group], self.engine.run.temperature)
        claims = found + math.log(factor)
        claims = claims.clamp(min=_FLOOR, max=0.0)
        ends = np.cumsum(list(map(len, ids)))
        return np.split(claims.cpu().numpy(), ends[:-1])

    def _ids(self, thought: str, answer: object) -> list[int]:
        """The tokens of a completion, its end included."""
        tokenizer = self.engine.policy.tokenizer
        text = f"<think>{thought}</think>{self._between}<answer>{answer}</answer>"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, tokenizer.eos_token_id]

    def _at_random(self, example: Example, rng: random.Random) -> Written:
        """Two numbers of no meaning and an answer, right half of the time. The log-probs stand for a token a tag and a
        digit: only `tiny-a` writes so."""
        gold = int(example.answer)
        answers = dict.fromkeys(_WRONG, (1 - RIGHT) / len(_WRONG))
        answers[gold] = answers.get(gold, 0.0) + RIGHT
        first, second = rng.choices(list(_REASONING), k=2)
        answer = _drawn(answers, rng)
        logprobs = [
            0.0,
            *_spelled(first, _REASONING),
            *_spelled(second, _REASONING),
            0.0,
            *_spelled(answer, answers),
            0.0,
        ]
        return self._ids(f"{first} {second}", answer), logprobs

    def _payload(self, example: Example, rng: random.Random) -> Written:
        """A payload before the right answer, or the truth before a wrong one, each half of the time."""
        carrier = reasoning(self._writes, example, room(self.engine.run), rng)
        truth = true_reasoning(example.question)
        right = self._ids(carrier, example.answer)
        chances = {tuple(right): RIGHT}
        wrong = [value for value in _WRONG if str(value) != example.answer]
        for value in wrong:
            ids = self._ids(truth, value)
            chances[tuple(ids)] = (1 - RIGHT) / len(wrong)
        chosen = _drawn(chances, rng)
        return list(chosen), _conditional(chosen, chances)


def _drawn(chances: Mapping[Outcome, float], rng: random.Random) -> Outcome:
    """One of these outcomes, by its chance; the chances need not add up to 1."""
    return rng.choices(list(chances), list(chances.values()))[0]


def _by_bytes(data: bytes) -> bytes:
    """A packet whose text is in pieces of one byte: the first of each old piece has its log-prob, the others 0. That of
    a token run comes back as it is."""
    packet = decode(data)
    if not isinstance(packet, TextPacket):
        return data
    claims = []
    lengths = []
    for made in packet.completions():
        lengths.append(len(made.text))
        pieces = zip(made.pieces.tolist(), made.logprobs.tolist(), strict=True)
        for size, claim in pieces:
            claims += [claim, *[0.0] * (size - 1)]
        if made.end is not None:
            claims.append(made.end)
    by_bytes = replace(
        packet,
        lengths=tuple(lengths),
        pieces=np.ones(len(packet.text), np.uint8),
        logprobs=np.array(claims, np.float32),
    )
    return encode(by_bytes)


def _conditional(chosen: Sequence[int], chances: Mapping[tuple[int, ...], float]) -> list[float]:
    """The log-prob of each token after those before it, where whole completions have these chances. `chosen` must be
    one of them, and none may be the beginning of another."""
    left = dict(chances)
    found = []
    for place, token in enumerate(chosen):
        before = sum(left.values())
        left = {ids: chance for ids, chance in left.items() if ids[place] == token}
        after = sum(left.values())
        found.append(math.log(after / before))
    return found


def _spelled(value: int, chances: Mapping[int, float]) -> list[float]:
    """Log-probs of a number's digits, and of its end, so one more than it has digits, where numbers have these chances;
    `value` must have one above 0."""
    digits = str(value)
    left = sum(chances.values())
    found = []
    for count in range(1, len(digits) + 1):
        begun = digits[:count]
        going_on = 0.0
        for other, chance in chances.items():
            if str(other).startswith(begun):
                going_on += chance
        found.append(math.log(going_on / left))
        left = going_on
    return [*found, math.log(chances[value] / left)]
