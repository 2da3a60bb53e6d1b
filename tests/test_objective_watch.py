"""When a node is told that its filter does nothing, or nearly everything."""

from ftis_node.objective import FilterWatch


def step(**peers):
    """Figures of a step: (negatives, filtered) by source."""
    return {peer: {"negatives": float(n), "filtered": float(dropped)} for peer, (n, dropped) in peers.items()}


def of_a(negatives, filtered):
    return step(a=(negatives, filtered))


NEVER = of_a(1, 0)
NO_NEGATIVES = of_a(0, 0)


def told(watch, steps):
    return [watch.observe(sources) for sources in steps]


def test_a_filter_that_never_fires_is_told_of_once_a_streak():
    sentences = told(FilterWatch(), [NEVER] * 25)
    [sentence] = sentences.pop(9)
    assert sentence.startswith("For 10 steps the filter has dropped none of a's negative samples")
    assert not any(sentences)


def test_a_filter_that_drops_more_than_half_is_told_of():
    sentences = told(FilterWatch(), [of_a(4, 3)] * 10)
    [sentence] = sentences.pop()
    assert sentence.startswith("For 10 steps the filter has dropped more than half of a's negative samples")
    assert not any(sentences)


def test_half_or_a_few_is_as_it_should_be():
    assert not any(told(FilterWatch(), [step(a=(4, 2), b=(4, 1))] * 30))


def test_a_streak_that_comes_and_goes_is_told_of_once_until_it_is_another():
    watch = FilterWatch(steps=3)
    comes_and_goes = [*[NEVER] * 4, of_a(2, 1)]
    sentences = told(watch, comes_and_goes * 20)
    assert sentences.pop(2)
    assert not any(sentences)
    most = of_a(2, 2)
    sentences = told(watch, [most] * 3 + [NEVER] * 3)
    assert [len(said) for said in sentences] == [0, 0, 1, 0, 0, 1]


def test_steps_without_negatives_neither_end_nor_lengthen_a_streak():
    watch = FilterWatch(steps=3)
    sentences = told(watch, [NEVER, NO_NEGATIVES, step(), NEVER, NO_NEGATIVES, NEVER])
    assert [len(said) for said in sentences] == [0, 0, 0, 0, 0, 1]


def test_ones_own_samples_are_not_watched_and_every_peer_is():
    everybody = step(own=(5, 0), a=(5, 0), b=(5, 5), c=(5, 1))
    _, (one, other) = told(FilterWatch(steps=2), [everybody] * 2)
    assert " a's " in one
    assert " b's " in other


def test_a_peer_that_stays_away_is_forgotten():
    watch = FilterWatch(steps=2)
    told(watch, [NEVER, *[step()] * 98])
    assert watch.observe(NEVER)
    told(watch, [of_a(1, 1), NEVER, *[step()] * 100])
    assert not watch.observe(NEVER)
