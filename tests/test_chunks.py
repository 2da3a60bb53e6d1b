"""Chunks are the finest common cut of a text into two tokenizations, and lose nothing of what the author claimed."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftis_node.tokenizer.codec import align


@st.composite
def cuts(draw):
    """Two ways to cut a text of 1 to 60 bytes into pieces."""
    size = draw(st.integers(1, 60))

    def lengths():
        inner = draw(st.sets(st.integers(1, size - 1), max_size=30)) if size > 1 else set()
        return [end - start for start, end in pairwise([0, *sorted(inner), size])]

    return lengths(), lengths()


def claims_for(pieces):
    """Sums of these are exact in any order."""
    return -np.arange(1, len(pieces) + 1, dtype=np.float32) / 8


def ends(lengths):
    return set(np.cumsum(lengths).tolist())


@given(cuts())
def test_chunks_end_where_both_have_an_end_and_nowhere_else(cut):
    pieces, tokens = cut

    chunks, claims, _ = align(pieces, claims_for(pieces), tokens)

    assert chunks.dtype == np.int64
    assert claims.dtype == np.float32
    last = np.flatnonzero(np.diff(chunks, append=len(claims)))
    ends_of_chunks = np.cumsum(tokens)[last]
    assert set(ends_of_chunks.tolist()) == ends(pieces) & ends(tokens)
    assert len(chunks) == len(tokens)
    assert set(chunks.tolist()) == set(range(len(claims)))
    assert (np.diff(chunks) >= 0).all()


@given(cuts())
def test_every_chunk_claims_what_its_pieces_claim(cut):
    pieces, tokens = cut
    given_claims = claims_for(pieces)

    _, claims, counts = align(pieces, given_claims, tokens)

    common = sorted(ends(pieces) & ends(tokens))
    places = np.searchsorted(np.array(common), np.cumsum(pieces))
    assert len(claims) == len(counts) == len(common)
    for chunk in range(len(common)):
        within = places == chunk
        assert claims[chunk] == given_claims[within].sum()
        assert counts[chunk] == within.sum()
    assert claims.sum() == given_claims.sum()


@given(cuts(), st.integers(0, 60), st.integers(0, 60))
def test_no_chunk_is_after_the_last_end(cut, pieces_left, tokens_left):
    pieces = cut[0][:pieces_left]
    tokens = cut[1][:tokens_left]

    chunks, claims, _ = align(pieces, claims_for(pieces), tokens)

    common = ends(pieces) & ends(tokens)
    last = max(common, default=0)
    assert len(claims) == len(common)
    assert sum(tokens[: len(chunks)]) == last
    covered = np.cumsum(pieces) <= last
    assert claims.sum() == claims_for(pieces)[covered].sum()
