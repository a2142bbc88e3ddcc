"""Every Triton kernel against its plain PyTorch twin: on CUDA where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()

from lit_ppo.algo.noise import base_key  # noqa: E402
from lit_ppo.config import SamplingConfig  # noqa: E402
from lit_ppo.rollout import kernels, layer_kernels, matmul_kernels  # noqa: E402
from lit_ppo.rollout.base import resolve_sampling  # noqa: E402
from lit_ppo.rollout.board import Board  # noqa: E402
from lit_ppo.rollout.cache import AttentionSpec, DecodeAttention, SlotCache  # noqa: E402
from lit_ppo.rollout.matmul_kernels import Tiles  # noqa: E402
from lit_ppo.rollout.sampler import DeviceSampler  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]


def close(ours, theirs, dtype=torch.float32):
    assert torch.isfinite(ours).all()
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert error < (2e-5 if dtype == torch.float32 else 1e-2)


CASES = [  # splits; H, HK, D; what the layer asks for
    (0, (6, 2, 16), AttentionSpec(0.3)),
    (1, (3, 3, 24), AttentionSpec(0.3, window=33)),
    (4, (14, 2, 64), AttentionSpec(0.3, softcap=1.5)),
    (2, (2, 1, 16), AttentionSpec(0.3, window=5, softcap=1.5)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("splits", "shape", "spec"), CASES)
def test_decode_attention(dtype, splits, shape, spec):
    heads, kv_heads, dim = shape
    cache = SlotCache(1, 6, kv_heads, 192, dim, dtype, DEVICE)
    cache.keys.normal_()
    cache.values.normal_()
    q = torch.randn(4, heads, dim, device=DEVICE, dtype=dtype)
    slots = torch.tensor([4, 0, 6, 2], device=DEVICE)
    lengths = torch.tensor([0, 63, 64, 150], device=DEVICE)
    expected = DecodeAttention(cache, slots, lengths, 192).read(0, q, spec)
    ours = kernels.decode_attention(q, cache.keys[0], cache.values[0], slots, lengths, spec, splits)
    close(ours, expected, dtype)


def sampler(vocab, temperature, suppress, use, entropy=False):
    config = SamplingConfig(temperature=temperature, suppress_tokens=suppress, entropy=entropy)
    model_config = tiny.CONFIGS["llama"].__class__(**tiny.SHAPE | {"vocab_size": vocab})
    return DeviceSampler(
        resolve_sampling(config, tiny.tokenizer(), model_config, None), vocab, DEVICE, kernels if use else None
    )


@pytest.mark.parametrize("vocab", [64, 9001])
@pytest.mark.parametrize(("temperature", "suppress"), [(1.0, None), (0.7, [3, 40]), (0.0, [5])])
def test_sampling_is_that_of_the_reference(vocab, temperature, suppress):
    rows = 40 if CUDA else 8  # the interpreter is slow
    logits = 3 * torch.randn(rows, vocab, device=DEVICE)
    base = torch.tensor(base_key(3, 4, 1), device=DEVICE)
    index = torch.randint(0, 2**40, (rows,), device=DEVICE)
    step = torch.arange(rows, device=DEVICE)
    logits[0, 60] = 90.0  # one token that is certain, and a row where all are equal
    logits[1] = -7.0
    arguments = logits, base, index, step
    token, logprob, entropy = sampler(vocab, temperature, suppress, True, entropy=True)(*arguments)
    expected, expected_logprob, expected_entropy = sampler(vocab, temperature, suppress, False, True)(*arguments)
    assert torch.equal(token, expected)
    torch.testing.assert_close(logprob, expected_logprob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    kept = vocab - len(suppress or [])
    assert abs(float(entropy[0])) < 1e-5
    assert float(entropy[1]) == pytest.approx(torch.tensor(float(kept)).log().item(), rel=1e-5)
    assert len(token.unique()) > rows // 2
    plain = sampler(vocab, temperature, suppress, True)(*arguments)
    assert torch.equal(plain[0], token)
    assert torch.equal(plain[1], logprob)
    assert plain[2] is None


def test_a_tie_goes_to_the_lowest_id():
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, 5000], logits[0, 8999], logits[1, 7] = 1.0, 1.0, -1.0
    zeros = torch.zeros(2, dtype=torch.long, device=DEVICE)
    token, *_ = kernels.sample(logits, 0.0, None, zeros[0], zeros, zeros)
    assert token.tolist() == [5000, 0]


def test_the_board_advances_as_in_pytorch():
    boards = [Board(6, 12, 5, 9, DEVICE) for _ in range(2)]
    stop = torch.zeros(20, dtype=torch.bool, device=DEVICE)
    stop[:6] = True
    for board in boards:
        board.start(limit=4, base=-(2**62) - 5, pad=0, entropy=True)
    for step in range(24):
        if step % 7 == 0 and step < 21:
            ready = torch.randint(0, 20, (4, 4), device=DEVICE)
            for board in boards:
                board.enqueue(step // 7 * 4, ready)
                board.fill(6)
        token, logprob = torch.randint(0, 20, (6,), device=DEVICE), torch.randn(6, device=DEVICE)
        boards[0].advance(6, token, logprob, stop, None, logprob + 1)
        boards[1].advance(6, token, logprob, stop, kernels, logprob + 1)
        for name in ("rows", "scalars"):
            assert torch.equal(getattr(boards[0], name), getattr(boards[1], name))
        for name in ("ids", "logprobs", "entropy", "lengths", "stopped"):
            assert torch.equal(getattr(boards[0], name)[:12], getattr(boards[1], name)[:12])
    assert (boards[0].lengths[:12] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 576])
def test_add_norm(dtype, width):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(width, eps=1e-5).to(DEVICE, dtype)
    nn.init.normal_(norm.weight)
    x, residual = (torch.randn(7, width, device=DEVICE, dtype=dtype) for _ in range(2))
    close(layer_kernels.add_norm(x, None, norm.weight, 1e-5), norm(x), dtype)
    added = residual + x
    close(layer_kernels.add_norm(x, residual, norm.weight, 1e-5), norm(added), dtype)
    assert torch.equal(residual, added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", [(6, 2, 16), (9, 3, 64), (3, 1, 24)])
def test_rotate(dtype, normed, shape):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    heads, kv_heads, dim = shape
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim, device=DEVICE, dtype=dtype)
    angle = torch.randn(40, dim, device=DEVICE)
    table = angle.cos().to(dtype), angle.sin().to(dtype)
    places = torch.tensor([3, 0, 39, 7, 8], device=DEVICE)
    norms = [LlamaRMSNorm(dim, eps=1e-5).to(DEVICE, dtype) for _ in range(2)]
    for norm in norms:
        nn.init.normal_(norm.weight)
    q, k, v = qkv.view(5, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = norms[0](q), norms[1](k)
    q, k = apply_rotary_pos_emb(q[None], k[None], table[0][places][None], table[1][places][None], unsqueeze_dim=2)
    options = (norms[0].weight, norms[1].weight, 1e-5) if normed else None
    ours = layer_kernels.rotate(qkv, table, places, (heads, kv_heads), options)
    for a, b in zip(ours, (q[0], k[0], v), strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("splits", "shape", "spec"), CASES)
@pytest.mark.parametrize("normed", [False, True])
def test_fused_attention(dtype, normed, splits, shape, spec):
    heads, kv_heads, dim = shape
    caches = [SlotCache(1, 6, kv_heads, 192, dim, dtype, DEVICE) for _ in range(2)]
    caches[0].keys.normal_()
    caches[0].values.normal_()
    caches[1].keys.copy_(caches[0].keys)
    caches[1].values.copy_(caches[0].values)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim, device=DEVICE, dtype=dtype)
    angle = torch.randn(192, dim, device=DEVICE)
    table = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = (torch.randn(dim, device=DEVICE).to(dtype), torch.randn(dim, device=DEVICE).to(dtype), 1e-5)
    slots = torch.tensor([4, 0, 6, 2], device=DEVICE)
    lengths = torch.tensor([0, 63, 64, 150], device=DEVICE)
    q, k, v = layer_kernels.rotate(qkv, table, lengths, (heads, kv_heads), norms if normed else None)
    expected = DecodeAttention(caches[0], slots, lengths, 192).attend(0, q, k, v, spec)
    stored = caches[1].keys[0], caches[1].values[0], slots, lengths
    ours = kernels.fused_attention(qkv, *stored, spec, heads, table, norms if normed else None, splits)
    close(ours, expected.flatten(1), dtype)
    close(caches[1].keys, caches[0].keys, dtype)
    assert torch.equal(caches[1].values, caches[0].values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 2500])
def test_swiglu(dtype, width):
    x = torch.randn(5, 2 * width, device=DEVICE, dtype=dtype)
    gate, up = x.chunk(2, dim=1)
    close(layer_kernels.swiglu(x), nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "inner"), [(5, 48, 96), (33, 80, 72)])
def test_products_with_what_follows_them(dtype, rows, width, inner):
    x = torch.randn(rows, inner, device=DEVICE, dtype=dtype)
    gates = torch.randn(2 * width, inner, device=DEVICE, dtype=dtype) / inner**0.5
    for tiles in (Tiles(16, 32, 32, 1, 4, 2), Tiles(32, 16, 64, 1, 4, 3)):
        gate, up = nn.functional.linear(x, gates).chunk(2, dim=1)
        close(matmul_kernels.gated_product(x, gates, tiles), nn.functional.silu(gate) * up, dtype)
    weight, norm = gates[:width].contiguous(), torch.rand(width, device=DEVICE, dtype=dtype)
    for tiles in (Tiles(16, 32, 16, 4, 4, 2), Tiles(32, 16, 32, 5, 4, 2)):  # 5 * 32 is more than there is
        parts = matmul_kernels.product_parts(x, weight, tiles)
        assert parts.shape == (tiles.splits, rows, width)
        close(parts.sum(0), nn.functional.linear(x, weight), dtype)
        residual = torch.randn(rows, width, device=DEVICE, dtype=dtype)
        other = residual.clone()
        want = layer_kernels.add_norm(nn.functional.linear(x, weight), other, norm, 1e-5)
        close(matmul_kernels.add_parts_norm(parts, residual, norm, 1e-5), want, dtype)
        close(residual, other, dtype)
