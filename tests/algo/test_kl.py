import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_ppo.algo.kl import kl_estimate
from lit_ppo.config import KL_ESTIMATORS

F64 = torch.float64
LOGP = torch.tensor([-1, -0.5, -4], dtype=F64)
REF = torch.tensor([-1.5, -0.2, -1], dtype=F64)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("k1", [0.5, -0.3, -3]),
        ("abs", [0.5, 0.3, 3]),
        ("k2", [0.125, 0.045, 4.5]),
        ("k3", [0.10653066, 0.04985881, 10]),
    ],
)
def test_golden(kind, want):
    assert_close(kl_estimate(LOGP, REF, kind), torch.tensor(want, dtype=F64), atol=5e-9, rtol=0)
    assert_close(kl_estimate(LOGP, REF, kind + "+"), torch.tensor(want, dtype=F64), atol=5e-9, rtol=0)


def gradient(kind, logp=LOGP):
    logp = logp.clone().requires_grad_()
    return torch.autograd.grad(kl_estimate(logp, REF, kind).sum(), logp)[0]


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_a_plus_takes_the_gradient_of_k2(kind):
    assert_close(gradient(kind + "+"), LOGP - REF)


def test_gradients_of_the_plain_estimators():
    d = LOGP - REF
    assert_close(gradient("k1"), torch.ones(3, dtype=F64))
    assert_close(gradient("abs"), d.sign())
    assert_close(gradient("k2"), d)
    assert_close(gradient("k3"), torch.where(d > -2.5, 1 - torch.exp(-d), 0))  # clamped at 10: no gradient


@given(st.integers(0, 2**31))
def test_they_estimate_the_kl_and_its_gradient(seed):
    """Exact expectations over a small vocabulary, no sampling."""
    g = torch.Generator().manual_seed(seed)
    ref = torch.randn(5, generator=g, dtype=F64).log_softmax(0)
    logits = torch.randn(5, generator=g, dtype=F64).requires_grad_()
    logp = logits.log_softmax(0)
    p = logp.exp().detach()
    kl = (logp.exp() * (logp - ref)).sum()
    for kind in ("k1", "k3"):
        if (ref - logp).max() < 2:  # where k3 is not clamped
            assert_close((p * kl_estimate(logp, ref, kind)).sum().detach(), kl.detach())
    want = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    for kind in ("k2", "k1+", "k3+", "abs+"):
        got = torch.autograd.grad((p * kl_estimate(logp, ref, kind)).sum(), logits, retain_graph=True)[0]
        assert_close(got, want)
    got = torch.autograd.grad((p * kl_estimate(logp, ref, "k1")).sum(), logits)[0]
    assert_close(got, torch.zeros_like(got), atol=1e-12, rtol=0)  # why k1 is no loss


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_extremes_stay_finite(kind):
    logp = torch.tensor([-1e4, 0.0, -3.0], requires_grad=True)
    kl = kl_estimate(logp, torch.tensor([0.0, -1e4, -3.0]), kind)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert logp.grad.isfinite().all()
    assert kl[2] == 0


def test_k3_is_accurate_for_small_differences_in_float32():
    d = torch.tensor([1e-3, -1e-4])
    assert_close(kl_estimate(d, torch.zeros(2), "k3"), d.square() / 2, rtol=1e-3, atol=0)


def test_low_precision_is_computed_in_float32():
    got = kl_estimate(torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-1.001]), "k1")
    assert got.dtype == torch.float32
    assert_close(got, torch.tensor([0.001]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
@pytest.mark.parametrize("garbage", [math.nan, -math.inf])
def test_the_mask_keeps_garbage_out(kind, garbage):
    logp = torch.tensor([-1.0, garbage], requires_grad=True)
    kl = kl_estimate(logp, torch.tensor([-2.0, garbage]), kind, torch.tensor([1, 0]))
    kl.sum().backward()
    assert kl[1] == 0
    assert logp.grad[1] == 0
    assert_close(kl[:1], kl_estimate(torch.tensor([-1.0]), torch.tensor([-2.0]), kind))


def test_errors():
    with pytest.raises(ValueError, match="`kind='k4'` is no KL estimator: use k1, abs, k2, k3"):
        kl_estimate(LOGP, REF, "k4")
    with pytest.raises(ValueError, match=r"`logp` is \(3,\) but `ref` is \(2,\)"):
        kl_estimate(LOGP, REF[:2], "k1")
