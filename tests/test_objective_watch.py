"""When a node is told that its filter does nothing, or nearly everything."""

from ftis_node.objective import FilterWatch


def step(**peers):
    """Figures of a step: (negatives, filtered) by source."""
    return {peer: {"negatives": float(n), "filtered": float(dropped)} for peer, (n, dropped) in peers.items()}


def told(watch, steps):
    return [watch.observe(sources, own="me") for sources in steps]


def test_a_filter_that_never_fires_is_told_of_once_a_streak():
    sentences = told(FilterWatch(), [step(a=(3, 0))] * 25)
    assert [index for index, said in enumerate(sentences) if said] == [9]
    (sentence,) = sentences[9]
    assert sentence.startswith("For 10 steps the filter has dropped none of a's negative samples")


def test_a_filter_that_drops_more_than_half_is_told_of():
    sentences = told(FilterWatch(), [step(a=(4, 3))] * 10)
    assert not any(sentences[:9])
    assert sentences[9][0].startswith("For 10 steps the filter has dropped more than half of a's negative samples")


def test_half_or_a_few_is_as_it_should_be():
    assert not any(told(FilterWatch(), [step(a=(4, 2), b=(4, 1))] * 30))


def test_a_streak_that_comes_and_goes_is_told_of_once_until_it_is_another():
    watch = FilterWatch(steps=3)
    never = step(a=(2, 0))
    most = step(a=(2, 2))
    sentences = told(watch, ([never] * 4 + [step(a=(2, 1))]) * 20)
    assert sum(map(len, sentences)) == 1 and sentences[2]
    assert [len(said) for said in told(watch, [*[most] * 3, *[never] * 3])] == [0, 0, 1, 0, 0, 1]


def test_steps_without_negatives_neither_end_nor_lengthen_a_streak():
    watch = FilterWatch(steps=3)
    sentences = told(watch, [step(a=(1, 0)), step(a=(0, 0)), step(), step(a=(1, 0)), step(a=(0, 0)), step(a=(1, 0))])
    assert [len(said) for said in sentences] == [0, 0, 0, 0, 0, 1]


def test_ones_own_samples_are_not_watched_and_every_peer_is():
    (*_, last) = told(FilterWatch(steps=2), [step(me=(5, 0), a=(5, 0), b=(5, 5), c=(5, 1))] * 2)
    assert len(last) == 2 and " a's " in last[0] and " b's " in last[1]


def test_a_peer_that_stays_away_is_forgotten():
    watch = FilterWatch(steps=2)
    told(watch, [step(a=(1, 0)), *[step()] * 98])
    assert watch.observe(step(a=(1, 0)), own="me")
    told(watch, [step(a=(1, 1)), step(a=(1, 0)), *[step()] * 100])
    assert not watch.observe(step(a=(1, 0)), own="me")
