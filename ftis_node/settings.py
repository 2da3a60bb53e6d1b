"""The node's own business: model, optimiser, objective, hardware and network, in layers.

defaults < profile < file < environment (``FTIS_LEARNING_RATE=…``) < flags. Nothing here is shared with peers; what they
must agree on is the run (`ftis_node.run`).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ftis_node.errors import UsageError, did_you_mean

ENVIRONMENT_PREFIX = "FTIS_"


_Beta = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """Everything that a node decides for itself. Times are in seconds, sizes as their names say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The model. None: as the memory allows, see `ftis-node fit`.
    model: str = "tiny-a"
    lora: bool | None = None
    lora_rank: int = Field(128, ge=1)
    lora_alpha: int = Field(256, ge=1)
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    vram_gb: float | None = Field(None, gt=0, allow_inf_nan=False)
    gradient_checkpointing: bool | None = None
    micro_batch_tokens: int | None = Field(None, ge=64)
    generation_batch: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0, lt=1 << 63)

    # The objective. None: as the preset has it, or the task.
    objective: str = "ftis"
    advantage: str | None = None
    divergence: str | None = None
    reduction: str | None = None
    threshold: float | Literal["none"] | None = None
    gate: float | Literal["none"] | None = None
    importance: str | None = None
    truncation: float | None = None
    epsilon: float | None = None
    aggregation: str | None = None
    divisor: float | None = None
    count_dropped: bool | None = None
    count_end: bool | None = None
    inner_steps: int | None = None

    # The step
    learning_rate: float | None = Field(None, gt=0, allow_inf_nan=False)
    warmup_steps: int = Field(5, ge=0)
    optimiser: Literal["adamw", "adamw8bit"] | None = None
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    gradient_clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    batch_groups: int = Field(24, ge=1, le=4096)
    own_share: float | None = Field(None, ge=0, le=1)
    wait: float = Field(10.0, ge=0)
    steps: int | None = Field(None, ge=1)

    # What is done about samples that look wrong: of authors, see `swarm.standing`; of their own, see `learner.trust`
    defences: tuple[Literal["claims", "newcomers", "likelihood", "length"], ...] = ("claims", "newcomers")

    # Evaluation
    eval_every: int = Field(5, ge=1)
    eval_prompts: int = Field(256, ge=1)

    # The network
    host: str = "0.0.0.0"
    port: int = Field(0, ge=0, le=65535)
    quic: bool = True
    listen: bool = True
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    upload_mbit: float = Field(20.0, ge=0, allow_inf_nan=False)  # payload; 0: no limit
    exchange_peers: int = Field(6, ge=1, le=32)
    min_peers: int = Field(0, ge=0)
    patience: float = Field(20.0, ge=0)
    max_age: float = Field(600.0, gt=0)
    packet_quota_mb: int = Field(1024, ge=1)

    @field_validator("lora_targets", "announce", "relays", "defences", mode="before")
    @classmethod
    def _comma_list(cls, value: Any) -> Any:
        return tuple(part for part in map(str.strip, value.split(",")) if part) if isinstance(value, str) else value

    @field_validator("betas", mode="before")
    @classmethod
    def _comma_pair(cls, value: Any) -> Any:
        return tuple(float(part) for part in value.split(",")) if isinstance(value, str) else value

    def effective_learning_rate(self, task: str, *, lora: bool) -> float:
        """The learning rate: a person's, else the task's, else the paper's: 1e-6 for full training, 1e-4 for LoRA."""
        if self.learning_rate is not None:
            return self.learning_rate
        if task in TASKS:
            return TASKS[task].lora_learning_rate if lora else TASKS[task].learning_rate
        return 1e-4 if lora else 1e-6

    def objective_parts(self, task: str, *, filters: bool) -> dict[str, Any]:
        """The parts of the objective that a person or the task chose, by name; "none" has become None.

        Args:
            task: whose own constants of the filter stand in for a preset's, if that one filters as the paper does.
            filters: whether it does.
        """
        parts = dict(TASKS[task].filter) if filters and task in TASKS else {}
        for name in OBJECTIVE_PARTS:
            value = getattr(self, name)
            if value is not None:
                parts[name] = None if value == "none" else value
        return parts


OBJECTIVE_PARTS = (
    *("advantage", "divergence", "reduction", "threshold", "gate", "importance", "truncation", "epsilon"),
    *("aggregation", "divisor", "count_dropped", "count_end", "inner_steps"),
)


@dataclass(frozen=True)
class TaskProfile:
    """Constants that belong to a task rather than to a machine, below all that a person sets.

    settings: of `Settings`. learning_rate, lora_learning_rate: where the settings name none, in full or LoRA training.
    filter: divergence, reduction and threshold in place of the paper's.
    """

    settings: Mapping[str, Any]
    learning_rate: float
    lora_learning_rate: float
    filter: Mapping[str, Any]


# The built-in arithmetic has sequences of ten tokens and models of a few hundred kilobytes, so it needs larger steps
# and a divergence that adds up instead of averaging.
TASKS: Mapping[str, TaskProfile] = {
    "arithmetic": TaskProfile(
        settings={
            "betas": (0.9, 0.95),
            "eval_prompts": 600,
            "wait": 2.0,
            "lora_rank": 16,
            "lora_alpha": 16,
            "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        },
        learning_rate=2e-4,
        lora_learning_rate=3e-3,
        filter={"divergence": "k1", "reduction": "sum", "threshold": 1.0},
    ),
}


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
            message = first["msg"].removeprefix("Value error, ")
            raise UsageError(
                f"Setting {key!r} from {self.origins[key]} is wrong: {message} (got {first['input']!r}).",
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
    if task in TASKS:
        layers.add(f"profile {task}", TASKS[task].settings)
    if file is not None:
        layers.add(f"file {file}", _read_toml(file))
    layers.add("environment", _from_environment(os.environ if environment is None else environment))
    layers.add("flags", flags)
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
    close = did_you_mean(key, Settings.model_fields).rstrip()
    return close or f"Known settings: {', '.join(sorted(Settings.model_fields))}."
