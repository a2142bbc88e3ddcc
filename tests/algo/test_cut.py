"""Cutting batches into micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lit_ppo.algo.cut import by_sequences, by_tokens, least_budget


def test_by_sequences_in_order():
    assert by_sequences(5, 2) == [[0, 1], [2, 3], [4]]
    assert by_sequences(2, 9) == [[0, 1]]
    assert by_sequences(0, 2) == []


def test_by_tokens_few_parts_of_about_equal_sums():
    assert by_tokens([4, 4, 4, 4], 8) == [[0, 2], [1, 3]]
    assert by_tokens([9, 1, 1, 1], 10) == [[0], [1, 2, 3]]
    assert by_tokens([30, 2, 2], 10) == [[0], [1, 2]]  # longer than the budget: a part of its own
    assert by_tokens([5, 3, 3, 3, 2, 2, 2], 10) == [[0, 3, 5], [1, 2, 4, 6]]
    assert by_tokens([], 10) == []


@given(lengths=st.lists(st.integers(1, 40), max_size=40), budget=st.integers(1, 60))
def test_every_row_is_in_one_part_within_the_budget(lengths, budget):
    parts = by_tokens(lengths, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    sums = [sum(lengths[row] for row in part) for part in parts]
    for part, total in zip(parts, sums, strict=True):
        assert part == sorted(part)
        assert total <= budget or len(part) == 1
    inside = [n for n in lengths if n <= budget]
    over = len(lengths) - len(inside)
    assert len(parts) - over <= 2 * -(-sum(inside) // budget)  # first fit is never far from the fewest
    assert parts == by_tokens(lengths, budget)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), budget=st.integers(1, 80))
def test_every_row_is_alone_up_to_the_least_budget_and_no_further(lengths, budget):
    alone = all(len(part) == 1 for part in by_tokens(lengths, budget))
    assert alone == (budget <= least_budget(lengths))
