"""Group-relative advantages: how much better a completion did than its group (arXiv 2605.22537, section 3).

The paper does not say which standard deviation: we take the population's, with no epsilon. The mean and the standard
deviation are over the whole group, samples that a filter later drops included.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ftis_node.methods.choices import Advantage


def _mean_std(centred: Tensor, mean: Tensor) -> Tensor:
    """Rewards minus their mean, over their standard deviation (of the population)."""
    # Brought to a largest value of 1 first, so that squaring neither under- nor overflows and the root is never 0.
    scaled = centred / centred.abs().max()
    return scaled / scaled.square().mean().sqrt()


# Name → rewards minus their mean (float64 [G], not all equal), and the mean → advantages.
ADVANTAGES: Mapping[Advantage, Callable[[Tensor, Tensor], Tensor]] = {
    "mean_std": _mean_std,
    "mean": lambda centred, mean: centred,
    "maxrl": lambda centred, mean: centred / mean,
}


# Units in the last place of the largest reward. A reward that is no farther from the mean is at it: a mean is rounded,
# and so are rewards such as 0.1 + 0.2.
ROUNDING = 64


def group_advantages(rewards: Tensor, kind: Advantage) -> Tensor:
    """Advantages of one group: rewards, float64 `[G]` → the same. Rewards stay as they are.

    `mean_std`: Â_i = (r_i − mean(r)) / std(r), population std, no epsilon. `mean`: Â_i = r_i − mean(r). `maxrl`, of
    rewards that are not negative: Â_i = (r_i − mean(r)) / mean(r), the gradient of the log of the rate of success to
    the order that G samples allow (arXiv 2602.02710).
    An advantage is exactly 0 where the reward is the mean but for rounding; so all are where all rewards are equal.
    """
    mean = rewards.mean()
    centred = rewards - mean
    least = ROUNDING * torch.finfo(torch.float64).eps * rewards.abs().max()
    centred[centred.abs() <= least] = 0.0
    if not centred.any():
        return centred
    return ADVANTAGES[kind](centred, mean)
