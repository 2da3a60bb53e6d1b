"""The objective of a step: advantages, divergence, importance, filter, loss, diagnostics (arXiv 2605.22537, section 3).

Pure torch on tensors; nothing here knows of a network, a model or a token id. An `Objective` is a frozen choice of
parts, and `PRESETS` holds the choices that have a name. `Terms` describes one micro-batch, `Diagnostics` one step,
`FilterWatch` many steps.
"""

from ftis_node.objective.diagnostics import Diagnostics
from ftis_node.objective.loss import Terms
from ftis_node.objective.objective import PRESETS, Objective
from ftis_node.objective.samples import pack
from ftis_node.objective.watch import FilterWatch

__all__ = [
    "PRESETS",
    "Diagnostics",
    "FilterWatch",
    "Objective",
    "Terms",
    "pack",
]
