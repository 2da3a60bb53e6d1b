"""Methods of 2026 that are compared before any becomes a preset: `objective = "xgrpo"` in a lab file.

    hacpo-published, xgrpo   for horizontal cells in lock step, see `lab.pooling`

Here are the settings that each stands on.
"""

from collections.abc import Mapping
from typing import Any

CANDIDATES: Mapping[str, Mapping[str, Any]] = {"hacpo-published": {"objective": "hacpo"}, "xgrpo": {"objective": "vis"}}


def standing_on(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with those that their objective stands on, where it is a candidate."""
    return {**settings, **CANDIDATES.get(settings.get("objective", ""), {})}
