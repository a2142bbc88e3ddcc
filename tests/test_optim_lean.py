"""8-bit moments, stochastic rounding and paged state: against float32, against the kernel, and resumed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from lit_ppo import OptimConfig, PPOLightningModule
from lit_ppo.checks import check_optimizer
from lit_ppo.optim import LeanAdamW, MasterAdamW, build_optimizer, codes, lean, state_bytes

KINDS = [("8bit", "stochastic"), ("8bit", "master"), ("float32", "stochastic"), ("float32", "master")]
OPTIONS = {"lr": 3e-6, "eps": 1e-5, "weight_decay": 0.1}


def matrix(dtype=torch.bfloat16, rows=64, cols=300):
    torch.manual_seed(0)
    return nn.Linear(cols, rows).to(dtype)


def train(net, optimizer, steps, seed=0):
    """The same pseudo-gradients in any precision: of one sign on average, and from 1 to 1e-3 by column."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in net.parameters():
            spread = torch.logspace(0, -3, p.shape[-1])
            p.grad = ((torch.randn(p.shape, generator=g) + 0.5) * spread).to(torch.bfloat16).to(p.dtype)
        optimizer.step()


def flat(net):
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


@pytest.mark.parametrize(("state", "rounding"), KINDS)
def test_200_tiny_steps_go_where_float32_goes(state, rounding):
    exact, ours, plain = matrix().float(), matrix(), matrix()
    start = flat(exact)
    optimizer = LeanAdamW(ours.parameters(), **OPTIONS, state=state, rounding=rounding)
    train(exact, torch.optim.AdamW(exact.parameters(), **OPTIONS), 200)
    train(ours, optimizer, 200)
    train(plain, torch.optim.AdamW(plain.parameters(), **OPTIONS), 200)
    held = flat(ours)
    if rounding == "master":
        held = torch.cat([optimizer.state[p]["master"].double().flatten() for p in ours.parameters()])
        assert torch.equal(flat(ours), held.float().bfloat16().double())
    way, went, stuck = flat(exact) - start, held - start, flat(plain) - start
    assert 0.98 < (went @ way) / (way @ way) < 1.02  # rounding by chance leaves noise in each weight: in the mean
    if rounding == "master":
        assert (went - way).norm() < (0.08 if state == "8bit" else 1e-5) * way.norm()
    assert (stuck @ way) / (way @ way) < 0.4  # what plain bfloat16 makes of it


@pytest.mark.parametrize("eight", ["8bit", "float32"])
def test_moments_follow_the_exact_ones_in_the_mean(eight):
    """After 1500 steps, more than the memory of the second moment: rounding to the nearest would hold it still."""
    exact, ours = matrix(torch.float32, rows=16), matrix(torch.float32, rows=16)
    optimizers = [
        torch.optim.AdamW(exact.parameters(), **OPTIONS),
        LeanAdamW(ours.parameters(), **OPTIONS, state=eight),
    ]
    for net, optimizer in zip((exact, ours), optimizers, strict=True):
        train(net, optimizer, 1500)
    theirs = optimizers[0].state[exact.weight]
    mine = codes.decoded(optimizers[1].state[ours.weight])
    for name in ("exp_avg", "exp_avg_sq"):
        a, b = (x.unflatten(1, (6, 50)).movedim(1, 0).flatten(1) for x in (mine[name], theirs[name]))
        share = (a * b).sum(1) / b.square().sum(1)  # by columns of like size: from 1 to 1e-3
        assert_close(share, torch.ones_like(share), rtol=0, atol=0.04)
        assert ((a - b).norm(dim=1) / b.norm(dim=1)).max() < 0.35
    way = flat(exact) - flat(matrix(torch.float32, rows=16))
    assert (flat(ours) - flat(exact)).norm() < 0.08 * way.norm()


@given(st.integers(0, 2**31 - 1), st.sampled_from([1, 7, 255, 256, 257, 700]), st.floats(-30, 30))
def test_codes(seed, cols, size):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, cols, generator=g) * torch.randn(cols, generator=g).mul(4).exp() * 10**size
    x[0, 0] = 0
    noise = torch.rand(3, cols, generator=g)
    for encode, decode, value, first in (
        (codes.encode_first, codes.decode_first, x, True),
        (codes.encode_second, codes.decode_second, x.abs(), False),
    ):
        stored, scales = encode(value, noise)
        assert stored.dtype == (torch.int8 if first else torch.uint8)
        assert scales.shape == codes.scale_shape(x.shape)
        back = decode(stored, scales)
        assert back[0, 0] == 0
        assert bool((back * value >= 0).all())
        largest = codes._spread(scales, x)
        assert torch.equal(codes._largest(value), scales)
        ratio = value.abs().double() / largest.clamp(min=1e-38)
        # the distance of neighbouring codes: the derivative of a power, with a little for its curvature
        step = (
            4 * ratio**0.75 / 127 + 2e-3 * ratio**0.5 + 3e-8
            if first
            else 8 * ratio ** (7 / 8) / 255 * 1.2 + 1e-3 * ratio**0.75 + 1e-6 * ratio**0.5 + 1e-12
        )
        assert bool(((back - value).abs() <= largest * step * 1.05 + 1e-37).all())
        again, same = encode(back, noise)  # what is on a code stays there, but for rounding in its root
        assert_close(decode(again, same), back, rtol=0.2, atol=0)


def test_codes_are_right_in_the_mean():
    x = torch.tensor([1.0, 0.37, 0.011, 1e-3, 3e-5, 0.0]).expand(20_000, 6)
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    for encode, decode in ((codes.encode_first, codes.decode_first), (codes.encode_second, codes.decode_second)):
        mean = decode(*encode(x, noise)).mean(0)
        assert_close(mean, x[0], rtol=4e-3, atol=0)


def test_stochastic_rounding_is_right_in_the_mean_and_never_further_than_a_neighbour():
    x = torch.tensor([1.001, -0.3333, 1e-20, 0.0, 3.0, -65504.3]).expand(50_000, 6).contiguous()
    bits, _ = codes.noise_bits((123, 456), 0, x.shape, x.device)
    rounded = codes.round_stochastically(x, bits)
    assert rounded.dtype == torch.bfloat16
    assert_close(rounded.float().mean(0), x[0], rtol=1e-4, atol=0)
    assert bool(((rounded.float() - x).abs() <= x.abs() * 2**-7).all())
    assert set(rounded[:, 4].tolist()) == {3.0}  # what bfloat16 can hold stays


def test_noise_depends_on_the_place_alone_and_is_uniform():
    key = codes.noise_key(1, 2, 3)
    whole, more = codes.noise_bits(key, 0, torch.Size((40, 1000)), torch.device("cpu"))
    rows, more_rows = codes.noise_bits(key, 7 * 1000, torch.Size((5, 1000)), torch.device("cpu"))
    assert torch.equal(whole[7:12], rows)
    assert torch.equal(more[7:12], more_rows)
    assert codes.noise_key(1, 3, 3) != key
    for bits in (whole, more):
        assert int(bits.min()) >= 0
        for shift in (0, 8, 16, 24):
            counts = torch.bincount((bits >> shift & 255).flatten(), minlength=256).double()
            assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 340  # chi squared, 255 degrees of freedom
    pair = torch.corrcoef(torch.stack([whole.flatten().double(), more.flatten().double()]))[0, 1]
    assert abs(pair) < 0.02


@pytest.mark.parametrize(("state", "rounding"), KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_resumed_run_goes_on_bit_by_bit(tmp_path, state, rounding, dtype):
    def make(net):
        return LeanAdamW(net.parameters(), **OPTIONS | {"lr": 1e-3}, state=state, rounding=rounding, seed=3)

    whole = matrix(dtype)
    optimizer = make(whole)
    train(whole, optimizer, 4)
    torch.save({"net": whole.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    train(whole, optimizer, 4, seed=1)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    second = matrix(dtype)
    second.load_state_dict(saved["net"])
    resumed = make(second)
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, 4, seed=1)
    assert torch.equal(flat(second), flat(whole))
    for p, q in zip(second.parameters(), whole.parameters(), strict=True):
        assert resumed.state[p].keys() == optimizer.state[q].keys()
        for name, value in optimizer.state[q].items():
            assert resumed.state[p][name].dtype == value.dtype
            assert torch.equal(resumed.state[p][name], value)


def test_state_is_as_small_as_promised():
    net = matrix(rows=512, cols=512)
    optimizer = LeanAdamW([net.weight], **OPTIONS)
    optimizer.allocate_state()
    held = {n: v.nbytes for n, v in optimizer.state[net.weight].items() if n != "step"}
    assert sum(held.values()) / net.weight.numel() == 2 + 8 / 256
    assert {n: v.dtype for n, v in optimizer.state[net.weight].items()} == {
        "step": torch.float32,
        "exp_avg": torch.int8,
        "exp_avg_scale": torch.float32,
        "exp_avg_sq": torch.uint8,
        "exp_avg_sq_scale": torch.float32,
    }
    vector = LeanAdamW([net.bias], **OPTIONS)
    vector.allocate_state()
    assert vector.state[net.bias]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(("state", "rounding"), KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bytes_are_known_in_advance(state, rounding, dtype):
    net = matrix(dtype)
    optimizer = build_optimizer([{"params": list(net.parameters())}], OptimConfig(state=state, rounding=rounding))
    optimizer.allocate_state()
    for p in net.parameters():
        held = sum(v.nbytes for n, v in optimizer.state[p].items() if n != "step")
        assert held == state_bytes(p, OptimConfig(state=state, rounding=rounding))


def test_a_trainer_does_not_find_paged_state_to_move():
    net = matrix()
    optimizer = LeanAdamW(net.parameters(), **OPTIONS, paged=True)
    train(net, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = LeanAdamW(net.parameters(), **OPTIONS, paged=True)
    resumed.load_state_dict(saved)
    assert not resumed.state
    again = resumed.state_dict()["state"]
    for key, state in saved["state"].items():
        assert all(torch.equal(again[key][name], value) for name, value in state.items())
    resumed.load_state_dict(saved)
    train(net, resumed, 1)
    assert resumed.state[net.weight]["step"] == 3


def test_a_copy_goes_on_as_the_original_does():
    weight = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    one = LeanAdamW([weight], lr=1e-2)
    weight.grad = torch.randn_like(weight)
    one.step()
    other = copy.deepcopy(one)
    twin = other.param_groups[0]["params"][0]
    assert twin is not weight
    twin.grad = weight.grad.clone()
    for optimizer in (one, other):
        optimizer.step()
    assert torch.equal(weight, twin)


def test_states_of_other_kinds_load():
    for first in (MasterAdamW, *(lambda p, k=k, **o: LeanAdamW(p, state=k[0], rounding=k[1], **o) for k in KINDS)):
        net = matrix()
        before = first(net.parameters(), **OPTIONS)
        train(net, before, 5)
        for state, rounding in KINDS:
            after = LeanAdamW(net.parameters(), **OPTIONS, state=state, rounding=rounding)
            after.load_state_dict(before.state_dict())
            assert after.state[net.weight]["step"] == 5
            mine, theirs = codes.decoded(after.state[net.weight]), codes.decoded(before.state[net.weight])
            for name, value in theirs.items():
                assert (mine[name] - value).norm() < 0.02 * value.norm()
            if "master" in after.state[net.weight] and "master" in before.state[net.weight]:
                assert torch.equal(after.state[net.weight]["master"], before.state[net.weight]["master"])
        back = MasterAdamW(net.parameters(), **OPTIONS)
        back.load_state_dict(before.state_dict())
        assert back.state[net.weight].keys() == {"step", "exp_avg", "exp_avg_sq"} | (
            {"master"} & before.state[net.weight].keys()
        )
        assert_close(codes.decoded(back.state[net.weight]), codes.decoded(before.state[net.weight]))


@pytest.mark.parametrize(("state", "rounding"), KINDS)
@pytest.mark.parametrize("cols", [300, 16, 256])
def test_pieces_and_pages_change_nothing(monkeypatch, state, rounding, cols):
    nets = [matrix(cols=cols, rows=300) for _ in range(3)]
    train(nets[0], LeanAdamW(nets[0].parameters(), lr=1e-3, state=state, rounding=rounding), 3)
    monkeypatch.setattr(lean, "PIECE", 5000)
    train(nets[1], LeanAdamW(nets[1].parameters(), lr=1e-3, state=state, rounding=rounding), 3)
    train(nets[2], LeanAdamW(nets[2].parameters(), lr=1e-3, state=state, rounding=rounding, paged=True), 3)
    assert torch.equal(flat(nets[1]), flat(nets[0]))
    assert torch.equal(flat(nets[2]), flat(nets[0]))


@pytest.mark.parametrize(("state", "rounding"), KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(17, 300), (5,), (2, 3, 257)])
def test_the_kernel_is_its_twin(state, rounding, dtype, shape):
    pytest.importorskip("triton")
    from lit_ppo.optim import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    param = torch.randn(shape, generator=g).to(device=device, dtype=dtype)
    held = LeanAdamW([nn.Parameter(param.clone())], state=state, rounding=rounding)
    before, lean.SMALLEST = lean.SMALLEST, 0
    held.allocate_state()
    lean.SMALLEST = before
    ours = {n: v for n, v in held.state[held.param_groups[0]["params"][0]].items() if n != "step"}
    theirs = {n: v.clone() for n, v in ours.items()}
    p, q = param.clone(), param.clone()
    for step in range(1, 5):
        grad = (torch.randn(shape, generator=g) * 1e-3).to(device=device, dtype=dtype)
        options = {
            "keep": 0.999,
            "betas": (0.9, 0.999),
            "step_size": 3e-4 / (1 - 0.9**step),
            "root": (1 - 0.999**step) ** 0.5,
            "eps": 1e-5,
            "stochastic": rounding == "stochastic" and dtype == torch.bfloat16,
        }
        key = codes.noise_key(5, step, 1)
        kernels.step(p, grad, ours, key, 70_000, **options)
        lean.update(q, grad, theirs, key, 70_000, **options)
        for name, value in theirs.items():
            if value.dtype in (torch.int8, torch.uint8):  # the last bit of a root may choose the other code
                assert (ours[name].int() - value.int()).abs().max() <= 1
                assert (ours[name] != value).float().mean() < 0.02
            else:
                assert_close(ours[name], value, rtol=1e-4, atol=1e-9)
        if dtype == torch.bfloat16 and rounding == "master" and device == "cpu":
            assert_close(p.float(), q.float(), rtol=2**-7, atol=0)
            p.copy_(q)  # Triton's interpreter cuts off where the GPU rounds
        bits = 2**-7 if dtype == torch.bfloat16 else 1e-5
        assert_close(p.float(), q.float(), rtol=bits, atol=1e-9)
        assert (p != q).float().mean() < 0.02 or dtype == torch.float32
        for name in ours:  # from the same state again: a different code is another path
            theirs[name] = ours[name].clone()
        q = p.clone()


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({"state": "4bit"}, torch.bfloat16, "`state='4bit'` must be one of '8bit', 'float32'"),
        ({"rounding": "up"}, torch.bfloat16, "`rounding='up'` must be one of"),
        ({}, torch.float16, "`rounding='stochastic'` is for bfloat16 weights, and a parameter is float16"),
        ({}, torch.float64, "a parameter is torch.float64: use MasterAdamW"),
    ],
)
def test_bad_options(options, dtype, message):
    with pytest.raises(ValueError, match=message):
        LeanAdamW(matrix(dtype).parameters(), **options)


def test_the_configuration_chooses():
    net = matrix()
    groups = [{"params": list(net.parameters()), "lr": 1e-3}]
    assert type(build_optimizer(groups, OptimConfig())) is MasterAdamW
    made = build_optimizer(groups, OptimConfig(state="8bit", rounding="stochastic"), seed=4)
    assert isinstance(made, LeanAdamW)
    assert made.kinds == {"state": "8bit", "rounding": "stochastic", "paged": False, "seed": 4}


@pytest.mark.parametrize(
    ("options", "trainer", "message"),
    [
        (
            {"rounding": "stochastic"},
            {},
            "`optim.rounding='stochastic'` is for bfloat16 weights, and what is trained is float32",
        ),
        ({"rounding": "stochastic"}, {"precision": "16-true"}, "what is trained is float16"),
        ({"paged": True}, {}, "`optim.paged=True` cannot be used here .SingleDeviceStrategy on cpu."),
        (
            {"state": "8bit"},
            {"precision": "64-true"},
            "`optim.state='8bit'` computes in float32, and what is .* float64",
        ),
    ],
)
def test_what_cannot_work_is_said_before_weights_are_loaded(tmp_path, monkeypatch, options, trainer, message):
    monkeypatch.setattr("lit_ppo.harness.build_roles", None)
    module = PPOLightningModule(
        tiny.folder(), tiny.count_w1, sampling={"max_new_tokens": 6}, optim=OptimConfig(**options)
    )
    with pytest.raises(ValueError, match=message):
        tiny.fit(tmp_path, module, **trainer)


@pytest.mark.parametrize(
    ("options", "flat", "message"),
    [
        ({"state": "8bit"}, True, "`optim.state='8bit'` scales the blocks of a matrix's rows, and FSDP1 flattens"),
        ({"paged": True}, True, "FSDP1 gathers the state of its flat parameters where they are"),
    ],
)
def test_what_a_sharding_strategy_cannot_hold(options, flat, message):
    module = SimpleNamespace(
        optim=OptimConfig(**options),
        sharding=SimpleNamespace(flat=flat, sharded=True),
        target_device=torch.device("cuda"),
        trainer=SimpleNamespace(strategy=None),
    )
    with pytest.raises(ValueError, match=message):
        check_optimizer(module, {torch.bfloat16})
    for sharded in (False, True):
        module.sharding = SimpleNamespace(flat=False, sharded=sharded)
        check_optimizer(module, {torch.bfloat16})


def test_a_lean_fit(tmp_path):
    optim = OptimConfig(state="8bit", rounding="stochastic", actor_lr=1e-3)
    module = PPOLightningModule(tiny.folder(), tiny.count_w1, sampling={"max_new_tokens": 6}, optim=optim)
    before = tiny.model().state_dict()
    trainer = tiny.fit(tmp_path, module, precision="bf16-true")
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, LeanAdamW)
    state = optimizer.state[module.actor.base.model.embed_tokens.weight]
    assert state["step"] == 8
    assert "master" not in state
    assert not torch.equal(module.actor.base.lm_head.weight.float(), before["lm_head.weight"])


@pytest.mark.gpu
@pytest.mark.parametrize(("state", "rounding"), KINDS)
def test_paged_state_is_the_same_on_cuda_and_leaves_the_gpu(monkeypatch, state, rounding):
    resident, paged = (matrix(rows=1024, cols=1024).cuda() for _ in range(2))
    first = LeanAdamW(resident.parameters(), lr=1e-3, state=state, rounding=rounding)
    second = LeanAdamW(paged.parameters(), lr=1e-3, state=state, rounding=rounding, paged=True)
    monkeypatch.setattr(lean, "PIECE", 100_000)
    for _ in range(3):
        for p, q in zip(resident.parameters(), paged.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        first.step()
        second.step()
    assert torch.equal(flat(resident), flat(paged))
    for p, q in zip(resident.parameters(), paged.parameters(), strict=True):
        for name, value in second.state[q].items():
            assert value.device.type == "cpu"
            assert name == "step" or value.is_pinned()
            assert torch.equal(value, first.state[p][name].cpu())
    again = matrix(rows=1024, cols=1024).cuda()
    again.load_state_dict(paged.state_dict())
    resumed = LeanAdamW(again.parameters(), lr=1e-3, state=state, rounding=rounding, paged=True)
    resumed.load_state_dict(second.state_dict())
    for p, q in zip(again.parameters(), paged.parameters(), strict=True):
        q.grad = torch.randn_like(q)
        p.grad = q.grad.clone()
    resumed.step()
    second.step()
    assert torch.equal(flat(again), flat(paged))


@pytest.mark.gpu
def test_a_step_of_a_large_model_takes_no_memory():
    weights = [nn.Parameter(torch.randn(8960, 1536, dtype=torch.bfloat16, device="cuda") * 0.02) for _ in range(32)]
    optimizer = LeanAdamW(weights, lr=3e-6)
    optimizer.allocate_state()
    for p in weights:
        p.grad = torch.randn_like(p) * 1e-4
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 2**20
