import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_ppo.algo.controllers import AdaptiveKL, FixedKL, RunningStd


def test_fixed_stays():
    controller = FixedKL(0.05)
    controller.update(100.0, 512)
    assert controller.value == 0.05
    controller.load_state_dict({"value": 7.0})  # of an adaptive run: the configuration wins
    assert controller.value == 0.05
    assert controller.state_dict() == {}


def test_adaptive_golden():
    controller = AdaptiveKL(0.001, 0.1, 1e4)
    values = []
    for kl in (0.05, 0.11, torch.tensor(0.5)):
        controller.update(kl, 256)
        values.append(controller.value)
    assert values == pytest.approx([0.00099488, 0.0009974268928, 0.0010025337185], rel=1e-7)


def test_adaptive_resumes():
    controller, fresh = AdaptiveKL(0.1, 6, 10_000), AdaptiveKL(0.2, 6, 10_000)
    controller.update(8, 512)
    fresh.load_state_dict(controller.state_dict())
    assert fresh.value == controller.value
    fresh.load_state_dict(FixedKL(0.3).state_dict())
    assert fresh.value == controller.value


@pytest.mark.parametrize("name", ["init", "target", "horizon"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_adaptive_refuses_what_cannot_adapt(name, value):
    with pytest.raises(ValueError, match=f"`{name}={value}` of the adaptive KL controller must be above 0"):
        AdaptiveKL(**{"init": 0.1, "target": 6, "horizon": 100, name: value})


def test_adaptive_refuses_a_kl_that_is_not_finite():
    controller = AdaptiveKL(0.1, 6, 100)
    with pytest.raises(ValueError, match="`kl=nan` is not finite"):
        controller.update(torch.tensor(math.nan), 4)
    assert controller.value == 0.1


@given(seed=st.integers(0, 2**31), offset=st.sampled_from([0.0, 1e6]), cuts=st.lists(st.integers(0, 20), max_size=4))
def test_running_std_of_parts_is_that_of_the_whole(seed, offset, cuts):
    x = torch.randn(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + offset
    running = RunningStd()
    edges = [0, *sorted(cuts), 20]
    for start, end in itertools.pairwise(edges):
        running.update(x[start:end])  # some are empty
    assert running.count == 20
    assert running.mean == pytest.approx(x.mean().item(), rel=1e-12, abs=1e-12)
    assert running.std == pytest.approx(x.std().item(), rel=1e-9)


def test_running_std_over_ranks(on_ranks):
    x = torch.arange(7.0).square()
    running = [RunningStd(), RunningStd()]

    def update(rank, reduce):
        running[rank].update(x[:1] if rank == 0 else x[1:4], reduce)
        running[rank].update(x[4:] if rank == 0 else x[:0], reduce)

    on_ranks(update)
    assert running[0].state_dict() == running[1].state_dict()
    assert running[0].std == pytest.approx(x.std().item())


def test_running_std_before_two_values_differ_is_one():
    running = RunningStd()
    assert running.std == 1
    running.update(torch.tensor([3.0]))
    running.update(torch.empty(0))
    assert running.std == 1
    running.update(torch.tensor([3.0, 3.0]))
    assert running.std == 1
    running.update(torch.tensor([5.0]))
    assert running.std == pytest.approx(1)  # 3, 3, 3, 5: a real one this time
    assert running.squares == pytest.approx(3)


def test_running_std_resumes():
    running, fresh = RunningStd(), RunningStd()
    running.update(torch.tensor([1.0, 4.0, 9.0]))
    fresh.load_state_dict(running.state_dict())
    for r in (running, fresh):
        r.update(torch.tensor([-2.0], dtype=torch.bfloat16))
    assert fresh.state_dict() == running.state_dict()
    assert all(type(value) is float for value in running.state_dict().values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_running_std_refuses_scores_that_are_not_finite(bad):
    running = RunningStd()
    running.update(torch.tensor([1.0, 2.0]))
    before = running.state_dict()
    with pytest.raises(ValueError, match="`x` holds NaN or infinity"):
        running.update(torch.tensor([1.0, bad]))
    assert running.state_dict() == before
