"""The loss of a step in plain Python, from the paper's formulas, one token at a time."""

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

CAP = 16.0  # tokens, the divisor of `fixed`
EPSILON = 0.2
C = 2.0


@dataclass(frozen=True)
class Rule:
    """What a preset says: `ratio` is ρ or R, `g` the filter's threshold on the mean of `kl`, or on its sum."""

    ratio: str
    truncate: bool = False
    g: float | None = None
    kl: str = "k3_reverse"
    mean: bool = True
    gate: bool = False
    own_only: bool = False
    std: bool = True
    aggregation: str = "sample"
    count_end: bool = True
    count_dropped: bool = True


RULES = {
    "grpo": Rule("ρ", own_only=True),
    "nois": Rule("R"),
    "vis": Rule("ρ"),
    "tis": Rule("R", truncate=True),
    "f-nois": Rule("R", g=50.0),
    "f-vis": Rule("ρ", g=50.0),
    "ftis": Rule("R", truncate=True, g=50.0),
    "gated": Rule("R", gate=True),
    "ftis-author": Rule("R", truncate=True, g=50.0, std=False, count_end=False, count_dropped=False),
}


@dataclass
class Completion:
    new: list[Tensor]
    start: list[float]
    generator: list[float]
    ended: bool


@dataclass
class Group:
    own: bool
    rewards: list[float]
    completions: list[Completion]
    weight: float = 1.0


def kept_by_hand(rule: Rule, group: Group, completion: Completion, advantage: float, level: float | None) -> bool:
    d = [start - claimed for start, claimed in zip(completion.start, completion.generator, strict=True)]
    if not rule.count_end and completion.ended:
        d = d[:-1]
    start = completion.start[: len(d)]
    if rule.g is not None and d:
        kl = sum(-x for x in d) if rule.kl == "k1" else sum(math.exp(-x) - 1 + x for x in d)
        if advantage <= 0 and (kl / len(d) if rule.mean else kl) >= rule.g:
            return False
    if rule.gate and not group.own:
        return level is not None and advantage > 0 and (sum(start) / len(start) if start else 0.0) >= level
    return True


def term_by_hand(rule: Rule, new: Tensor, start: float, claimed: float, advantage: float) -> Tensor:
    ratio = torch.exp(new - (claimed if rule.ratio == "ρ" else start))
    if float(ratio.detach()) < 1 - EPSILON:
        clipped = torch.tensor(1 - EPSILON, dtype=torch.float64)
    elif float(ratio.detach()) > 1 + EPSILON:
        clipped = torch.tensor(1 + EPSILON, dtype=torch.float64)
    else:
        clipped = ratio
    plain = ratio * advantage
    bounded = clipped * advantage
    weight = min(math.exp(start - claimed), C) if rule.truncate else 1.0
    return weight * (plain if plain <= bounded else bounded)


def loss_by_hand(rule: Rule, groups: list[Group], level: float | None) -> tuple[Tensor, list[bool]]:
    """The loss, and which completions of groups of unequal rewards were kept."""
    parts = []
    verdicts = []
    kept_samples = kept_tokens = tokens = 0
    for group in groups:
        mean = statistics.fmean(group.rewards)
        std = statistics.pstdev(group.rewards)
        for reward, completion in zip(group.rewards, group.completions, strict=True):
            length = len(completion.start) - (completion.ended and not rule.count_end)
            advantage = 0.0 if std == 0 else (reward - mean) / (std if rule.std else 1.0)
            kept = std == 0 or kept_by_hand(rule, group, completion, advantage, level)
            tokens += length
            kept_tokens += length if kept else 0
            kept_samples += kept
            if std == 0:
                continue
            verdicts.append(kept)
            columns = (values[:length] for values in (completion.new, completion.start, completion.generator))
            terms = [term_by_hand(rule, *token, advantage) for token in zip(*columns, strict=True)]
            if not kept or not terms:
                continue
            total = group.weight * torch.stack(terms).sum()
            total = total / {"sample": length, "token": 1, "fixed": CAP}[rule.aggregation]
            if rule.count_dropped and rule.aggregation != "token":
                total = total / len(group.rewards)
            parts.append(total)
    denominator = kept_samples
    if rule.aggregation == "token":
        denominator = tokens if rule.count_dropped else kept_tokens
    elif rule.count_dropped:
        denominator = len(groups)
    return -torch.stack(parts).sum() / denominator, verdicts
