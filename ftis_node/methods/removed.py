"""Objectives and parts that earlier versions had: why each was removed, and what stands in for it."""

from collections.abc import Iterator, Mapping

from ftis_node.errors import UsageError

_IDLE = "of a real model's own samples it left nothing out"
_PRODUCT = "a product of ratios multiplies what rounding does"
REMOVED: Mapping[tuple[str, object], tuple[str, str]] = {
    ("objective", "opsm"): ("it is vis with another filter", "Use objective=vis, divergence=k1 and threshold=0.5."),
    ("objective", "icepop"): (_IDLE, "Use objective=tis and truncation=5."),
    ("objective", "geo-rs"): (_IDLE, "Use objective=tis."),
    ("objective", "dppo"): (_IDLE, "Use objective=vis and epsilon=none."),
    ("objective", "mis"): (_PRODUCT, "Use objective=tis."),
    ("importance", "sequence"): (_PRODUCT, "Use importance=truncated."),
    ("mask", ...): (_IDLE, "Leave it out."),
}
"""Setting and its value (…: any) → why it was removed, and what to do."""


def refusals(values: Mapping[str, object], origin: str) -> Iterator[UsageError]:
    """Yield an error for each of these settings that is, or has, what was removed. origin: where they came from."""
    for name, value in values.items():
        found = REMOVED.get((name, str(value))) or REMOVED.get((name, ...))
        if found is not None and value is not None:
            why, fix = found
            yield UsageError(f"{name}={value} ({origin}) was removed: {why}.", fix)
