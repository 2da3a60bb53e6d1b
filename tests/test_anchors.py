"""How often a group misses a rare right answer (F-GRPO, arXiv 2602.06717), which docs/method.md quotes.

A group of N misses a rare kind of right answer and yet has a signal with probability (1−r)^N − (p−r)^N − (1−p)^N, where
answers are right at rate p and of that kind at rate r.
"""

import numpy as np
import pytest


@pytest.mark.parametrize("size", [2, 8, 12, 36, 96])
def test_a_group_misses_a_rare_right_answer_as_often_as_the_formula_says(size):
    rare, common, wrong = np.random.default_rng(size).multinomial(size, (0.02, 0.28, 0.7), 200_000).T
    assert np.mean((rare == 0) & (common > 0) & (wrong > 0)) == pytest.approx(tail_miss(size), abs=0.0045)


def tail_miss(size, right=0.3, rare=0.02):
    return float((1 - rare) ** size - (right - rare) ** size - (1 - right) ** size)


def test_a_group_of_twelve_is_near_the_worst_and_k_nodes_with_common_rows_are_better():
    assert tail_miss(12) > 0.95 * max(map(tail_miss, range(2, 200)))
    assert [round(tail_miss(12 * nodes), 2) for nodes in (1, 3, 8)] == [0.77, 0.48, 0.14]
