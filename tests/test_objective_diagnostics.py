"""The figures of a step against the same figures worked out with plain Python."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from ftis_node.objective import PRESETS, Diagnostics
from ftis_node.objective.diagnostics import TOLERANCE
from tests.support.objective_batches import FORMULAS, add, packed, termed

ARITHMETIC = PRESETS["ftis"].replace(divergence="k1", reduction="sum", threshold=1.0)


def gather(objective, micro_batches):
    """Diagnostics of micro-batches of samples, each (source, advantage, d per token)."""
    diagnostics = Diagnostics()
    for samples in micro_batches:
        sources, advantages, d = zip(*samples, strict=True)
        zeros = [[0.0] * len(tokens) for tokens in d]
        batch = packed(d, advantages, generator=zeros)
        add(diagnostics, termed(objective, **batch), batch, sources)
    return diagnostics


def test_figures_of_two_sources_worked_by_hand():
    me = ("own", 1.0, [0.0, 0.0])
    peer = [
        ("a", 2.0, [math.log(4), math.log(0.5)]),
        ("a", -1.0, [-2.0]),
        ("a", -1.0, [math.log(1.5)]),
    ]
    weights = [2.0, 0.5, math.exp(-2), 1.5]
    divergences = [-math.log(4) - math.log(0.5), 2.0, -math.log(1.5)]
    mine = 1.0 * 2
    theirs = 2.0 * 2.5 + 1.0 * 1.5
    expected = {
        "samples": 3,
        "tokens": 4,
        "negatives": 2,
        "filtered": 1,
        "filtered_fraction": 0.5,
        "gated": 0,
        "ratio_max": 4,
        "ratio_p1": math.exp(-2),
        "ratio_p50": 0.5,
        "weight_max": 2,
        "truncated": 0.25,
        "clipped": 0,
        "ess": sum(weights) ** 2 / sum(w * w for w in weights) / 4,
        "divergence_mean": sum(divergences) / 3,
        "divergence_p99": 2,
        "loss_share": theirs / (mine + theirs),
        # Divided by length: 1 for me, 2 · 2.5/2 + 1 · 1.5 for the peer.
        "loss_share_per_sample": 4 / 5,
        # s_i under the policy, whose log-probs are the d's, the generator's being 0.
        "likelihood": (math.log(2) / 2 - 2.0 + math.log(1.5)) / 3,
    }

    summary = gather(ARITHMETIC, [[me, peer[0]], peer[1:]]).summary()

    a = summary.sources["a"]
    assert {name: a[name] for name in expected} == pytest.approx(expected)
    assert summary.sources["own"]["ess"] == 1.0
    assert summary.overall["tokens"] == 6
    assert summary.overall["loss_share"] == pytest.approx(1)
    assert summary.foreign == a


samples = st.tuples(
    st.sampled_from(["own", "a", "b"]),
    st.floats(-2, 2),
    st.lists(st.floats(-25, 25), min_size=1, max_size=5),
)


@settings(max_examples=50, derandomize=True)
@given(
    st.lists(st.lists(samples, min_size=1, max_size=6), max_size=4),
    st.sampled_from([*PRESETS.values(), ARITHMETIC]),
)
def test_shares_add_up_and_micro_batches_do_not_matter(micro_batches, objective):
    summary = gather(objective, micro_batches).summary()

    sources = summary.sources.values()
    for name in ("loss_share", "loss_share_per_sample"):
        shares = [figures[name] for figures in sources]
        assert math.fsum(shares) == pytest.approx(1) or not any(shares)
    for count in ("samples", "tokens", "negatives", "filtered", "gated"):
        assert sum(figures[count] for figures in sources) == summary.overall[count]
    for figures in sources:
        assert 0 <= figures["ess"] <= 1 + 1e-9
        assert figures["weight_max"] <= figures["ratio_max"] or objective.importance == "none"

    if micro_batches:
        together = [sample for batch in micro_batches for sample in batch]
        at_once = gather(objective, [together]).summary()
        for name, figures in summary.sources.items():
            assert at_once.sources[name] == pytest.approx(figures, rel=1e-9)


def test_idle_samples_are_counted_and_in_no_other_figure():
    diagnostics = gather(ARITHMETIC, [[("own", 1.0, [0.0])]])
    before = diagnostics.summary()
    diagnostics.idle.update(own=12, b=12)
    after = diagnostics.summary()
    assert after.overall == before.overall | {"idle": 24.0}
    assert after.sources["own"]["idle"] == 12
    assert after.sources["b"]["idle"] == 12
    assert after.sources["b"]["samples"] == 0


def test_a_summary_is_plain_floats_even_of_nothing():
    for diagnostics in (
        Diagnostics(),
        gather(ARITHMETIC, [[("own", 1.0, [0.5]), ("a", -1.0, [-30.0])]]),
    ):
        diagnostics.idle["b"] += 1
        summary = diagnostics.summary()
        plain = asdict(summary)
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        for figures in (summary.overall, summary.foreign, *summary.sources.values()):
            assert all(type(value) is float for value in figures.values())


def test_every_estimator_has_its_mean_and_its_worst_samples():
    batch = [
        ("a", 1.0, [0.1]),
        ("a", 1.0, [0.0, -0.2, 0.3]),
        ("b", -1.0, [-3.0]),
    ]
    figures = gather(ARITHMETIC, [batch]).summary()
    for name, formula in FORMULAS.items():
        a, b, c, d, e = map(formula, (0.1, 0.0, -0.2, 0.3, -3.0))
        worst_of_a = max(a, (b + c + d) / 3)
        of_a = figures.sources["a"]
        assert of_a[name] == pytest.approx((a + b + c + d) / 4)
        assert of_a[f"{name}_p99"] == pytest.approx(worst_of_a)
        assert figures.overall[name] == pytest.approx((a + b + c + d + e) / 5)
        assert figures.overall[f"{name}_p99"] == pytest.approx(max(worst_of_a, e))


def gated(objective, **more):
    """Figures of two own and three foreign samples of 1, 2, 1, 2 and 3 tokens; the last of each is a sampled EOS."""
    start = [
        [-1.0],
        [-2.0, -0.5],
        [-8.0],
        [-1.0, -1.5],
        [-1.0, -1.0, -7.0],
    ]
    batch = packed(
        start,
        [1.0, -1.0, 1.0, 1.0, -1.0],
        generator=[[x - 0.5 for x in sample] for sample in start],
        gate=-2.0,
        ended=[True] * 5,
        own=[True, True, False, False, False],
    )
    diagnostics = Diagnostics()
    add(diagnostics, termed(objective, **batch), batch, ["own", "own", "a", "a", "a"], **more)
    return diagnostics.summary()


def test_only_the_gate_drops_what_has_a_positive_advantage():
    a = gated(PRESETS["gated"]).sources["a"]
    for name in ("negatives", "filtered", "gated", "filtered_fraction"):
        assert a[name] == 1
    assert a["samples"] == 3
    assert a["loss_weight"] == 2
    assert a["likelihood"] == pytest.approx((-8.0 - 1.25 - 3.0) / 3)


def test_ends_that_do_not_count_are_in_no_figure():
    objective = PRESETS["ftis-author"].replace(truncation=1.0)
    figures = gated(objective, entropy=torch.arange(9.0))
    overall = figures.overall
    assert overall["tokens"] == 4
    assert overall["truncated"] == 1
    assert overall["judged_tokens"] == 9, "but in the evidence on claims they are: ρ has a mean of 1 with them"
    foreign = figures.foreign
    bet = math.log(0.5 + 0.5 * math.exp(0.5 - TOLERANCE))
    assert foreign["bet_0.5"] == pytest.approx(6 * bet)
    assert overall["k1"] == pytest.approx(-0.5)
    assert overall["entropy"] == pytest.approx((1 + 4 + 6 + 7) / 4)
    # One own sample of one token; of the foreign ones one of one token and one of two, each weighing 1 a token.
    assert foreign["loss_share"] == 3 / 4
    assert foreign["loss_share_per_sample"] == 2 / 3

    whole = gated(PRESETS["ftis"], entropy=torch.arange(9.0))
    assert whole.overall["tokens"] == 9
    assert whole.overall["entropy"] == 4
    assert whole.foreign["entropy"] == pytest.approx((3 + 4 + 5 + 6 + 7 + 8) / 6)


def test_later_inner_steps_change_only_the_clip():
    batch = packed([[0.0] * 3, [0.0]], [1.0, -1.0])
    diagnostics = Diagnostics()

    def terms(drift):
        moved = {"trainer_logprobs": torch.tensor(drift, dtype=torch.float64)}
        return termed(PRESETS["tis"], **batch | moved)

    add(diagnostics, terms([0.0] * 4), batch, ["own", "a"])
    before = diagnostics.summary()
    assert before.overall["clipped"] == 0

    # Up by more than log 1.2 with Â > 0, or down by more than log 0.8 with Â < 0.
    for drift in (
        [0.3, 0.3, -0.3, -0.3],
        [0.3, 0.1, 0.1, 0.3],
    ):
        diagnostics.add_inner(terms(drift), batch["lengths"], ["own", "a"])

    after = diagnostics.summary()
    assert after.sources["own"]["clipped"] == 3 / 9
    assert after.sources["a"]["clipped"] == 1 / 3
    assert after.overall == before.overall | {"clipped": 4 / 12}
