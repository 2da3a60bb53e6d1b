"""The hint: how many completions of a packet are right, by its author."""

import pytest

from ftis_node.host.clocks import boot_seconds
from ftis_node.swarm.announcement import right_of, teaches
from tests.support.steppers import stepper
from tests.support.swarm import RUN, scored

MIXED = (0.0, 1.0)


@pytest.mark.parametrize(
    ("rewards", "right"),
    [
        ((0, 0), 0),
        ((0, 1), 1),
        ((1, 1), 2),
        ((0.5, 0.5), 2),
        ((0, 0.3), 1),
        ((-1, 0), 0),
        ((0.3, 1, 1), 2),
    ],
)
def test_the_hint_counts_the_completions_with_the_highest_reward(rewards, right):
    assert right_of(rewards) == right
    assert teaches(RUN.model_copy(update={"group": len(rewards)}), right) == (
        min(rewards) != max(rewards) and max(rewards) > 0
    )


class Judge:
    """A compute process that gives every foreign group the same rewards."""

    async def call(self, request):
        return list(MIXED)


@pytest.mark.parametrize(
    ("rule", "hint", "banned"),
    [
        ("integer", 2, True),
        ("integer", 1, False),
        ("integer", None, False),
        ("math", 2, False),
    ],
)
async def test_row_46_a_wrong_hint_is_a_fault_by_some_rules(tmp_path, rule, hint, banned):
    node = stepper(tmp_path, others=1, run=RUN.model_copy(update={"reward": rule}), worker=Judge())
    for slot in range(3):
        group = scored(1, 0, slot, boot_seconds(), MIXED).group
        node.source.inbox.score_later(group, boot_seconds(), hint)
        await node.source.inbox.scored()
    assert bool(node.means.reputation.banned(group.author)) is banned
    assert node.means.reputation.report(group.author)["refused"] == ({"wrong hint": 3} if banned else {})
