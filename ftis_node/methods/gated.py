"""Our own: GRPO on own samples; of others what is no stranger than that.

    a foreign sample counts, with weight 1, if Âᵢ > 0 and sᵢ = 1/|aᵢ| Σₜ log π_θ(aₜ) ≥ m

m is a moving average of each step's lowest sᵢ among own successes (`ftis_node.objective.gate`). Trained on: own
samples, and others' successes inside the gate. No signal: a group of equal rewards; anything foreign before the first
own success. It uses no claimed log-prob, so no peer can lie its way in.
"""

from ftis_node.methods.choices import Parts


def gated() -> Parts:
    """wₜ = 1; of others only if Â > 0 and s ≥ m: [below](#gated).

    Of others: successes no stranger than its own. Source: our own.
    """
    return {"importance": "none", "threshold": None, "gate": 0.0}
