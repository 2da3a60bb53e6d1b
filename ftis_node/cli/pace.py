"""About how long a step and an evaluation take with a model, before it is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from ftis_node.fit.plan import SMALL_MODEL
from ftis_node.text import duration

if TYPE_CHECKING:
    from ftis_node.fit.geometry import Geometry
    from ftis_node.fit.memory import Workload
    from ftis_node.fit.plan import Plan
    from ftis_node.lab.step_seconds import Card

PATIENCE = 60.0  # seconds for the process that measures, most of which it imports


def seconds_of(
    shape: Geometry, chosen: Plan, work: Workload, questions: int, card: Card | None
) -> dict[str, float] | None:
    """Seconds of a step on own groups alone, and of the first evaluation; answers are half as long as they may be.

    None if they cannot be told: the card is unknown, the plan does not fit or is for several devices, or the native
    decoder does not know all layers.
    """
    from ftis_node.lab.step_seconds import Work, generating, training

    if card is None or not chosen.fits or chosen.devices > 1 or work.longest > shape.decoded:
        return None
    cap = work.completion_tokens
    step = Work(work.batch_groups, work.group, work.prompt_tokens / 2, cap / 2, cap)
    asked = step._replace(groups=questions, group=1)
    return {
        "step_seconds": generating(shape, chosen, step, card) + training(shape, chosen, step, card),
        "first_evaluation_seconds": generating(shape, chosen, asked, card),
    }


def card_of(device: str, vram: float) -> Card | None:
    """A card with so many GB, of those whose data sheet is known; None: there is none."""
    from ftis_node.lab.step_seconds import CARDS

    return next((card for card in CARDS.values() if (card.device, card.vram) == (device, vram)), None)


def card_here(device: str, chosen: Plan, shape: Geometry) -> Card | None:
    """This machine's device, whose rates another process measures; None: it cannot be, or the model takes no time."""
    from ftis_node.lab.step_seconds import MULTIPLYING, READING, Card

    if shape.parameters < SMALL_MODEL:
        return None
    line = [sys.executable, "-P", "-m", "ftis_node.preflight.rates", device, chosen.dtype]
    try:
        ended = subprocess.run(line, capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL, check=True)
    except subprocess.SubprocessError:
        return None
    found = json.loads(ended.stdout)
    return Card(tflops=found["tflops"] / MULTIPLYING, bandwidth=found["bandwidth"] / READING)


def in_words(seconds: dict[str, float]) -> str:
    """A sentence for people."""
    step, first = (duration(value) for value in seconds.values())
    return f"A step takes about {step}, the first evaluation {first}: by arithmetic, so it may be half or twice that."
