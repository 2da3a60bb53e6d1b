"""The whole method in one file: two small models of different size teach each other arithmetic, by reinforcement alone.

    .venv/bin/python docs/minimal_node.py      # about a minute on one core

Each node samples answers to questions that nobody chooses, sends them as bytes, and takes one step on its own answers
and the other's. First all is done once without the other's. A model is only told whether its number is right.

Left out, and where it is in `ftis_node/`:

    the network     who is there and has what, signatures, bans         swarm/, proto/PACKET.md
    waiting         here both take turns; there each waits briefly      node/vertical.py
    other models    other tokenizers, LoRA, four bits, GPUs, packing    policy/, learner/, tokenizer/
    other tasks     here sums of one digit                              tasks/
    other losses    by name or by part; who is trusted how far          objective/, methods/, swarm/reputation.py
    a bad day       checkpoints, lack of memory, no finite number       store/, node/checkpointing.py, learner/
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

MODELS = Path(__file__).resolve().parent.parent / "ftis_node" / "models"
TOKENIZER = Tokenizer.from_file(str(MODELS / "tiny-a" / "tokenizer.json"))  # tiny-b has the same
VOCABULARY, END = TOKENIZER.get_vocab_size(), 1  # the token <|end|>

RUN = hashlib.sha256(b"a run is its task, data, rule, group size, caps, tokenizer").digest()[:16]  # there, in JSON
GROUP = 12  # answers to a question: they are compared with one another
SLOTS = 12  # questions of one node in a step
LONGEST = 16  # tokens of an answer
STEPS = 60
CAP, THRESHOLD = 2.0, 1.0  # C and g. D is here Σ −log ρ, as the task `arithmetic` has it; else a mean, and g is 50


# --- the task: questions, and what an answer earns -------------------------------------------------------------------


def questions() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """`a±b±c=` with its answer, nothing below 0 on the way; some, by their hash, are kept for the examination."""
    train: list[tuple[str, int]] = []
    exam: list[tuple[str, int]] = []
    for a, s, b, t, c in itertools.product(range(1, 10), "+-", range(1, 10), "+-", range(1, 10)):
        middle = a + b if s == "+" else a - b
        last = middle + c if t == "+" else middle - c
        question = f"{a}{s}{b}{t}{c}="
        if middle >= 0 and last >= 0:
            kept = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") < 0.3 * 2**64
            (exam if kept else train).append((question, last))
    return train, exam


TRAIN, EXAM = questions()


def reward(ids: list[int], answer: int) -> float:
    """1 for the right number in the right form, else 0. Each node judges for itself, also what others sent."""
    text = TOKENIZER.decode(ids[:-1], skip_special_tokens=False).replace(" ", "") if ids[-1] == END else ""
    found = re.fullmatch(r"<think>[^<]*</think><answer>(-?[0-9]+)</answer>", text)
    return float(found is not None and int(found[1]) == answer)


def draw(author: bytes, round: int, slot: int) -> int:
    """The row that an author must answer. Anybody can compute it, so nobody can choose what it is good at."""
    seed = RUN + author + round.to_bytes(8, "big") + slot.to_bytes(8, "big")
    return int.from_bytes(hashlib.sha256(seed).digest()[:8], "big") % len(TRAIN)


# --- a packet: a group of answers as bytes ---------------------------------------------------------------------------

RECORD = np.dtype([("id", "<u4"), ("logprob", "<f4")])  # 8 bytes a token: this is all that others learn of a model


@dataclass
class Group:
    """Answers to one question by one author: token ids, and their log-probs under the model that sampled them."""

    prompt: list[int]
    answers: list[list[int]]
    claims: list[list[float]]
    rewards: list[float]


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


def pack(group: Group, author: bytes, round: int, slot: int, step: int) -> bytes:
    """Version 1 of proto/PACKET.md, byte for byte."""
    mask = sum((answer[-1] == END) << i for i, answer in enumerate(group.answers))
    lengths = [len(answer) for answer in group.answers]
    records = np.empty(sum(lengths), RECORD)
    records["id"], records["logprob"] = np.concatenate(group.answers), np.concatenate(group.claims)
    asked, ends = digest(np.array(group.prompt, "<u4").tobytes()), mask.to_bytes((GROUP + 7) // 8, "little")
    header = [1, RUN, digest(author), round, slot, step, asked, ends, lengths]
    packed: bytes = msgpack.packb([*header, records.tobytes()])
    return packed


def admit(data: bytes, author: bytes, round: int, slot: int) -> Group:
    """Believe nothing: the author owes this row; ids, ends and log-probs can be. Raises ValueError if not."""
    *origin, _, asked, _, lengths, raw = msgpack.unpackb(data)
    records = np.frombuffer(raw, RECORD)
    question, gold = TRAIN[draw(author, round, slot)]
    prompt = TOKENIZER.encode(question).ids
    ids, claims = (np.split(records[name], np.cumsum(lengths)[:-1]) for name in ("id", "logprob"))
    due = [1, RUN, digest(author), round, slot, digest(np.array(prompt, "<u4").tobytes())]
    if [*origin, asked] != due or len(lengths) != GROUP:
        raise ValueError("this is no answer to what this author owes")
    if not (records["id"] < VOCABULARY).all() or not ((records["logprob"] > -100) & (records["logprob"] <= 0)).all():
        raise ValueError("these are no tokens of ours, or no log-probs")
    if any(not 1 <= len(one) <= LONGEST or (one[-1] != END and len(one) < LONGEST) or END in one[:-1] for one in ids):
        raise ValueError("an answer ends at its end, or at the cap")
    answers = [one.tolist() for one in ids]
    return Group(prompt, answers, [one.tolist() for one in claims], [reward(answer, gold) for answer in answers])


# --- the method ------------------------------------------------------------------------------------------------------


def ftis(new: Tensor, claims: Tensor, lengths: list[int], advantages: Tensor) -> Tensor:
    """F-TIS (arXiv 2605.22537): what to maximise, one value an answer.

    new, claims   log-probs of all tokens of N answers, one after another: of the learner, with gradient; and as their
                  author sent them
    advantages    N: how much better an answer is than its group
    """
    log_rho = (new.detach() - claims).clamp(-20, 20)  # ρ: how much likelier the learner finds a token
    weight = log_rho.exp().clamp(max=CAP)  # truncated importance sampling: no stranger counts more than C times
    terms = weight * (new - new.detach()).exp()  # the ratio is 1, its gradient that of log π: so ε's clip never bites
    values = torch.stack([one.mean() for one in torch.split(terms, lengths)]) * advantages
    divergence = torch.stack([-one.sum() for one in torch.split(log_rho, lengths)])
    dropped = (advantages <= 0) & (divergence >= THRESHOLD)  # a wrong answer that the learner would never have given
    return torch.where(dropped, torch.zeros_like(values), values)


def logprobs(model: Any, groups: list[Group]) -> Tensor:
    """Log-probs of every token of every answer, in order. (The real one computes a group's prompt only once.)"""
    rows = [group.prompt + answer for group in groups for answer in group.answers]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=END)
    found = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]  # nobody looks at padding
    begins = [len(group.prompt) - 1 for group in groups for _ in group.answers]
    return torch.cat([line[begin : len(row) - 1] for line, begin, row in zip(found, begins, rows, strict=True)])


def loss_of(model: Any, groups: list[Group]) -> Tensor:
    """Minus the mean over questions, answers and tokens. A group of equal rewards has nothing to say, but counts."""
    telling = [group for group in groups if len(set(group.rewards)) > 1]
    rewards = torch.tensor([group.rewards for group in telling])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True, correction=0)
    answers = [answer for group in telling for answer in group.answers]
    claims = torch.tensor([claim for group in telling for answer in group.claims for claim in answer])
    values = ftis(logprobs(model, telling), claims, [len(answer) for answer in answers], advantages.flatten())
    return -values.sum() / GROUP / len(groups)


@torch.no_grad()
def sample(model: Any, prompts: list[list[int]], greedy: bool = False) -> tuple[list[list[int]], list[list[float]]]:
    """One answer to each prompt, and its log-probs. (All prompts here have six tokens; the real one takes any.)"""
    token, cache, drawn = torch.tensor(prompts), None, []
    for _ in range(LONGEST):
        out = model(token, past_key_values=cache, use_cache=True)
        cache, scores = out.past_key_values, out.logits[:, -1].log_softmax(-1)
        token = scores.argmax(-1, keepdim=True) if greedy else torch.multinomial(scores.exp(), 1)
        drawn.append((token[:, 0], scores.gather(1, token)[:, 0]))
    ids, claims = (torch.stack(list(part), 1).tolist() for part in zip(*drawn, strict=True))
    lengths = [row.index(END) + 1 if END in row else LONGEST for row in ids]
    return [row[:n] for row, n in zip(ids, lengths, strict=True)], [c[:n] for c, n in zip(claims, lengths, strict=True)]


class Node:
    """A model, its optimiser, and a name by which others know what it must answer."""

    def __init__(self, name: str) -> None:
        self.author, self.steps = name.encode(), 0
        self.model: Any = AutoModelForCausalLM.from_pretrained(MODELS / name).eval()
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)

    def generate(self, round: int) -> list[bytes]:
        """One packet for each slot of a round."""
        rows = [TRAIN[draw(self.author, round, slot)] for slot in range(SLOTS)]
        prompts = [TOKENIZER.encode(question).ids for question, _ in rows]
        answers, claims = sample(self.model, [prompt for prompt in prompts for _ in range(GROUP)])
        parts = [slice(slot * GROUP, (slot + 1) * GROUP) for slot in range(SLOTS)]
        groups = [Group(prompt, answers[p], claims[p], []) for prompt, p in zip(prompts, parts, strict=True)]
        return [pack(group, self.author, round, slot, self.steps) for slot, group in enumerate(groups)]

    def step(self, groups: list[Group]) -> float:
        """One step of AdamW; the loss. Nothing, if all answers to each question earn the same."""
        if all(len(set(group.rewards)) == 1 for group in groups):
            return 0.0
        loss = loss_of(self.model, groups)
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        self.steps += 1
        return float(loss.detach())

    def pass_at_1(self) -> float:
        """How many of the questions it has never seen it answers, when it says what it finds likeliest."""
        answers, _ = sample(self.model, [TOKENIZER.encode(question).ids for question, _ in EXAM], greedy=True)
        return sum(reward(ids, gold) for ids, (_, gold) in zip(answers, EXAM, strict=True)) / len(EXAM)


def train(names: list[str], steps: int, *, sharing: bool, seed: int = 0, every: int = 20) -> list[Node]:
    """Rounds of all nodes at once: each makes its packets, then each learns."""
    torch.manual_seed(seed)
    nodes = [Node(name) for name in names]
    for round in range(steps):
        if round % every == 0:
            print(f"  step {round:3}   " + "   ".join(f"{n.author.decode()} {n.pass_at_1():.3f}" for n in nodes))
        sent = {node.author: node.generate(round) for node in nodes}
        for node in nodes:
            groups = [admit(data, node.author, round, slot) for slot, data in enumerate(sent[node.author])]
            for other in nodes if sharing else []:
                if other is not node:
                    heard = [admit(data, other.author, round, slot) for slot, data in enumerate(sent[other.author])]
                    groups += [group for group in heard if len(set(group.rewards)) > 1]  # equal rewards say nothing
            node.step(groups)
    return nodes


def main() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    began, ends = time.monotonic(), {}
    for sharing in (False, True):
        print("each learns from the other, too" if sharing else "each alone")
        ends[sharing] = [node.pass_at_1() for node in train(["tiny-a", "tiny-b"], STEPS, sharing=sharing)]
    print(f"pass@1 on {len(EXAM)} questions that no model has seen, after {STEPS} steps:")
    for name, alone, together in zip(["tiny-a", "tiny-b"], ends[False], ends[True], strict=True):
        print(f"  {name}   alone {alone:.3f}   sharing {together:.3f}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
