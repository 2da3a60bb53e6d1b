"""About how long a step and an evaluation take with a model, before it is loaded."""

import re
from typing import Any

from ftis_node.fit.geometry import Geometry
from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import SMALL_MODEL, Plan
from ftis_node.lab.step_seconds import CARDS, MULTIPLYING, READING, Card, Work, generating, training
from ftis_node.text import duration

_NOT_MODEL = re.compile("NVIDIA |GeForce |Tesla | 80GB HBM3")  # what drivers call a card beside its model


def seconds_of(
    shape: Geometry, chosen: Plan, work: Workload, questions: int, card: Card | None
) -> dict[str, Any] | None:
    """Seconds of a step on own groups alone, and of the first evaluation; answers are half as long as they may be.

    With the name of the card, if the rates are those of a data sheet.

    None if they cannot be told: the card is unknown, the plan does not fit or is for several devices, or the native
    decoder does not know all layers.
    """
    if card is None or not chosen.fits or chosen.devices > 1 or not shape.decoded:
        return None
    cap = work.completion_tokens
    step = Work(work.batch_groups, work.group, work.prompt_tokens / 2, cap / 2, cap)
    asked = step._replace(groups=questions, group=1)
    return {
        "step_seconds": generating(shape, chosen, step, card) + training(shape, chosen, step, card),
        "first_evaluation_seconds": generating(shape, chosen, asked, card),
        "card": next((name for name, known in CARDS.items() if known == card), None),
    }


def card_of(device: str, vram: float) -> Card | None:
    """A card with so many GB, of those whose data sheet is known; None: there is none."""
    for card in CARDS.values():
        if card.device == device and card.vram == vram:
            return card
    return None


def card_named(name: str) -> Card | None:
    """The card that its driver calls so ("NVIDIA GeForce RTX 3060"), if its data sheet is known; a Ti is another."""
    model = _NOT_MODEL.sub("", name)
    for known, card in CARDS.items():
        if known.rsplit(" ", 2)[0] == model:  # without its memory
            return card
    return None


def card_here(device: str, chosen: Plan, shape: Geometry) -> Card | None:
    """This machine's device: of a known name, or with rates that are measured.

    None: it cannot be measured, or the model takes no time.
    """
    import torch

    from ftis_node.policy.load import choose_device
    from ftis_node.preflight.rates import rates

    if shape.parameters < SMALL_MODEL:
        return None
    place = choose_device(device)
    if place.type == "cuda":
        known = card_named(torch.cuda.get_device_name(place))
        if known is not None:
            return known
    try:
        tflops, bandwidth = rates(place, getattr(torch, chosen.dtype))
    except RuntimeError:  # as where its memory is full
        return None
    return Card(tflops=tflops / MULTIPLYING, bandwidth=bandwidth / READING)


def step_seconds_text(seconds: dict[str, Any]) -> str:
    """A sentence for people."""
    step = duration(seconds["step_seconds"])
    first = duration(seconds["first_evaluation_seconds"])
    rates = "by arithmetic"
    if seconds["card"]:
        rates += f" for the card {seconds['card']}"
    return f"A step takes about {step}, the first evaluation {first}: {rates}, so it may be half or twice that."
