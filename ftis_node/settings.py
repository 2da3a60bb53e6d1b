"""The node's own business: model, optimiser, objective, hardware and network, in layers.

defaults < profile < file < environment (``FTIS_LEARNING_RATE=…``) < flags. Nothing here is shared with peers; what they
must agree on is the run (`ftis_node.run`).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ftis_node.errors import UsageError

ENVIRONMENT_PREFIX = "FTIS_"


class Settings(BaseModel):
    """Everything that a node decides for itself. Times are in seconds, sizes as their names say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The model
    model: str = "tiny-a"
    lora: bool = False
    lora_rank: int = Field(128, ge=1)
    lora_alpha: int = Field(256, ge=1)
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = Field(0, ge=0)

    # The step
    objective: str = "ftis"
    divergence: str | None = None
    reduction: str | None = None
    threshold: float | None = None
    learning_rate: float | None = Field(None, gt=0, allow_inf_nan=False)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    gradient_clip: float = Field(1.0, gt=0)
    batch_groups: int = Field(24, ge=1, le=4096)
    own_share: float | None = Field(None, ge=0, le=1)
    wait: float = Field(10.0, ge=0)
    steps: int | None = Field(None, ge=1)
    micro_batch_tokens: int = Field(16_384, ge=64)
    generation_batch: int = Field(288, ge=1)

    # Evaluation
    eval_every: int = Field(5, ge=1)
    eval_prompts: int = Field(256, ge=1)

    # The network
    host: str = "0.0.0.0"
    port: int = Field(0, ge=0, le=65535)
    exchange_peers: int = Field(6, ge=1, le=32)
    min_peers: int = Field(0, ge=0)
    patience: float = Field(20.0, ge=0)
    max_age: float = Field(600.0, gt=0)
    packet_quota_mb: int = Field(1024, ge=1)

    @field_validator("lora_targets", mode="before")
    @classmethod
    def _comma_list(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("betas", mode="before")
    @classmethod
    def _comma_pair(cls, value: Any) -> Any:
        return tuple(float(part) for part in value.split(",")) if isinstance(value, str) else value

    def effective_learning_rate(self) -> float:
        """The learning rate, by default the paper's: 1e-6 for full training, 1e-4 for LoRA."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-4 if self.lora else 1e-6


# Constants that belong to a task rather than to a machine. The built-in arithmetic has sequences of ten tokens and
# models of a few hundred kilobytes, so it needs larger steps and a divergence that adds up instead of averaging.
TASK_PROFILES: Mapping[str, Mapping[str, Any]] = {
    "arithmetic": {
        "learning_rate": 2e-4,
        "betas": (0.9, 0.95),
        "divergence": "k1",
        "reduction": "sum",
        "threshold": 1.0,
        "eval_prompts": 600,
        "wait": 2.0,
        "lora_rank": 16,
        "lora_alpha": 16,
        "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    },
}
LORA_TASK_PROFILES: Mapping[str, Mapping[str, Any]] = {"arithmetic": {"learning_rate": 3e-3}}


class Layers:
    """Values collected layer by layer; later layers win, and every value remembers where it came from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {name: "default" for name in Settings.model_fields}

    def add(self, origin: str, values: Mapping[str, Any]) -> None:
        """Adds a layer; keys with value None are taken as not given.

        Raises:
            UsageError: a key is unknown; the message names the nearest one.
        """
        for key, value in values.items():
            if key not in Settings.model_fields:
                raise UsageError(f"Unknown setting {key!r} in {origin}.", _nearest(key))
            if value is not None:
                self.values[key] = value
                self.origins[key] = origin

    def settle(self) -> Settings:
        """The settings that the layers add up to.

        Raises:
            UsageError: a value is of the wrong type or out of its range; the message names its origin.
        """
        try:
            return Settings(**self.values)
        except ValidationError as error:
            first = error.errors()[0]
            key = str(first["loc"][0])
            raise UsageError(
                f"Setting {key!r} from {self.origins[key]} is wrong: {first['msg']} (got {first['input']!r}).",
                f"Give {key!r} a valid value, or leave it out for its default.",
            ) from None


def collect(
    *,
    task: str,
    flags: Mapping[str, Any],
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Settings, dict[str, str]]:
    """Settles all layers; returns the settings and the origin of each.

    Args:
        task: name of the task, whose profile (if it has one) is the layer above the defaults.
        flags: values from the command line, None where a flag was not given.
        file: a TOML file of settings.
        environment: by default the process's own.

    Raises:
        UsageError: unknown keys, wrong values, or a file that cannot be read.
    """
    layers = Layers()
    upper = Layers()
    if file is not None:
        upper.add(f"file {file}", _read_toml(file))
    upper.add("environment", _from_environment(os.environ if environment is None else environment))
    upper.add("flags", flags)
    layers.add(f"profile {task}", TASK_PROFILES.get(task, {}))
    if upper.settle().lora:
        layers.add(f"profile {task} (lora)", LORA_TASK_PROFILES.get(task, {}))
    layers.values.update(upper.values)
    layers.origins.update({key: upper.origins[key] for key in upper.values})
    return layers.settle(), layers.origins


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The settings file {path} cannot be read: {error.strerror}.", "Check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"The settings file {path} is not valid TOML: {error}.", "Mend that line.") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """`FTIS_WAIT=3` sets `wait`. Names outside the settings (another program's, or FTIS_HOME) are left alone."""
    values: dict[str, Any] = {}
    for name, text in environment.items():
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name.startswith(ENVIRONMENT_PREFIX) and key in Settings.model_fields:
            values[key] = text  # as it is: a model may be called 7 or true, and pydantic reads numbers from text
    return values


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, list(Settings.model_fields), n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known settings: {', '.join(sorted(Settings.model_fields))}."
