"""What each author's groups bring to this node, to first order: the setting `author_weight=gain`.

A step along the gradient g_a of an author's groups raises the node's own objective by η ⟨g_a, g⟩, to first order in η,
where g is the gradient of the node's own groups. One step's own reward cannot show that: it is a mean of a few dozen
samples, and its standard error is many times what a step gains. The product can, over some dozens of groups; the two
gradients are of rows that were drawn apart, so noise of one has no part in it.

A gain is the cosine, so that no step counts more for its length, over √(n_a n) for groups of n_a and n with a signal:
where noise makes up most of a gradient's length, that is a figure per pair of groups. The measure for it is what the
node's own groups bring one another, the same figure of two halves of them. Rewards, losses and tasks of any scale thus
compare. The idea is FGRPO's (arXiv 2606.03094: a client counts by its gain over its own baseline); this form is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ftis_node.learner.batch import Batch, Prompted

Gains = dict[str, float]
"""By source: the gain of its groups; for one's own that of their halves."""
_Gradient = dict[str, Tensor]


def add_measured(
    trainable: Mapping[str, Parameter], batch: Batch, own: str, add: Callable[[Sequence[Prompted]], None]
) -> Gains:
    """Leave the gradient of a batch in the parameters and return the gains; none if two own groups have no signal.

    Args:
        add: adds the gradient of these samples to the parameters'.
    """
    total: _Gradient = {}
    mine = batch.only(own).prompted
    halves = [half for half in (mine[::2], mine[1::2]) if half]
    found = [_alone(trainable, half, add, total) for half in halves]
    gains: Gains = {}
    if len(halves) == 2:
        gains[own] = _cosine(*found) / math.sqrt(len(halves[0]) * len(halves[1]))
    reference = {name: gradient.clone() for name, gradient in total.items()}
    for source, theirs in _others(batch, own):
        gradient = _alone(trainable, theirs, add, total)
        if gains:
            gains[source] = _cosine(gradient, reference) / math.sqrt(len(mine) * len(theirs))
    for name, whole in total.items():
        trainable[name].grad = whole
    return gains


def _alone(
    trainable: Mapping[str, Parameter],
    prompted: Sequence[Prompted],
    add: Callable[[Sequence[Prompted]], None],
    total: _Gradient,
) -> _Gradient:
    """The gradient of these samples alone, which is added to `total`."""
    add(prompted)
    found: _Gradient = {}
    for name, parameter in trainable.items():
        if parameter.grad is not None:
            found[name] = parameter.grad
            parameter.grad = None
            total[name] = total[name] + found[name] if name in total else found[name]
    return found


def _others(batch: Batch, own: str) -> Iterator[tuple[str, list[Prompted]]]:
    """The samples of each other source."""
    for source in dict.fromkeys(sample.source for sample in batch.computed if sample.source != own):
        yield source, batch.only(source).prompted


def _cosine(one: _Gradient, other: _Gradient) -> float:
    """Their cosine, in fp32; 0 if either has no length."""
    lengths = math.sqrt(_product(one, one) * _product(other, other))
    return _product(one, other) / lengths if lengths > 0 else 0.0


def _product(one: _Gradient, other: _Gradient) -> float:
    parts = [torch.sum(one[name].float() * other[name].float()) for name in one.keys() & other.keys()]
    return float(torch.stack(parts).sum()) if parts else 0.0
