"""The objective that settings and task name."""

from ftis_node.config.settings import Settings
from ftis_node.objective import PRESETS, Objective


def choose_objective(
    settings: Settings,
    task: str,
    completion_tokens: int,
) -> Objective:
    """The named preset with the parts that the settings or the task replace.

    Args:
        settings: checked, see `config.consistency`.
        completion_tokens: the run's cap; the divisor of the loss under `fixed`.
    """
    preset = PRESETS[settings.objective]
    standard = PRESETS["ftis"]
    alike = all(getattr(preset, part) == getattr(standard, part) for part in ("divergence", "reduction", "threshold"))
    parts = settings.objective_parts(task, filters=alike)
    if parts.get("aggregation", preset.aggregation) == "fixed":
        parts["divisor"] = float(completion_tokens)
    return preset.replace(**parts)
