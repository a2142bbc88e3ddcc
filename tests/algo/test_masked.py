import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_ppo.algo.masked import clean, explained_variance, masked_mean, masked_sum, masked_var, upcast, whiten


def ragged(seed, batch=5, width=7):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, width, generator=g, dtype=torch.float64) * 3 + 1
    mask = torch.rand(batch, width, generator=g) < 0.7
    mask[0, :2] = True
    return x, mask


def test_upcast_keeps_float64_and_raises_the_rest_to_float32():
    assert upcast(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64):
        assert upcast(torch.zeros(1, dtype=dtype)).dtype == torch.float32


@given(st.integers(0, 2**31))
def test_reductions_equal_those_of_the_selected_values(seed):
    x, mask = ragged(seed)
    assert_close(masked_sum(x, mask), x[mask].sum())
    assert_close(masked_mean(x, mask), x[mask].mean())
    assert_close(masked_var(x, mask), x[mask].var())
    for row in range(len(x)):
        assert_close(masked_sum(x, mask, 1)[row], x[row][mask[row]].sum())
        if mask[row].any():
            assert_close(masked_mean(x, mask, 1)[row], x[row][mask[row]].mean())


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_any_kind_of_mask(kind):
    x, mask = ragged(0)
    assert_close(whiten(x, mask.to(kind)), whiten(x, mask))
    assert_close(masked_mean(x, mask.to(kind), 1), masked_mean(x, mask, 1))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_off_the_mask_reaches_neither_value_nor_gradient(garbage):
    x, mask = ragged(1)
    spoiled = torch.where(mask, x, torch.tensor(garbage, dtype=x.dtype)).requires_grad_()
    plain = x.clone().requires_grad_()
    for function in (masked_sum, masked_mean, masked_var, lambda a, m: whiten(a, m).pow(3).sum()):
        got, want = function(spoiled, mask), function(plain, mask)
        assert_close(got, want)
        assert_close(torch.autograd.grad(got, spoiled)[0], torch.autograd.grad(want, plain)[0])


def test_the_mean_of_nothing_is_zero_and_so_is_its_gradient():
    x = torch.full((2, 3), math.nan, requires_grad=True)
    mean = masked_mean(x, torch.zeros(2, 3), 1)
    mean.sum().backward()
    assert mean.tolist() == [0, 0]
    assert x.grad.tolist() == [[0] * 3] * 2


@given(st.integers(0, 2**31))
def test_whiten_has_mean_zero_and_variance_one_and_is_zero_off_the_mask(seed):
    x, mask = ragged(seed)
    white = whiten(x, mask)
    assert_close(white[mask].mean().item(), 0.0, atol=1e-12, rtol=0)
    assert_close(white[mask].var().item(), 1.0, atol=1e-6, rtol=0)
    assert (white[~mask] == 0).all()


def test_whiten_can_keep_the_mean():
    x, mask = ragged(2)
    white = whiten(x, mask, keep_mean=True)
    assert_close(white[mask].mean(), x[mask].mean())
    assert_close(white[mask].var().item(), 1.0, atol=1e-6, rtol=0)
    assert (white[~mask] == 0).all()


def test_whiten_golden():
    x = torch.tensor([[0.43675, 0.565, 0.7, 9], [-0.915075, -1.0685, -1.23, -1.4]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    want = [[0.91241128, 1.04963811, 1.19408740, 0], [-0.53403438, -0.69819833, -0.87100248, -1.05290159]]
    assert_close(whiten(x, mask), torch.tensor(want, dtype=torch.float64), atol=5e-9, rtol=0)


@given(seed=st.integers(0, 2**31), world=st.integers(2, 3))
def test_uneven_ranks_whiten_as_one(on_ranks, seed, world):
    x, mask = ragged(seed, batch=6)
    cuts = (
        [slice(0, 1), slice(1, 6)] if world == 2 else [slice(0, 1), slice(1, 1), slice(1, 6)]
    )  # one rank holds nothing
    parts = on_ranks(lambda rank, reduce: whiten(x[cuts[rank]], mask[cuts[rank]], reduce), world)
    assert_close(torch.cat(parts), whiten(x, mask))
    variances = on_ranks(lambda rank, reduce: masked_var(x[cuts[rank]], mask[cuts[rank]], reduce), world)
    assert_close(torch.stack(variances), masked_var(x, mask).expand(world))


def test_a_large_mean_does_not_cancel_the_variance_in_float32():
    x, mask = ragged(3)
    assert_close(masked_var((x + 30_000).float(), mask).double(), masked_var(x, mask), rtol=1e-3, atol=0)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("function", [whiten, masked_var])
def test_too_few_tokens_are_an_error(function, tokens):
    mask = torch.zeros(2, 3)
    mask[0, :tokens] = 1
    with pytest.raises(ValueError, match=f"at least 2 response tokens over all ranks and there is {tokens}"):
        function(torch.zeros(2, 3), mask)


def test_a_mask_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"`mask` is \(2,\) but what it masks is \(2, 3\)"):
        clean(torch.zeros(2, 3), torch.ones(2))


def test_explained_variance(on_ranks):
    returns, mask = ragged(4)
    noise, _ = ragged(5)
    values = returns + 0.3 * noise
    want = 1 - (returns - values)[mask].var() / returns[mask].var()
    assert_close(explained_variance(values, returns, mask), want)
    assert_close(explained_variance(returns, returns, mask).item(), 1.0)
    assert_close(explained_variance(torch.zeros_like(returns), returns, mask).item(), 0.0)
    spoiled = torch.where(mask, values, math.nan)
    parts = on_ranks(lambda r, reduce: explained_variance(spoiled[r::2], returns[r::2], mask[r::2], reduce))
    assert_close(torch.stack(parts), want.expand(2))
    assert explained_variance(values, torch.ones_like(values), mask).isnan()
