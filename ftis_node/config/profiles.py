"""Constants that belong to a task, between the defaults and what a person sets."""

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
