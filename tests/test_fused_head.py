"""The fused head against the naive computation in float64, in values and gradients; its kernels against their twins."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lit_ppo.config import LoRAConfig
from lit_ppo.roles import fused_head as fh
from lit_ppo.roles import logprobs as lp
from lit_ppo.roles.fused_head import HeadSpec, Tempering

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SPECS = [HeadSpec(), HeadSpec(scale=0.25), HeadSpec(cap=1.5), HeadSpec(scale=3.0, cap=2.0)]


def naive(hidden, weight, bias, targets, tempering):
    """Log-probs and entropies from all logits, in the dtype that is given."""
    spec = tempering.spec
    logits = nn.functional.linear(hidden, weight, bias) * spec.scale
    if spec.cap is not None:
        logits = spec.cap * torch.tanh(logits / spec.cap)
    logits = logits / (tempering.temperature or 1.0)
    if tempering.suppress is not None:
        keep = torch.ones(weight.shape[0], dtype=torch.bool).index_fill(0, tempering.suppress, False)
        logits = torch.where(keep, logits, -math.inf)
    table = logits.log_softmax(-1)
    p = table.exp()
    return table.gather(-1, targets[:, None])[:, 0], -(p * torch.where(p > 0, table, 0.0)).sum(-1)


def case(tokens, width, vocab, *, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=g)
    head = nn.Linear(width, vocab, bias=bias)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocab, width, generator=g) / width**0.5)
    targets = torch.randint(0, max(1, vocab - 2), (tokens,), generator=g)
    return hidden, head, targets, torch.randn(2, tokens, generator=g)


def compare(hidden, head, targets, weights, tempering, *, entropy=True, rows=3, frozen=False):
    bias = head.bias
    double = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    double_bias = None if bias is None else bias.detach().double().requires_grad_()
    expected, expected_entropy = naive(*double, double_bias, targets, tempering)
    loss = (expected * weights[0]).sum() + ((expected_entropy * weights[1]).sum() if entropy else 0)
    wanted = torch.autograd.grad(loss, [*double, *([] if bias is None else [double_bias])])

    hidden = hidden.clone().requires_grad_()
    head.requires_grad_(not frozen)
    got, got_entropy = lp.token_logprobs(
        hidden,
        targets,
        head,
        temperature=tempering.temperature,
        suppress=tempering.suppress,
        spec=tempering.spec,
        entropy=entropy,
        chunk_elements=rows * head.out_features,
    )
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)
    assert (got_entropy is None) == (not entropy)
    if entropy:
        torch.testing.assert_close(got_entropy, expected_entropy.float(), rtol=1e-4, atol=1e-5)
    loss = (got * weights[0]).sum() + ((got_entropy * weights[1]).sum() if entropy else 0)
    loss.backward()
    grads = [hidden.grad, head.weight.grad, *([] if bias is None else [bias.grad])]
    for ours, theirs in zip(grads[: 1 if frozen else 3], wanted, strict=not frozen):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5)
    assert not frozen or (head.weight.grad is None and (bias is None or bias.grad is None))


@given(
    tokens=st.integers(1, 17),
    vocab=st.integers(3, 41),
    rows=st.integers(1, 9),
    spec=st.sampled_from(SPECS),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    suppressed=st.integers(0, 2),
    bias=st.booleans(),
    entropy=st.booleans(),
    frozen=st.booleans(),
)
def test_values_and_gradients_equal_the_naive_ones(
    tokens, vocab, rows, spec, temperature, suppressed, bias, entropy, frozen
):
    hidden, head, targets, weights = case(tokens, 8, vocab, bias=bias, seed=tokens * 100 + vocab)
    suppress = torch.arange(vocab - suppressed, vocab) if suppressed else None
    tempering = Tempering(temperature, suppress, spec)
    compare(hidden, head, targets, weights, tempering, entropy=entropy, rows=rows, frozen=frozen)


def test_only_what_is_asked_for_is_differentiated():
    hidden, head, targets, _ = case(5, 8, 11)
    only_head, _ = lp.token_logprobs(hidden, targets, head, entropy=True)
    only_head.sum().backward()  # hidden needs no gradient, and the entropy has none
    assert head.weight.grad.any()
    head.zero_grad()
    hidden.requires_grad_()
    lp.token_logprobs(hidden, targets, head, entropy=True)[1].sum().backward()
    assert hidden.grad.any()
    with torch.no_grad():
        assert not lp.token_logprobs(hidden, targets, head)[0].requires_grad


def test_no_tokens_at_all():
    head = nn.Linear(8, 11)
    hidden = torch.zeros(0, 8, requires_grad=True)
    got, entropy = lp.token_logprobs(hidden, torch.zeros(0, dtype=torch.long), head, entropy=True)
    (got.sum() + entropy.sum()).backward()
    assert got.shape == entropy.shape == (0,)
    assert not head.weight.grad.any()


def test_the_peak_does_not_depend_on_the_number_of_tokens():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor):
                    self.numel = max(self.numel, x.numel())
            return out

    hidden, head, targets, _ = case(600, 8, 512)
    hidden.requires_grad_()
    with Largest() as seen:
        lp.token_logprobs(hidden, targets, head, entropy=True, chunk_elements=20 * 512)[0].sum().backward()
    assert seen.numel == 20 * 512


def test_half_precision_rounds_the_logits_and_nothing_else():
    hidden, head, targets, _ = case(40, 16, 50)
    hidden, head = hidden.bfloat16().requires_grad_(), head.bfloat16()
    got, _ = lp.token_logprobs(hidden, targets, head, chunk_elements=7 * 50)
    expected = head(hidden).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(got, expected)
    ours = torch.autograd.grad(got.sum(), [hidden, head.weight])
    theirs = torch.autograd.grad(expected.sum(), [hidden, head.weight])
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b.float()).norm() < 1e-2 * b.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_the_products_and_not_of_the_gradients(dtype):
    hidden, head, targets, _ = case(40, 16, 50)
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype):
        got, _ = lp.token_logprobs(hidden, targets, head, chunk_elements=7 * 50)
        expected = head(hidden).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(got, expected)
    ours = torch.autograd.grad(got.sum(), [hidden, head.weight])
    theirs = torch.autograd.grad(expected.sum(), [hidden, head.weight])
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 1e-2 * b.norm()


def test_a_bf16_head_is_summed_over_many_chunks_within_its_rounding():
    hidden, head, targets, _ = case(640, 16, 33)
    hidden, head = hidden.bfloat16(), head.bfloat16()
    exact = torch.nn.Parameter(head.weight.detach().double())
    naive(hidden.double(), exact, head.bias.double(), targets, Tempering())[0].sum().backward()
    errors = []
    for chunks in (1, 16):
        head.zero_grad()
        lp.token_logprobs(hidden, targets, head, chunk_elements=640 // chunks * 33)[0].sum().backward()
        errors.append(float((head.weight.grad.double() - exact.grad).norm() / exact.grad.norm()))
    assert errors[1] < errors[0] + 16**0.5 * 2**-9


def test_heads_that_are_more_than_their_weight_are_called():
    hidden, head, targets, _ = case(9, 8, 11)
    assert fh.fusable(head)
    handle = head.register_forward_hook(lambda m, i, o: o + 1.0 * torch.arange(11))
    assert not fh.fusable(head)
    shifted, _ = lp.token_logprobs(hidden, targets, head, chunk_elements=22)
    expected = (nn.functional.linear(hidden, head.weight, head.bias) + torch.arange(11)).log_softmax(-1)
    torch.testing.assert_close(shifted, expected.gather(-1, targets[:, None])[:, 0])
    handle.remove()

    class Odd(nn.Linear):
        pass

    assert not fh.fusable(Odd(8, 11))
    assert not fh.fusable(lambda x: x)


def test_an_adapted_head_is_not_fused_and_has_its_gradients():
    import peft

    base = tiny.model("llama")
    config = peft.LoraConfig(r=2, target_modules=["lm_head"])
    head = peft.get_peft_model(base, config).get_base_model().lm_head
    assert not fh.fusable(head)
    hidden, targets = torch.randn(9, 32), torch.arange(9)
    lp.token_logprobs(hidden, targets, head, chunk_elements=4 * tiny.VOCAB)[0].sum().backward()
    assert head.lora_B["default"].weight.grad.any()
    assert LoRAConfig().target_modules == "all-linear"  # which leaves heads alone


# ---------------------------------------------------------------------------------------------------- the kernels


def kernels():
    pytest.importorskip("triton")
    from lit_ppo.roles import head_kernels

    return head_kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16] if CUDA else [torch.float32])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("vocab", "temperature", "suppressed"), [(64, 1.0, 0), (4097, 0.7, 2), (9001, 0.0, 5000)])
def test_kernels_do_what_their_twins_do(dtype, spec, vocab, temperature, suppressed):
    ours = kernels()
    rows = 33 if CUDA else 3  # the interpreter is slow
    logits = (4 * torch.randn(rows, vocab + 3, device=DEVICE)).to(dtype)[:, :vocab]
    targets = torch.randint(vocab - 10, vocab, (rows,), device=DEVICE)
    suppress = torch.arange(suppressed, device=DEVICE) if suppressed else None
    tempering = Tempering(temperature, suppress, spec)
    expected = fh.plain_forward(logits, targets, tempering, True)
    got = ours.forward(logits, targets, tempering, True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    grads = torch.randn(2, rows, device=DEVICE)
    for grad_entropy in (grads[1], None):
        wanted = fh.plain_backward(logits, targets, tempering, *expected[1:], grads[0], grad_entropy)
        same = ours.backward_(logits.clone(), targets, tempering, *expected[1:], grads[0], grad_entropy)
        error = (same.double() - wanted.double()).norm() / wanted.double().norm()
        assert error < (1e-4 if dtype == torch.float32 else 5e-3)
        assert not suppressed or not same[:, :suppressed].any()


def test_the_whole_path_through_the_kernels(monkeypatch):
    ours = kernels()
    monkeypatch.setattr(fh, "kernels_for", lambda logits: ours)
    for spec in SPECS[::3]:
        hidden, head, targets, weights = case(5, 8, 70)
        compare(hidden, head, targets, weights, Tempering(0.7, torch.tensor([69]), spec), rows=2)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [151_936, 128_256, 50_257])
@pytest.mark.parametrize("spec", [HeadSpec(), HeadSpec(cap=30.0), HeadSpec(scale=0.0625)])
@pytest.mark.parametrize("frozen", [False, True])
def test_on_cuda_in_half_precision(vocab, spec, frozen):
    """Against float64 on the same device, where only the rounding of the logits and their gradients to bf16 is left."""
    assert CUDA
    tokens, width = 300, 256
    hidden = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    head = nn.Linear(width, vocab, bias=False, device="cuda").bfloat16()
    nn.init.normal_(head.weight, std=0.2)
    head.requires_grad_(not frozen)
    targets = torch.randint(0, vocab - 2, (tokens,), device="cuda")
    weights = torch.randn(2, tokens, device="cuda")
    tempering = Tempering(0.7, torch.tensor([vocab - 1], device="cuda"), spec)

    def exact(h, w):
        logits = spec(nn.functional.linear(h, w).to(torch.float32).double()) / 0.7
        logits = logits.index_fill(-1, tempering.suppress, fh.NEVER)
        table = logits.log_softmax(-1)
        return table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)

    got = lp.token_logprobs(
        hidden, targets, head, temperature=0.7, suppress=tempering.suppress, spec=spec, entropy=True,
        chunk_elements=128 * vocab,
    )  # fmt: skip
    for ours, theirs in zip(got, exact(hidden, head.weight), strict=True):
        gap = (ours - theirs.float()).abs()  # a product of another shape may round a logit to the next bfloat16
        assert gap.mean() < 1e-3
        assert gap.max() < 0.1
    wrt = [hidden] if frozen else [hidden, head.weight]
    ours = torch.autograd.grad(sum((x * w).sum() for x, w in zip(got, weights, strict=True)), wrt)
    double = [hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()]
    loss = sum((x * w).sum() for x, w in zip(exact(*double), weights, strict=True))
    for a, b in zip(ours, torch.autograd.grad(loss, double[: len(wrt)]), strict=True):
        assert (a.double() - b).norm() < 3e-2 * b.norm()


@pytest.mark.gpu
def test_memory_is_that_of_a_chunk():
    tokens, width, vocab, chunk = 4096, 512, 100_000, 256
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = nn.Linear(width, vocab, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    targets = torch.zeros(tokens, dtype=torch.long, device="cuda")
    (hidden.detach() @ hidden.detach().t()).sum()  # cuBLAS takes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got, _ = lp.token_logprobs(hidden, targets, head, entropy=True, chunk_elements=chunk * vocab)
    got.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.5 * chunk * vocab * 2 + 4 * tokens * width * 2
