"""How often a group misses a rare right answer (F-GRPO, arXiv 2602.06717), which docs/method.md quotes.

A group of N misses a rare kind of right answer and yet has a signal with probability (1−r)^N − (p−r)^N − (1−p)^N, where
answers are right at rate p and of that kind at rate r.
"""

import numpy as np
import pytest


@pytest.mark.parametrize("size", [2, 8, 12, 36, 96])
def test_a_group_misses_a_rare_right_answer_as_often_as_the_formula_says(size):
    draw = np.random.default_rng(size)
    rare, common, wrong = draw.multinomial(size, (0.02, 0.28, 0.7), 200_000).T

    missed = (rare == 0) & (common > 0) & (wrong > 0)

    assert np.mean(missed) == pytest.approx(tail_miss(size), abs=0.0045)


def tail_miss(size, right=0.3, rare=0.02):
    without_rare = (1 - rare) ** size
    all_common = (right - rare) ** size
    all_wrong = (1 - right) ** size
    return without_rare - all_common - all_wrong


def test_a_group_of_twelve_is_near_the_worst_and_k_nodes_with_common_rows_are_better():
    worst = max(map(tail_miss, range(2, 200)))
    assert tail_miss(12) > 0.95 * worst

    for nodes, expected in (
        (1, 0.77),
        (3, 0.48),
        (8, 0.14),
    ):
        assert round(tail_miss(12 * nodes), 2) == expected
