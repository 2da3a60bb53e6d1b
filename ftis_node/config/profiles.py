"""Constants that belong to a task or to a kind of machine, between the defaults and what a person sets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TASK_KINDS = (
    "arithmetic, gsm8k, a .jsonl or .csv file, hf:ORG/NAME:SPLIT, reasoning-gym:NAME, verifiers:NAME, or Python: "
    "package.module:function"
)
"""The tasks that a person can name, for help and errors."""


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


# The built-in arithmetic has sequences of ten tokens and models of a few hundred kilobytes. So it needs larger steps,
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


@dataclass(frozen=True)
class MachineProfile:
    """Settings for a kind of machine, above the task's profile and below all that a person sets.

    about: a sentence: which machine. choices: by setting, its value and why; what is not named stays as it is.
    """

    about: str
    choices: Mapping[str, tuple[Any, str]]

    @property
    def settings(self) -> dict[str, object]:
        """The values by setting, without their reasons."""
        return {name: value for name, (value, _) in self.choices.items()}


# Chosen by reasoning and not by measurement: no profile was tried on a machine of its kind yet.
PROFILES: Mapping[str, MachineProfile] = {
    "laptop": MachineProfile(
        "Somebody works on it, on battery or in networks of others.",
        {
            "vram_share": (0.75, "the screen and what is open on it need the rest"),
            "wait": (30.0, "samples of others cost less battery than one's own; generating them is still the limit"),
            "quic": (False, "every node listens on TCP too, and guest networks often block UDP"),
            "upload_mbit": (5.0, "a home's uplink may have 10 Mbit/s, of which a call needs some"),
            "packet_quota_mb": (256, "a replay from the first step is rarely wanted here; its disk is small"),
            "nice": (10, "whoever sits before it comes first"),
            "disk_gb": (50.0, "its disk is for other things"),
        },
    ),
    "single-gpu": MachineProfile(
        "A desktop with one graphics card, which draws its screen as well.",
        {
            "vram_share": (0.9, "the rest draws the screen"),
            "packet_quota_mb": (4096, "it has a large disk, and a longer training can be replayed"),
            "nice": (5, "a desktop stays usable while it trains"),
            "disk_gb": (200.0, "so that a long training does not fill the disk that the system is on"),
        },
    ),
    "server": MachineProfile(
        "It does nothing else, has a fast line, and nobody sits before it.",
        {
            "wait": (5.0, "an idle GPU costs more than samples of one's own"),
            "upload_mbit": (200.0, "what others cannot upload somebody has to pass on"),
            "patience": (120.0, "it starts unattended, perhaps before the peers that it is to ask"),
            "packet_quota_mb": (16384, "a whole training can be replayed"),
            "log_format": ("json", "a collector reads its logs"),
        },
    ),
}
