"""Rows of named figures by source, gathered piece by piece."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Rows = defaultdict[str, Tensor]
"""By name a column, float64 `[rows]`; empty where nothing has that name."""


class Columns:
    """Grows by pieces, each with the same names; everything is kept on the CPU."""

    def __init__(self) -> None:
        self._source: list[Tensor] = [torch.zeros(0, dtype=torch.int64)]
        self._columns: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, source: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add rows: `source` int64 `[rows]` says whose each is, every column is `[rows]` of any dtype and device."""
        self._source.append(source)
        for name, column in columns.items():
            # float64, since sums of 1e5 tokens in float32 would lose digits of the shares.
            self._columns[name].append(column.detach().cpu().double())

    def of(self, sources: Iterable[int]) -> Rows:
        """The rows of these sources."""
        if len(self._source) > 1:  # the first time since rows were added
            for pieces in (self._source, *self._columns.values()):
                pieces[:] = [torch.cat(pieces)]
        picked = torch.isin(self._source[0], torch.tensor(list(sources), dtype=torch.int64))
        rows: Rows = defaultdict(lambda: torch.zeros(0, dtype=torch.float64))
        for name, (column,) in self._columns.items():
            rows[name] = column[picked]
        return rows
