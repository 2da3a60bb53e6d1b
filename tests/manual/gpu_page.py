"""The page of `make gpu` for an issue, and the table of predicted seconds in docs/performance.md."""

from collections.abc import Sequence
from typing import Any

from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import Wishes, plan
from ftis_node.lab.step_seconds import CARDS, Work, generating, training
from ftis_node.policy.measure import geometry_of, known_config
from ftis_node.text import GB

Figures = dict[str, Any]
MODELS = ("0.5b", "1.5b", "3b", "7b")
GSM8K = Work(groups=24, group=12, prompt=150, completion=150, cap=256)
HEADER = ("driver", "cuda", "capability", "wsl2", "allocator", "commit")


def line(what: str, measured: float | str | None, predicted: float | str | None = None, unit: str = "") -> Figures:
    """One line of the page; None where nothing was."""
    return {
        "what": what,
        "measured": measured,
        "predicted": predicted,
        "unit": unit,
    }


def page(found: Sequence[Figures], command: str) -> str:
    """Markdown: the machine, all that was measured beside what was predicted, and what was not measured and why.

    Args:
        found: what the parts found, as gpu.json has it.
        command: that measured it.
    """
    done = [one for one in found if one["state"] in ("done", "unfinished")]
    card = next((one["figures"] for one in done if one["part"] == "machine"), None)
    rows = ["# `make gpu`", ""]
    if card is not None:
        versions = ", ".join(f"{name} {version}" for name, version in card["versions"].items() if version)
        rows += [f"* {card['device']}, {card['memory_gb']:.1f} GB", f"* {versions}"]
        rows += ["* " + ", ".join(f"{name} {card[name]}" for name in HEADER)]
    rows += [
        f"* `{command}`",
        "",
        "Predicted seconds are arithmetic on the first part's rates (`lab/step_seconds.py`), ",
    ]
    rows[-1] += "with errors of a third either way; predicted memory is `fit`'s."
    if any(one["small"] for one in found):
        rows[-1] += " **The tiny form: it shows that every part runs, and figures mean nothing.**"
    rows += ["", "| part | | measured | predicted | ratio |", "|---|---|---|---|---|"]
    for one in done:
        for told in one["figures"]["lines"]:
            seen = told["measured"]
            said = told["predicted"]
            ratio = ""
            if isinstance(seen, float) and isinstance(said, float) and said:
                ratio = f"{seen / said:.2f}"
            value = _number(seen, told["unit"])
            expected = _number(said, told["unit"])
            rows.append(f"| {one['part']} | {told['what']} | {value} | {expected} | {ratio} |")
    rows += ["", "| part | state | seconds | why |", "|---|---|---|---|"]
    for one in found:
        rows.append(f"| {one['part']} | {one['state']} | {one['seconds']:.0f} | {in_a_line(one.get('why', ''))} |")
    return "\n".join(rows)


def _number(value: float | str | None, unit: str) -> str:
    if value is None or isinstance(value, str):
        return in_a_line(value or "")
    digits = f"{value:.3g}"
    if abs(value) >= 1000 or value == int(value):
        digits = f"{value:,.0f}"
    return f"{digits} {unit}".rstrip()


def in_a_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[-300:]


def predicted() -> str:
    """Markdown: seconds of a step of GSM8K by card and model: how, rows side by side: generation + training = sum."""
    rows = ["| | " + " | ".join(CARDS) + " |", "|---" * (1 + len(CARDS)) + "|"]
    workload = Workload(512, GSM8K.cap, GSM8K.group, GSM8K.groups)
    for size in MODELS:
        shape = geometry_of(known_config(f"qwen2.5-{size}"), size)
        cells = [size.upper()]
        for name, card in CARDS.items():
            dtype = "float16" if name.startswith("T4") else "bfloat16"
            budget = round(card.vram * GB)
            chosen = plan(
                shape, budget, workload, Wishes(), "cuda", eight_bit=True, four_bit=True, fused=True, dtype=dtype
            )
            kind = "full"
            if chosen.quantisation == "nf4":
                kind = "NF4"
            elif chosen.lora:
                kind = "LoRA"
            made = generating(shape, chosen, GSM8K, card)
            trained = training(shape, chosen, GSM8K, card)
            parts = (f"{seconds:.{int(seconds < 10)}f}" for seconds in (made, trained, made + trained))
            cell = f"{kind}/{chosen.generation_batch} " + "{}+{}=**{}**".format(*parts)
            cells.append(cell if chosen.fits else "no")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
