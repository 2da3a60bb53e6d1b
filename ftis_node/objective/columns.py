"""Rows of named figures by source, gathered piece by piece."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_NONE = torch.zeros(0, dtype=torch.float64)


class Columns:
    """Columns of one length; `columns[name]` is float64 `[rows]`, and empty where nothing has that name."""

    def __init__(self, source: Tensor, columns: Mapping[str, Tensor]) -> None:
        self._source = source
        self._columns = columns

    def __getitem__(self, name: str) -> Tensor:
        return self._columns.get(name, _NONE)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return self._source.numel()

    def of(self, sources: Iterable[int]) -> Columns:
        """The rows of these sources."""
        picked = torch.isin(self._source, torch.tensor(list(sources), dtype=torch.int64))
        return Columns(self._source[picked], {name: column[picked] for name, column in self._columns.items()})


class SourceColumns:
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

    def columns(self) -> Columns:
        """All rows so far."""
        columns = {name: torch.cat(pieces) for name, pieces in self._columns.items()}
        return Columns(torch.cat(self._source), columns)
