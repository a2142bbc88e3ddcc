"""How a batch is cut into micro-batches."""

from __future__ import annotations

import sys


def by_sequences(count: int, size: int) -> list[list[int]]:
    """Cut rows 0 to count - 1, in order, into parts of at most `size`.

    Args:
        count: Rows.
        size: >= 1.
    """
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def by_tokens(lengths: list[int], budget: int) -> list[list[int]]:
    """Cut rows into parts of at most `budget` tokens, few and of about equal sums.

    A row longer than the budget is a part of its own. The cut depends on the lengths alone.

    Args:
        lengths: Tokens of each row.
        budget: Tokens of a part, >= 1.

    Returns:
        Row numbers, ascending within each part; the parts by their first rows.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    few = _fill(lengths, order, budget)
    even = _spread(lengths, order, len(few))
    fits = all(len(part) == 1 or sum(lengths[row] for row in part) <= budget for part in even)
    return sorted(sorted(part) for part in (even if fits else few))


def least_budget(lengths: list[int]) -> int:
    """Return the largest budget at which `by_tokens` leaves every row alone: a smaller one cuts no further.

    Args:
        lengths: Tokens of each row.
    """
    return sum(sorted(lengths)[:2]) - 1 if len(lengths) > 1 else sys.maxsize


def _fill(lengths: list[int], order: list[int], budget: int) -> list[list[int]]:
    """First fit, longest rows first."""
    parts: list[list[int]] = []
    sums: list[int] = []
    for row in order:
        place = next((i for i, total in enumerate(sums) if total + lengths[row] <= budget), None)
        if place is None:
            parts.append([row])
            sums.append(lengths[row])
        else:
            parts[place].append(row)
            sums[place] += lengths[row]
    return parts


def _spread(lengths: list[int], order: list[int], count: int) -> list[list[int]]:
    """Each row, longest first, to the part that has least."""
    parts: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for row in order:
        place = sums.index(min(sums))
        parts[place].append(row)
        sums[place] += lengths[row]
    return parts
