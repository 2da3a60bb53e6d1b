"""The learner: one private optimiser step on groups of one's own and of others (F-TIS, arXiv 2605.22537).

`Batch` is what a step is taken on, `Learner` takes it, `Optimiser` changes the weights.
"""

from ftis_node.learner.batch import Part, TrainingGroup
from ftis_node.learner.choice import choose_objective
from ftis_node.learner.learner import Learner

__all__ = ["Learner", "Part", "TrainingGroup", "choose_objective"]
