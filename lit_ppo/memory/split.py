"""Cutting a batch along its rows, and putting the outputs of the pieces together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def batch_rows(batch: Any) -> int:
    """Return the number of rows: the first dimension that all tensors of a batch share (0-dim tensors aside).

    Args:
        batch: Tensors in any nesting of dicts, lists, tuples, named tuples and dataclasses.

    Raises:
        ValueError: No tensor, tensors that disagree, or no rows.
    """
    found: list[int] = []
    apply_to_collection(batch, Tensor, lambda t: found.append(t.shape[0]) if t.ndim else None)
    if len(set(found)) != 1 or found[0] < 1:
        seen = f"tensors of {sorted(set(found))} rows" if found else "no tensor"
        raise ValueError(
            f"The rows of a batch of type {type(batch).__name__} are not clear: it holds {seen}. Say how to cut it "
            "with `split_batch`, a function of (batch, size) that returns the pieces."
        )
    return found[0]


def split_batch(batch: Any, size: int) -> list[Any]:
    """Cut a batch into consecutive pieces of at most `size` rows.

    Tensors are sliced along dimension 0 (views, no copies), and so are lists and tuples that hold no tensor and are as
    long as the batch (texts, say). 0-dim tensors and everything else are shared by all pieces.

    Args:
        batch: As for `batch_rows`.
        size: Rows of a piece, >= 1.
    """
    rows = batch_rows(batch)
    return [_cut(batch, start, min(start + size, rows), rows) for start in range(0, rows, size)]


def _cut(value: Any, start: int, stop: int, rows: int) -> Any:
    def pick(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item[start:stop] if item.ndim else item
        if not _holds_tensor(item) and len(item) == rows:
            return item[start:stop]
        parts = [pick(x) if isinstance(x, (Tensor, list, tuple)) else _cut(x, start, stop, rows) for x in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)

    return apply_to_collection(value, (Tensor, list, tuple), pick)


def _holds_tensor(value: Any) -> bool:
    found: list[Tensor] = []
    apply_to_collection(value, Tensor, found.append)
    return bool(found)


def combine(outputs: Sequence[Any], rows: Sequence[int], shares: Sequence[float]) -> Any:
    """Put together what the pieces of one batch returned.

    Dicts and sequences are combined entry by entry; a tensor with the rows of its piece is concatenated, a floating
    0-dim tensor (or float) becomes the mean by shares, and None stays None. Anything else becomes the list of pieces.

    Args:
        outputs: One for each piece.
        rows: Rows of each piece.
        shares: Weight of each piece; they add up to 1.
    """
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if isinstance(first, Mapping):
        return {key: combine([o[key] for o in outputs], rows, shares) for key in first}
    if isinstance(first, Tensor):
        if first.ndim == 0 and first.is_floating_point():
            return weighted_mean(outputs, shares)
        if first.ndim and all(o.shape[0] == n for o, n in zip(outputs, rows, strict=True)):
            return torch.cat(list(outputs))
    if isinstance(first, float):
        return weighted_mean(outputs, shares)
    if isinstance(first, (list, tuple)):
        if not _holds_tensor(first) and all(len(o) == n for o, n in zip(outputs, rows, strict=True)):
            return type(first)(x for o in outputs for x in o)
        if not hasattr(first, "_fields") and all(len(o) == len(first) for o in outputs):
            return type(first)(combine(parts, rows, shares) for parts in zip(*outputs, strict=True))
    return list(outputs)


def weighted_mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """Return the mean of numbers or tensors by shares, which need not add up to 1; a share of 0 has no say, NaN or not.

    Raises:
        ValueError: All shares are 0.
    """
    counted = [(v, s) for v, s in zip(values, shares, strict=True) if s]
    if not counted:
        raise ValueError(f"A mean over shares {list(shares)} is not defined: at least one must be above 0.")
    total = sum(s for _, s in counted)
    first, *rest = (v * (s / total) for v, s in counted)
    return sum(rest, first)


@dataclass
class Splitter:
    """How batches are cut, and what part each piece has in a mean over the whole."""

    split: Callable[[Any, int], list[Any]] | None = None
    """(batch, size) -> pieces. None: `split_batch`."""
    weight: Callable[[Any], float] | None = None
    """What the mean is over, counted in a piece (tokens, say). None: rows."""

    def rows(self, batch: Any) -> int:
        """Return the number of rows of a batch."""
        return batch_rows(batch) if self.split is None else len(self.split(batch, 1))

    def pieces(self, batch: Any, size: int) -> tuple[list[Any], list[int], list[float]]:
        """Return the pieces of a batch, their rows, and their shares, which add up to 1.

        Args:
            batch: Any batch; as it is, if it has at most `size` rows.
            size: Largest number of rows of a piece, >= 1.

        Raises:
            ValueError: A piece that is too large, or weights that are negative, not finite, or all 0.
        """
        whole = self.rows(batch)
        if whole <= size:
            return [batch], [whole], [1.0]
        pieces, rows = self.cut(batch, size)
        return pieces, rows, self.shares(pieces, rows)

    def cut(self, batch: Any, size: int) -> tuple[list[Any], list[int]]:
        """Return pieces of at most `size` rows, and their rows.

        Raises:
            ValueError: A piece is larger.
        """
        pieces = list((self.split or split_batch)(batch, size))
        rows = [self.rows(piece) for piece in pieces]
        if not rows or max(rows) > size:
            raise ValueError(f"`split_batch` returned pieces of {rows} rows for size {size}: none may be larger.")
        return pieces, rows

    def shares(self, pieces: list[Any], rows: list[int]) -> list[float]:
        """Return the shares of pieces in the mean over all of them.

        Raises:
            ValueError: A weight that is negative or not finite, or weights that are all 0.
        """
        counts = [float(self.weight(p)) for p in pieces] if self.weight is not None else [float(n) for n in rows]
        total = sum(counts)
        if not all(0 <= c < float("inf") for c in counts) or total == 0:
            raise ValueError(f"`weight` returned {counts} for the pieces of a batch: they must be >= 0, and not all 0.")
        return [c / total for c in counts]
