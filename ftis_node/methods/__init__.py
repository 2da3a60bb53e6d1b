"""The objectives that have a name, one module a family, each a function that returns the parts in which it differs from
F-TIS. Data only, so that settings are checked without torch."""

from collections.abc import Callable, Mapping

from ftis_node.methods import ftis, gated, peers, policy_gradient
from ftis_node.methods.choices import PART_NAMES, Parts

__all__ = ["METHODS", "NAMES"]

_ALL = (
    ftis.ftis,
    ftis.grpo,
    ftis.nois,
    ftis.vis,
    ftis.tis,
    ftis.f_nois,
    ftis.f_vis,
    ftis.ftis_author,
    gated.gated,
    peers.graft,
    peers.sgt,
    peers.hacpo,
    policy_gradient.gspo,
    policy_gradient.cispo,
    policy_gradient.dapo,
)
METHODS: Mapping[str, Callable[[], Parts]] = {method.__name__.replace("_", "-"): method for method in _ALL}
NAMES: Mapping[str, tuple[str, ...]] = {"objective": tuple(METHODS), **PART_NAMES}
"""Setting → the names that it can have."""
