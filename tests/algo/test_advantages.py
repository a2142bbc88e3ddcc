import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_ppo.algo.advantages import estimate, gae, grpo, reinforce_pp, rloo, spread
from lit_ppo.algo.masked import whiten
from lit_ppo.algo.scan import discounted_sum
from lit_ppo.config import ADVANTAGES

F64 = torch.float64
REWARDS = torch.tensor([[0, 0, 1, 0], [0, 0, 0, -1]], dtype=F64)
VALUES = torch.tensor([[0.5, 0.4, 0.3, 9], [0.1, 0.2, 0.3, 0.4]], dtype=F64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def gae_loop(rewards, values, mask, gamma, lam, bootstrap=None):
    """The recurrence as it is written, token by token."""
    following = torch.zeros_like(rewards[:, 0]) if bootstrap is None else bootstrap
    advantage = torch.zeros_like(rewards[:, 0])
    out = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        on = mask[:, t].bool()
        x = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * advantage
        following = torch.where(on, values[:, t], following)
        advantage = torch.where(on, x, advantage)
        out[:, t] = torch.where(on, advantage, 0)
    return out


def test_gae_golden():
    advantages, returns = gae(REWARDS, VALUES, MASK, 1, 0.95)
    want = [[0.43675, 0.565, 0.7, 0], [-0.915075, -1.0685, -1.23, -1.4]]
    assert_close(advantages, torch.tensor(want, dtype=F64), atol=1e-12, rtol=0)
    want = [[0.93675, 0.965, 1, 0], [-0.815075, -0.8685, -0.93, -1]]
    assert_close(returns, torch.tensor(want, dtype=F64), atol=1e-12, rtol=0)


def test_gae_bridges_masked_spans_golden():
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    advantages, _ = gae(REWARDS, VALUES, mask, 0.99, 0.9)
    want = [[1.214581, 0, 1.591, -9], [-0.72964758, -0.9288974, -1.1514, -1.4]]
    assert_close(advantages, torch.tensor(want, dtype=F64), atol=5e-9, rtol=0)


def test_gae_bootstraps_from_the_value_at_the_cut():
    advantages, _ = gae(REWARDS, VALUES, MASK, 1, 1, torch.tensor([0.0, 2.0]))
    assert_close(advantages[1], -1 + 2 - VALUES[1])  # lam = 1: the whole return, the value at the cut included
    assert_close(advantages[0], gae(REWARDS, VALUES, MASK, 1, 1)[0][0])


@given(
    seed=st.integers(0, 2**31),
    width=st.integers(1, 40),
    gamma=st.sampled_from([0.0, 0.9, 1.0]) | st.floats(0, 1),
    lam=st.sampled_from([0.0, 0.95, 1.0]) | st.floats(0, 1),
    density=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    bootstrapped=st.booleans(),
)
def test_the_scan_equals_the_loop(seed, width, gamma, lam, density, bootstrapped):
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, width, generator=g, dtype=F64)
    mask = torch.rand(3, width, generator=g) <= density
    bootstrap = torch.randn(3, generator=g, dtype=F64) if bootstrapped else None
    want = gae_loop(rewards, values, mask, gamma, lam, bootstrap)
    advantages, returns = gae(rewards, values, mask, gamma, lam, bootstrap)
    assert_close(advantages, want)
    assert_close(returns, torch.where(mask, want + values, 0))
    want = gae_loop(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    assert_close(discounted_sum(rewards, mask, gamma), want)


def test_the_scan_is_accurate_in_float32_on_long_rows():
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 2, 4096, generator=g, dtype=F64)
    mask = torch.ones(2, 4096)
    for gamma, lam in ((1, 0.95), (1, 1), (0.999, 1)):
        got = gae(rewards.float(), values.float(), mask, gamma, lam)[0]
        assert got.dtype == torch.float32
        want = gae_loop(rewards, values, mask, gamma, lam)
        assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@given(st.integers(0, 2**31), st.sampled_from([math.nan, math.inf]))
def test_rows_are_independent_and_padding_does_not_matter(seed, garbage):
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 4, 6, generator=g, dtype=F64)
    mask = torch.rand(4, 6, generator=g) < 0.8
    advantages, returns = gae(rewards, values, mask, 0.99, 0.95)
    order = torch.randperm(4, generator=g)
    permuted = gae(rewards[order], values[order], mask[order], 0.99, 0.95)
    assert_close(permuted[0], advantages[order])
    pad = torch.full((4, 3), garbage, dtype=F64)
    wide_mask = torch.cat([mask, torch.zeros(4, 3, dtype=torch.bool)], 1)
    dirty = [torch.cat([x.masked_fill(~mask, garbage), pad], 1) for x in (rewards, values)]
    wide = gae(*dirty, wide_mask, 0.99, 0.95)
    assert_close(wide[0][:, :6], advantages)
    assert_close(wide[1][:, :6], returns)
    assert (wide[0][:, 6:] == 0).all()


def test_gae_changes_no_input():
    rewards, values = REWARDS.clone(), VALUES.clone()
    gae(rewards, values, torch.ones_like(MASK), 0.9, 0.9)
    assert torch.equal(rewards, REWARDS)
    assert torch.equal(values, VALUES)


def test_gae_refuses_a_bootstrap_of_another_shape():
    with pytest.raises(ValueError, match=r"`bootstrap` is \(2, 1\); it must hold one value per row: \(2,\)"):
        gae(REWARDS, VALUES, MASK, 1, 1, torch.zeros(2, 1))


SCORES = torch.tensor([1.0, 5.0, 2.0, 7.0, 3.0, -4.0], dtype=F64)
GROUPS = torch.tensor([7, -2, 7, -2, 7, 0])


def test_grpo():
    one, two = torch.tensor([1.0, 2, 3], dtype=F64), torch.tensor([5.0, 7], dtype=F64)
    want = torch.empty(6, dtype=F64)
    want[GROUPS == 7] = (one - 2) / (one.std() + 1e-6)
    want[GROUPS == -2] = (two - 6) / (two.std() + 1e-6)
    want[5] = -4  # a group of one
    assert_close(grpo(SCORES, GROUPS), want, rtol=1e-12, atol=0)
    assert_close(grpo(SCORES, GROUPS, scale=False), torch.tensor([-1.0, -1, 0, 1, 1, -4], dtype=F64))
    assert (grpo(torch.ones(4), torch.zeros(4)) == 0).all()  # equal scores teach nothing


def test_rloo_is_the_score_less_the_mean_of_the_others():
    want = [1 - 2.5, 5 - 7, 2 - 2.0, 7 - 5, 3 - 1.5, -4]
    assert_close(rloo(SCORES, GROUPS), torch.tensor(want, dtype=F64))


def test_groups_are_float32_whatever_the_default_dtype():
    """A training step in `bf16-true` has bfloat16 as its default, in which 4 / 3 is 0.2 % off."""
    scores, groups = torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.zeros(4, dtype=torch.long)
    exact = [f(scores, groups) for f in (grpo, rloo)]
    torch.set_default_dtype(torch.bfloat16)
    for f, want in zip((grpo, rloo), exact, strict=True):
        assert torch.equal(f(scores, groups), want)


@pytest.mark.parametrize("function", [grpo, rloo])
@given(seed=st.integers(0, 2**31))
def test_groups_do_not_depend_on_order_or_on_skipped_samples(function, seed):
    g = torch.Generator().manual_seed(seed)
    scores, groups = torch.randn(12, generator=g, dtype=F64), torch.randint(0, 4, (12,), generator=g)
    keep = torch.rand(12, generator=g) < 0.7
    order = torch.randperm(12, generator=g)
    assert_close(function(scores[order], groups[order]), function(scores, groups)[order])
    got = function(scores.masked_fill(~keep, math.nan), groups, keep=keep)
    assert_close(got[keep], function(scores[keep], groups[keep]))
    assert (got[~keep] == 0).all()


@pytest.mark.parametrize("function", [grpo, rloo])
def test_groups_of_another_shape_are_an_error(function):
    with pytest.raises(ValueError, match=r"`groups` is \(3,\) and `scores` is \(2,\): both must be \(B,\)"):
        function(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"`keep` is \(1,\) and `scores` is \(2,\)"):
        function(torch.zeros(2), torch.zeros(2), keep=torch.ones(1))


def test_spread():
    got = spread(torch.tensor([2.0, math.nan]), torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert got.tolist() == [[2, 2, 0], [0, 0, 0]]


def test_reinforce_pp_whitens_the_discounted_return(on_ranks):
    returns = torch.tensor([[0.25, 0.5, 1, 0], [-0.125, -0.25, -0.5, -1]], dtype=F64)
    want = whiten(returns, MASK)
    assert_close(reinforce_pp(REWARDS, MASK, 0.5), want)
    parts = on_ranks(lambda r, reduce: reinforce_pp(REWARDS[[r]], MASK[[r]], 0.5, reduce))
    assert_close(torch.cat(parts), want)


def test_estimate_knows_every_configured_estimator():
    groups = torch.tensor([0, 0])
    for name in ADVANTAGES:
        advantages, returns = estimate(name, REWARDS, MASK, values=VALUES, groups=groups, gamma=0.9)
        assert advantages.shape == MASK.shape
        assert (advantages[0, :3] > advantages[1, :3]).all()
        assert (returns is not None) == (name == "gae")


def test_estimate_whitens_gae_over_all_ranks_unless_told_not_to(on_ranks):
    raw, want_returns = gae(REWARDS, VALUES, MASK, 1, 0.95)
    advantages, returns = estimate("gae", REWARDS, MASK, values=VALUES)
    assert_close(advantages, whiten(raw, MASK))
    assert_close(returns, want_returns)
    assert_close(estimate("gae", REWARDS, MASK, values=VALUES, whiten_advantages=False)[0], raw)
    parts = on_ranks(lambda r, reduce: estimate("gae", REWARDS[[r]], MASK[[r]], values=VALUES[[r]], reduce=reduce)[0])
    assert_close(torch.cat(parts), advantages)
    cut = estimate("gae", REWARDS, MASK, values=VALUES, bootstrap=torch.ones(2), whiten_advantages=False)[0]
    assert_close(cut[:, 2][0], raw[:, 2][0] + 1)


def test_estimate_leaves_rows_without_tokens_out_of_their_group():
    rewards = torch.tensor([[1.0, 0], [3.0, 0], [math.nan, math.nan]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    advantages, _ = estimate("rloo", rewards, mask, groups=torch.zeros(3))
    assert advantages.tolist() == [[-2, -2], [2, 0], [0, 0]]
    advantages, _ = estimate("grpo", rewards, mask, groups=torch.zeros(3))
    assert_close(advantages, torch.tensor([[-1.0, -1], [1, 0], [0, 0]]) * 0.5**0.5)


def test_estimate_names_what_is_missing():
    with pytest.raises(ValueError, match="`name='vtrace'` is no advantage estimator: use one of gae, grpo"):
        estimate("vtrace", REWARDS, MASK)
    with pytest.raises(ValueError, match="`values` is missing"):
        estimate("gae", REWARDS, MASK)
    for name in ("grpo", "rloo"):
        with pytest.raises(ValueError, match=f"`groups` is missing: `name='{name}'`"):
            estimate(name, REWARDS, MASK)
