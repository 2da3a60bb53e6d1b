"""Chunks: the shortest spans of a text at whose ends two tokenizations both have a boundary (ALM, arXiv 2503.20083)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def align(
    pieces: npt.ArrayLike, claims: npt.ArrayLike, tokens: npt.ArrayLike
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the chunk of each own token, and the author's log-prob of each chunk.

    pieces [n], tokens [m]: bytes of each piece of the author and of each own token, all positive; both begin at the
    same byte. claims [n]: the author's log-prob of each piece, nats. Returns int64 [k] from 0 to C − 1, float32 [C].
    Only tokens before the last common boundary are in a chunk: k = m, if both cover the same bytes. O(n log n + m).
    """
    theirs, own = np.cumsum(pieces, dtype=np.int64), np.cumsum(tokens, dtype=np.int64)
    _, last_piece, last_token = np.intersect1d(theirs, own, assume_unique=True, return_indices=True)
    if not len(last_piece):
        return np.empty(0, np.int64), np.empty(0, np.float32)
    first_piece = np.concatenate(([0], last_piece[:-1] + 1))
    covered = np.asarray(claims, np.float64)[: last_piece[-1] + 1]
    chunks = np.repeat(np.arange(len(last_token)), np.diff(last_token, prepend=-1))
    return chunks, np.add.reduceat(covered, first_piece).astype(np.float32)
