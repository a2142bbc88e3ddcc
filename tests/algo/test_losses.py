import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_ppo.algo.losses import aggregate, entropy, policy_loss, value_loss
from lit_ppo.config import AGGREGATIONS

F64 = torch.float64
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
OLD = torch.tensor([[-1, -2, -0.5, -3], [-0.7, -0.2, -1.5, -2]], dtype=F64)
NEW = torch.tensor([[-0.6, -2.5, -0.5, 0], [-0.5, -1.9, 0, -3.5]], dtype=F64)
ADVANTAGES = torch.tensor([[1, -1, 0.5, 7], [-2, 1, -1, -0.5]], dtype=F64)
VALUES = torch.tensor([[0.5, 0.4, 0.3, 9], [0.1, 0.2, 0.3, 0.4]], dtype=F64)
RETURNS = torch.tensor([[0.93675, 0.965, 1, 0], [-0.815075, -0.8685, -0.93, -1]], dtype=F64)
PREDICTED = torch.tensor([[1.2, 0.4, -0.5, 0], [0.1, 0.9, 0.3, -1]], dtype=F64)


def means(stats):
    return {name: (total / stats["tokens"]).item() for name, total in stats.items()}


def near(x):
    return pytest.approx(x, abs=5e-9)


def test_policy_golden():
    loss, stats = policy_loss(NEW, OLD, ADVANTAGES, MASK, 0.2, 0.2, 3)
    want = torch.tensor([[-1.2, 0.8, -0.5, 0], [2.44280552, -0.18268352, 3, 0.4]], dtype=F64)
    assert_close(loss, want, atol=5e-9, rtol=0)
    assert stats["tokens"] == 7
    got = means(stats)
    assert got["clipfrac"] == near(0.42857143)
    assert got["dual_clipfrac"] == near(0.14285714)
    assert got["approxkl_k1"] == near(0.22857143)
    d = (NEW - OLD)[MASK.bool()]
    assert got["approxkl"] == near(d.square().mean().item() / 2)
    assert got["ratio"] == near(d.exp().mean().item())
    assert got["ratio_sq"] == near(d.exp().square().mean().item())


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token_mean", 0.68001743),
        ("token_sum", 4.76012199),
        ("seq_mean_token_sum", 2.38006100),
        ("seq_mean_token_sum_norm", 0.59501525),
        ("seq_mean_token_mean", 0.55751525),
    ],
)
def test_aggregate_golden(mode, want):
    loss, _ = policy_loss(NEW, OLD, ADVANTAGES, MASK, 0.2, 0.2, 3)
    assert aggregate(loss, MASK, mode, width=4).item() == near(want)


def test_value_golden():
    loss, stats = value_loss(PREDICTED, VALUES, RETURNS, MASK, 0.5)
    assert aggregate(loss, MASK, "token_mean").item() == near(0.63759858)
    assert means(stats)["clipfrac"] == near(0.14285714)


def test_value_without_clip_is_half_the_squared_error():
    loss, stats = value_loss(PREDICTED, VALUES, RETURNS, MASK, None)
    assert_close(loss, torch.where(MASK.bool(), (PREDICTED - RETURNS).square() / 2, 0))
    assert stats["clipfrac"] == 0


def test_the_first_step_is_the_policy_gradient():
    logp = OLD.clone().requires_grad_()
    loss, stats = policy_loss(logp, OLD, ADVANTAGES, MASK, 0.2, 0.2)
    aggregate(loss, MASK, "token_sum").backward()
    assert_close(logp.grad, torch.where(MASK.bool(), -ADVANTAGES, 0))
    assert means(stats)["ratio"] == 1
    assert stats["clipfrac"] == stats["dual_clipfrac"] == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"), [(1.25, 1, True), (1.35, 1, False), (0.75, -1, False), (0.85, -1, True)]
)
def test_clip_higher_moves_the_upper_bound_alone(ratio, advantage, moves):
    logp = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
    advantages = torch.tensor([[advantage]], dtype=F64)
    loss, stats = policy_loss(logp, torch.zeros_like(logp), advantages, torch.ones(1, 1), 0.2, 0.3)
    loss.sum().backward()
    assert (logp.grad.item() != 0) == moves
    assert (stats["clipfrac"] == 0) == moves


def test_dual_clip_bounds_the_loss_and_stops_its_gradient():
    logp = torch.tensor([[2.0, 2.0]], requires_grad=True)
    advantages = torch.tensor([[-1.0, 1.0]])
    loss, stats = policy_loss(logp, torch.zeros(1, 2), advantages, torch.ones(1, 2), 0.2, 0.2, 3)
    loss.sum().backward()
    assert_close(loss.detach(), torch.tensor([[3.0, -1.2]]))
    assert logp.grad.tolist() == [[0, 0]]
    assert stats["dual_clipfrac"] == 1
    loss, stats = policy_loss(logp, torch.zeros(1, 2), advantages, torch.ones(1, 2), 0.2, 0.2)
    assert loss[0, 0] > 7
    assert stats["dual_clipfrac"] == 0


def test_dual_clip_must_exceed_one():
    with pytest.raises(ValueError, match=r"`dual_clip=1\.0` must be above 1"):
        policy_loss(NEW, OLD, ADVANTAGES, MASK, 0.2, 0.2, 1.0)


def test_extreme_ratios_stay_finite():
    logp = torch.tensor([[0.0, -1e4]], requires_grad=True)
    loss, stats = policy_loss(
        logp, torch.tensor([[-1e4, 0.0]]), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2), 0.2, 0.2
    )
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logp.grad.isfinite().all()
    assert all(total.isfinite() for total in stats.values())


def test_gradcheck():
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(3, 5, generator=g) < 0.7
    tensors = torch.randn(6, 3, 5, generator=g, dtype=F64)
    logp, values = (x.clone().requires_grad_() for x in tensors[:2])
    for mode in AGGREGATIONS:

        def policy(x, mode=mode):
            return aggregate(policy_loss(x, tensors[2], tensors[3], mask, 0.2, 0.3, 3)[0], mask, mode, width=9)

        def value(x, mode=mode):
            return aggregate(value_loss(x, tensors[4], tensors[5], mask, 0.4)[0], mask, mode, width=9)

        assert torch.autograd.gradcheck(policy, logp)
        assert torch.autograd.gradcheck(value, values)
    assert torch.autograd.gradcheck(entropy, torch.randn(2, 4, generator=g, dtype=F64).requires_grad_())


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 6))
def test_micro_batches_sum_to_the_whole(mode, seed, size):
    """Loss, gradient and statistics do not depend on how a minibatch is cut, trimmed or ordered."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (6,), generator=g)
    lengths[0] = 7
    mask = torch.arange(7) < lengths[:, None]
    new, old, advantages, values, old_values, returns = torch.randn(6, 6, 7, generator=g, dtype=F64)
    new, values = new.requires_grad_(), values.requires_grad_()

    def total(rows, width):
        m = mask[rows, :width]
        cut = [x[rows, :width] for x in (new, old, advantages, values, old_values, returns)]
        policy, policy_stats = policy_loss(*cut[:3], m, 0.2, 0.3, 3)
        value, value_stats = value_loss(*cut[3:], m, 0.4)
        totals = {"tokens": mask.sum(), "sequences": mask.any(1).sum(), "width": 9}
        loss = aggregate(policy, m, mode, **totals) + 0.1 * aggregate(value, m, mode, **totals)
        return loss, torch.stack([*policy_stats.values(), *value_stats.values()])

    whole, whole_stats = total(torch.arange(6), 7)
    m = mask
    by_default = aggregate(policy_loss(new, old, advantages, m, 0.2, 0.3, 3)[0], m, mode, width=9)
    by_default = by_default + 0.1 * aggregate(value_loss(values, old_values, returns, m, 0.4)[0], m, mode, width=9)
    assert_close(by_default, whole)
    parts = [total(rows, int(lengths[rows].max())) for rows in torch.randperm(6, generator=g).split(size)]
    loss = sum(part for part, _ in parts)
    assert_close(loss, whole)
    assert_close(sum(stats for _, stats in parts), whole_stats)
    want = torch.autograd.grad(whole, (new, values))
    for got, expected in zip(torch.autograd.grad(loss, (new, values)), want, strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_off_the_mask_reaches_nothing(mode, garbage):
    def run(spoil):
        tensors = [x.masked_fill(MASK == 0, garbage) if spoil else x for x in (NEW, OLD, ADVANTAGES)]
        more = [x.masked_fill(MASK == 0, garbage) if spoil else x for x in (PREDICTED, VALUES, RETURNS)]
        tensors[0], more[0] = tensors[0].clone().requires_grad_(), more[0].clone().requires_grad_()
        policy, policy_stats = policy_loss(*tensors, MASK, 0.2, 0.2, 3)
        value, value_stats = value_loss(*more, MASK, 0.5)
        loss = aggregate(policy, MASK, mode, width=4) + aggregate(value, MASK, mode, width=4)
        stats = torch.stack([*policy_stats.values(), *value_stats.values()])
        return loss, policy, value, stats, *torch.autograd.grad(loss, (tensors[0], more[0]))

    for got, want in zip(run(True), run(False), strict=True):
        assert_close(got, want)


def test_low_precision_is_computed_in_float32():
    loss, stats = policy_loss(NEW.bfloat16(), OLD.float(), ADVANTAGES.half(), MASK, 0.2, 0.2)
    assert loss.dtype == torch.float32
    assert {x.dtype for x in stats.values()} == {torch.float32}
    assert value_loss(PREDICTED.bfloat16(), VALUES, RETURNS.float(), MASK, 0.5)[0].dtype == torch.float64
    logits = torch.tensor([2, 1, 0, -1], dtype=torch.bfloat16)
    assert_close(entropy(logits), torch.tensor(0.94753696))


def test_rows_without_tokens_are_no_sequences():
    loss, mask = torch.ones(3, 2), torch.tensor([[1, 1], [1, 0], [0, 0]])
    assert aggregate(loss, mask, "seq_mean_token_sum") == 1.5
    assert aggregate(loss, mask, "seq_mean_token_mean") == 1
    for mode in AGGREGATIONS:
        for totals in ({}, {"tokens": 0, "sequences": 0}, {"tokens": torch.tensor(0), "sequences": torch.tensor(0)}):
            assert aggregate(loss, torch.zeros(3, 2), mode, width=2, **totals) == 0


def test_aggregate_errors():
    with pytest.raises(ValueError, match="`mode='mean'` is no aggregation: use one of token_mean"):
        aggregate(OLD, MASK, "mean")
    with pytest.raises(ValueError, match="`width=None` must be the configured `max_new_tokens`"):
        aggregate(OLD, MASK, "seq_mean_token_sum_norm")


def test_entropy():
    assert entropy(torch.tensor([2, 1, 0, -1], dtype=F64)).item() == near(0.94753696)
    assert entropy(torch.zeros(2, 3, 8)).allclose(torch.tensor(8.0).log())


def test_suppressed_tokens_have_no_part_in_the_entropy():
    logits = torch.tensor([2, 1, -math.inf, 0, -1], dtype=F64, requires_grad=True)
    h = entropy(logits)
    h.backward()
    assert h.item() == near(0.94753696)
    assert logits.grad[2] == 0
    assert logits.grad.isfinite().all()
    one = torch.tensor([3.0, -math.inf, -math.inf], requires_grad=True)
    entropy(one).backward()
    assert entropy(one) == 0
    assert one.grad.tolist() == [0, 0, 0]
