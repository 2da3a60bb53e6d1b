"""The objectives that have a name; `ftis_node.methods` says of each what it is and where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ftis_node.methods import METHODS
from ftis_node.objective.objective import Objective

PRESETS: Mapping[str, Objective] = MappingProxyType(
    {name: Objective(name, **parts()) for name, parts in METHODS.items()}
)
