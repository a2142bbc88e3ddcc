"""Metrics of one iteration: weighted means and maxima over all ranks, whatever the micro-batches, reduced once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
Sums = dict[str, tuple[Tensor, Tensor]]
"""Totals and counts by metric."""


class Means:
    """Running weighted means. Their value does not depend on how the data was cut. Sums are kept in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[Tensor | float, Tensor | float]]] = {}
        self._maxima: dict[str, list[Tensor | float]] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add a sum over `count` items (tokens, sequences) to the mean of that name."""
        pair = tuple(x.detach() if isinstance(x, Tensor) else x for x in (total, count))
        self._sums.setdefault(name, []).append(pair)  # type: ignore[arg-type]  # read back in `compute`: no sync here

    def add_mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add all of `values`, or those under a bool mask of the same shape."""
        if mask is not None:
            values = values[mask]
        self.add(name, values.double().sum(), values.numel())

    def add_max(self, name: str, value: Tensor | float) -> None:
        """Take part in the maximum of that name."""
        self._maxima.setdefault(name, []).append(value)

    def compute(self, reduce: Reduce | None = None, reduce_max: Reduce | None = None) -> dict[str, float]:
        """Return every mean and maximum; a mean over nothing is left out.

        Args:
            reduce: Sums a tensor over ranks; every rank must have added the same names.
            reduce_max: Takes its maximum over ranks.
        """
        result = {}
        if self._sums:
            table = torch.tensor(
                [[sum(float(pair[i]) for pair in self._sums[name]) for i in (0, 1)] for name in sorted(self._sums)],
                dtype=torch.float64,
            )
            table = table if reduce is None else reduce(table)
            rows = zip(sorted(self._sums), table.tolist(), strict=True)
            result = {name: total / count for name, (total, count) in rows if count > 0}
        if self._maxima:
            peaks = torch.tensor([max(map(float, self._maxima[n])) for n in sorted(self._maxima)], dtype=torch.float64)
            peaks = peaks if reduce_max is None else reduce_max(peaks)
            result |= dict(zip(sorted(self._maxima), peaks.tolist(), strict=True))
        return result
