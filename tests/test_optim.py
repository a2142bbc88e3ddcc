import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lit_ppo.config import OptimConfig
from lit_ppo.optim import MasterAdamW, master, schedule

LOW = [torch.bfloat16, torch.float16]


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def train(net, optimizer, steps, seed=0, dtype=None):
    """Give `net` the same pseudo-gradients in any precision: they depend on the seed alone."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in net.parameters():
            p.grad = (torch.randn(p.shape, generator=g) + 0.5).to(dtype or torch.bfloat16).to(p.dtype)
        optimizer.step()


def weights(net):
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_tiny_updates_survive_in_bfloat16(weight_decay):
    options = {"lr": 3e-6, "eps": 1e-5, "weight_decay": weight_decay}
    full, plain, ours = model(torch.bfloat16).float(), model(torch.bfloat16), model(torch.bfloat16)
    start = weights(full)
    assert torch.equal(start, weights(ours))
    optimizer = MasterAdamW(ours.parameters(), **options)
    train(full, torch.optim.AdamW(full.parameters(), **options), 200)
    train(plain, torch.optim.AdamW(plain.parameters(), **options), 200)
    train(ours, optimizer, 200)
    moved = (weights(full) - start).norm()
    assert moved > 1e-3
    assert (weights(plain) - start).norm() < 0.2 * moved  # the fault this class exists for
    masters = torch.cat([optimizer.state[p]["master"].double().flatten() for p in ours.parameters()])
    assert torch.equal(masters, weights(full))
    assert torch.equal(weights(ours), weights(full).float().bfloat16().double())


@pytest.mark.parametrize("dtype", LOW)
def test_masters_are_the_float32_run_bit_by_bit_and_weights_their_rounding(dtype):
    full, ours = model(dtype).float(), model(dtype)
    optimizer = MasterAdamW(ours.parameters(), lr=1e-2)
    train(full, torch.optim.AdamW(full.parameters(), lr=1e-2), 10, dtype=dtype)
    train(ours, optimizer, 10, dtype=dtype)
    for p, q in zip(ours.parameters(), full.parameters(), strict=True):
        assert p.dtype == dtype
        state = optimizer.state[p]
        assert torch.equal(state["master"], q)
        assert torch.equal(p, q.to(dtype))
        assert {state[k].dtype for k in ("step", "exp_avg", "exp_avg_sq", "master")} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_is_adamw_bit_by_bit(dtype):
    theirs, ours = model(dtype), model(dtype)
    options = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    reference, optimizer = torch.optim.AdamW(theirs.parameters(), **options), MasterAdamW(ours.parameters(), **options)
    train(theirs, reference, 7)
    train(ours, optimizer, 7)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == reference.state[q].keys()
        for name, value in reference.state[q].items():
            assert torch.equal(optimizer.state[p][name], value)
            assert optimizer.state[p][name].dtype == value.dtype


def test_chunks_change_nothing(monkeypatch):
    whole, cut = model(torch.bfloat16), model(torch.bfloat16)
    train(whole, MasterAdamW(whole.parameters(), lr=1e-2), 3)
    monkeypatch.setattr(master, "_CHUNK", 100)  # less than the first weight
    sizes = [[p.numel() for p in chunk] for chunk in master._chunks(cut.parameters())]
    assert sizes == [[128], [16, 64, 4]]
    train(cut, MasterAdamW(cut.parameters(), lr=1e-2), 3)
    assert torch.equal(weights(cut), weights(whole))


def groups(net):
    return [
        {"params": list(net[0].parameters()), "lr": 1e-2, "name": "actor"},
        {"params": list(net[2].parameters()), "weight_decay": 0.0, "betas": (0.5, 0.9), "eps": 1e-4},
    ]


def test_groups_have_their_own_options():
    theirs, ours = model(), model()
    train(theirs, torch.optim.AdamW(groups(theirs), lr=1e-3), 5)
    optimizer = MasterAdamW(groups(ours), lr=1e-3)
    train(ours, optimizer, 5)
    assert torch.equal(weights(ours), weights(theirs))
    assert optimizer.param_groups[0]["name"] == "actor"


def test_parameters_without_gradient_are_left_alone():
    net = model(torch.bfloat16)
    optimizer = MasterAdamW(net.parameters(), lr=1e-2)
    before = weights(net[0])
    for p in net[2].parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(weights(net[0]), before)
    assert set(optimizer.state) == set(net[2].parameters())


@pytest.mark.parametrize("via", ["memory", "disk", "deepcopy"])
@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_a_resumed_run_goes_on_bit_by_bit(tmp_path, dtype, via):
    whole, first = model(dtype), model(dtype)
    optimizer = MasterAdamW(groups(whole), lr=1e-4)
    train(whole, optimizer, 5)
    train(whole, optimizer, 5, seed=1)
    optimizer = MasterAdamW(groups(first), lr=1e-4)
    train(first, optimizer, 5)
    state = {"model": first.state_dict(), "optimizer": optimizer.state_dict()}
    if via == "disk":
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
    elif via == "deepcopy":
        state = copy.deepcopy(state)
    second = model(dtype)
    second.load_state_dict(state["model"])
    resumed = MasterAdamW(groups(second), lr=1.0)  # the saved learning rate counts
    resumed.load_state_dict(state["optimizer"])
    for p, q in zip(second.parameters(), first.parameters(), strict=True):
        for name, value in optimizer.state[q].items():
            assert torch.equal(resumed.state[p][name], value)
            assert resumed.state[p][name].dtype == value.dtype
            assert resumed.state[p][name].data_ptr() != value.data_ptr()
    train(second, resumed, 5, seed=1)
    assert torch.equal(weights(second), weights(whole))


def test_torch_alone_would_round_the_masters():
    """Why `load_state_dict` is overridden; if this fails, the override can go."""
    net = model(torch.bfloat16)
    optimizer = MasterAdamW(net.parameters(), lr=1e-4)
    train(net, optimizer, 1)
    torch.optim.Optimizer.load_state_dict(optimizer, optimizer.state_dict())
    assert {state["master"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_the_state_of_plain_adamw_loads():
    net = model(torch.bfloat16)
    plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, plain, 3)
    optimizer = MasterAdamW(net.parameters(), lr=1e-2)
    optimizer.load_state_dict(plain.state_dict())
    before = weights(net)
    train(net, optimizer, 1)
    for p in net.parameters():
        assert optimizer.state[p]["step"] == 4
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert_close(weights(net), before, atol=0.03, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_allocate_state_changes_nothing(dtype):
    lazy, eager = model(dtype), model(dtype)
    frozen = eager[0].bias
    optimizer = MasterAdamW(eager.parameters(), lr=1e-2)
    frozen.requires_grad_(False)
    before = weights(eager)
    optimizer.allocate_state()
    assert torch.equal(weights(eager), before)
    assert set(optimizer.state) == set(eager.parameters()) - {frozen}
    pointers = {t.data_ptr() for state in optimizer.state.values() for t in state.values()}
    frozen.requires_grad_(True)
    train(lazy, MasterAdamW(lazy.parameters(), lr=1e-2), 4)
    train(eager, optimizer, 4)
    assert torch.equal(weights(eager), weights(lazy))
    optimizer.allocate_state()
    assert pointers <= {t.data_ptr() for state in optimizer.state.values() for t in state.values()}


def test_the_step_counter_survives_a_low_default_dtype():
    net = model(torch.bfloat16)
    optimizer = MasterAdamW(net.parameters(), lr=1e-4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer.allocate_state()
    finally:
        torch.set_default_dtype(torch.float32)
    train(net, optimizer, 300)
    assert {state["step"].item() for state in optimizer.state.values()} == {300}  # bfloat16 counts to 256


def test_closure():
    net = model(torch.bfloat16)
    optimizer = MasterAdamW(net.parameters(), lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(2, 8, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        return loss.item()

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    assert optimizer.step() is None


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"lr": -1.0}, r"`lr=-1\.0` must be >= 0"),
        ({"eps": math.nan}, "`eps=nan` must be >= 0"),
        ({"weight_decay": -0.1}, r"`weight_decay=-0\.1` must be >= 0"),
        ({"betas": (0.9, 1.0)}, r"`betas=\(0\.9, 1\.0\)` must be at least 0 and below 1"),
    ],
)
def test_bad_values(option, message):
    net = model()
    with pytest.raises(ValueError, match=message):
        MasterAdamW(net.parameters(), **option)
    with pytest.raises(ValueError, match=message):
        MasterAdamW([{"params": list(net.parameters()), **option}])


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="takes no sparse gradients"):
        MasterAdamW(embedding.parameters()).step()


def factors(total, iterations, **options):
    optimizer = MasterAdamW(groups(model()), lr=2.0)
    scheduler = schedule(optimizer, OptimConfig(**options), total)
    rates = []
    for _ in range(iterations):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert all(actor == pytest.approx(1e-2 * critic / 2) for actor, critic in rates)
    return [critic / 2 for _, critic in rates]


@pytest.mark.parametrize("late", [False, True])
def test_schedules(late):
    def run(total, *args, **options):
        return factors((lambda: total) if late else total, *args, **options)

    assert run(4, 6) == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])
    half = math.sqrt(0.5) / 2
    assert run(4, 5, schedule="cosine") == pytest.approx([1, 0.5 + half, 0.5, 0.5 - half, 0])
    assert run(4, 6, schedule="constant") == [1] * 6
    assert run(4, 5, warmup_iterations=1) == pytest.approx([1 / 2, 1, 2 / 3, 1 / 3, 0])
    assert run(9, 4, warmup_iterations=3, schedule="constant") == pytest.approx([1 / 4, 1 / 2, 3 / 4, 1])


@pytest.mark.parametrize("total", [5, lambda: 5])
def test_a_warm_up_as_long_as_the_run_is_an_error(total):
    with pytest.raises(ValueError, match=r"`optim\.warmup_iterations=5` leaves nothing of the run's 5 iterations"):
        factors(total, 5, warmup_iterations=5)
