"""The objective that settings and task name."""

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, did_you_mean
from ftis_node.objective import PRESETS, Objective


def choose_objective(settings: Settings, task: str, completion_tokens: int) -> Objective:
    """The named preset with the parts that the settings or the task replace.

    Args:
        completion_tokens: the run's cap; the divisor of the loss under `fixed`.

    Raises:
        UsageError: there is no such preset.
    """
    if settings.objective not in PRESETS:
        hint = did_you_mean(settings.objective, PRESETS)
        raise UsageError(f"There is no objective {settings.objective!r}.", f"{hint}Use one of: {', '.join(PRESETS)}.")
    preset = PRESETS[settings.objective]
    standard = PRESETS["ftis"]
    alike = all(getattr(preset, part) == getattr(standard, part) for part in ("divergence", "reduction", "threshold"))
    parts = settings.objective_parts(task, filters=alike)
    if parts.get("aggregation", preset.aggregation) == "fixed":
        parts["divisor"] = float(completion_tokens)
    return preset.replace(**parts)
