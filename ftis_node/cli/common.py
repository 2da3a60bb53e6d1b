"""Options that several commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.errors import UsageError

if TYPE_CHECKING:
    from ftis_node.settings import Settings
    from ftis_node.trained import Checkpoint

DEFAULT_HOME = Path("~/.ftis-node")

HomeOption = Annotated[
    Path, typer.Option("--home", envvar="FTIS_HOME", help="The node's directory: key, checkpoints, logs.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
RewardOption = Annotated[
    str | None,
    typer.Option(
        "--reward", help="How answers of a .jsonl file are judged: integer (default), exact, regex or math (LaTeX)."
    ),
]


def on(home: Path) -> str:
    """What a command needs to mean this home: nothing where it would mean it anyway."""
    usual = Path(os.environ.get("FTIS_HOME") or DEFAULT_HOME).expanduser()
    return "" if home == usual else f" --home {home}"


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value))


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """``--set key=value`` options as text; the settings know their types.

    Raises:
        UsageError: there is no ``=``.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator:
            raise UsageError(f"--set {pair} has no value.", "Write --set KEY=VALUE.")
        values[key] = text
    return values


def note(text: str) -> None:
    """What a person should know, on stderr."""
    print(f"note: {text}", file=sys.stderr)


def tell_choice(found: Checkpoint | None, settings: Settings, origins: Mapping[str, str]) -> None:
    """Notes what was not as one would expect when a checkpoint was chosen and its settings were read."""
    for path in found.skipped if found else ():
        note(f"{path} is damaged; an older checkpoint is used.")
    if settings.lora and origins["lora_alpha"] not in ("checkpoint", "flags"):
        note(
            f"The checkpoint does not say LoRA's alpha; {settings.lora_alpha} is taken ({origins['lora_alpha']}). "
            "For another: --set lora_alpha=…"
        )


def addresses_in(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
