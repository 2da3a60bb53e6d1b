"""Chunks: the shortest spans of a text at whose ends two tokenizations both have a boundary (ALM, arXiv 2503.20083)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_NO_CHUNKS = np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int64)


def align(
    pieces: npt.ArrayLike, claims: npt.ArrayLike, tokens: npt.ArrayLike
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return the chunk of each own token, and the author's log-prob and number of pieces of each chunk.

    pieces [n], tokens [m]: bytes of each piece of the author and of each own token, all positive; both begin at the
    same byte. claims [n]: the author's log-prob of each piece, nats. Returns int64 [k] from 0 to C − 1, float32 [C] and
    int64 [C].
    Only tokens before the last common boundary are in a chunk: k = m, if both cover the same bytes. Linear in bytes.
    """
    theirs, own = np.cumsum(pieces, dtype=np.int64), np.cumsum(tokens, dtype=np.int64)
    if not len(theirs) or not len(own):
        return _NO_CHUNKS
    boundary = np.zeros(max(theirs[-1], own[-1]) + 1, np.bool_)
    boundary[theirs] = True
    last_tokens = np.flatnonzero(boundary[own])
    ends = np.searchsorted(theirs, own[last_tokens]) + 1  # pieces up to the end of each chunk
    if not len(ends):
        return _NO_CHUNKS
    chunks = np.repeat(np.arange(len(ends)), np.diff(last_tokens, prepend=-1))
    sums = np.add.reduceat(np.asarray(claims, np.float64)[: ends[-1]], np.concatenate(([0], ends[:-1])))
    return chunks, sums.astype(np.float32), np.diff(ends, prepend=0)
