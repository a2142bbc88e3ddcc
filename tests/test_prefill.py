"""Prefill in chunks: prompts packed into forwards of a bounded size, longer ones cut, with the same result."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graph_engine import DRAW, assert_same, make, sampling, view

from lit_ppo.experience import Prompts
from lit_ppo.roles.attention import AttentionSpec
from lit_ppo.rollout import cache
from lit_ppo.rollout.cache import PrefillAttention, SlotCache, causal_attention
from lit_ppo.rollout.fused import FusedTrunk
from lit_ppo.rollout.graph import GraphEngine
from lit_ppo.rollout.hf import HFEngine
from lit_ppo.rollout.scheduler import chunks

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
SPECS = [AttentionSpec(0.3), AttentionSpec(0.3, window=5), AttentionSpec(0.3, window=7, softcap=1.5)]


@given(LENGTHS, st.integers(1, 50))
def test_chunks_are_full_and_in_order_and_cut_only_what_does_not_fit(lengths, size):
    found = chunks(lengths, size)
    assert [(n, i) for chunk in found for n, start, end in chunk for i in range(start, end)] == [
        (n, i) for n, length in enumerate(lengths) for i in range(length)
    ]
    for chunk, after in zip(found, [*found[1:], None], strict=True):
        used = sum(end - start for _, start, end in chunk)
        assert 0 < used <= size
        if after is not None:  # no room for what comes next, which is whole, or its first part is here
            assert used + lengths[after[0][0]] > size
            assert used == size or after[0][1] == 0
        for number, start, end in chunk:
            assert lengths[number] > size or (start, end) == (0, lengths[number])


def naive(q, k, v, spec):
    """One sequence, (n, H, D) and (n, HK, D), written out."""
    n, groups = len(q), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < (spec.window or n))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 50), st.integers(1, 3), st.sampled_from(SPECS), st.sampled_from([1, 300, 2**26]))
def test_attention_in_chunks_is_that_of_whole_prompts(lengths, size, copies, spec, scores):
    q = torch.randn(sum(lengths), 4, 8)
    k, v = (torch.randn(sum(lengths), 2, 8) for _ in range(2))
    slots = [[n + copy * len(lengths) for copy in range(copies)] for n in range(len(lengths))]
    held = SlotCache(1, copies * len(lengths), 2, max(lengths), 8, torch.float32, CPU)
    first = [sum(lengths[:n]) for n in range(len(lengths))]
    found = torch.zeros_like(q)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "SCORES", scores)
        for chunk in chunks(lengths, size):
            at = torch.cat([torch.arange(first[n] + start, first[n] + end) for n, start, end in chunk])
            attention = PrefillAttention(
                held, [end - start for _, start, end in chunk], [slots[n] for n, _, _ in chunk], CPU,
                [start for _, start, _ in chunk],
            )  # fmt: skip
            assert attention.place.tolist() == [i for _, start, end in chunk for i in range(start, end)]
            found[at] = attention.attend(0, q[at], k[at], v[at], spec)
    for n, length in enumerate(lengths):
        rows = slice(first[n], first[n] + length)
        torch.testing.assert_close(found[rows], naive(q[rows], k[rows], v[rows], spec), rtol=1e-4, atol=1e-5)
        for slot in slots[n]:
            assert torch.equal(held.keys[0, slot, :, :length], k[rows].transpose(0, 1))
            assert torch.equal(held.values[0, slot, :, :length], v[rows].transpose(0, 1))


def test_padding_and_masks_stay_bounded(monkeypatch):
    lengths = [1000, *[10] * 100, 700, 400]
    packed = SlotCache(1, len(lengths), 1, 1000, 1, torch.float32, CPU)
    attention = PrefillAttention(packed, lengths, [[n] for n in range(len(lengths))], CPU)
    assert sorted((b.rows, b.width) for b in attention.blocks) == [(1, 400), (2, 1000), (100, 10)]
    sizes = []
    inner = cache.masked_attention
    monkeypatch.setattr(cache, "SCORES", 4000)
    monkeypatch.setattr(
        cache, "masked_attention", lambda q, k, *rest: sizes.append((q.shape, k.shape)) or inner(q, k, *rest)
    )
    q = torch.randn(1, 2, 100, 4)
    causal_attention(q, q, q, AttentionSpec(1.0, window=8))
    assert max(a[1] * a[2] * b[2] for a, b in sizes) <= 4000
    assert max(b[2] for _, b in sizes) <= 20 + 8  # no key that no query of the piece can see


def long_prompts(lengths):
    torch.manual_seed(sum(lengths))
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, n in zip(ids, lengths, strict=True):
        row[-n:] = torch.randint(3, tiny.VOCAB, (n,))
    count = len(lengths)
    return Prompts(ids, torch.tensor(lengths), torch.arange(count), [""] * count, [None] * count, [{}] * count)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 30), st.sampled_from(["llama", "gemma2"]))
def test_tokens_and_log_probs_do_not_depend_on_the_chunk(lengths, size, kind):
    model, prompts = make(kind, scale=2.0), long_prompts(lengths).repeat(2)
    for temperature in (0.0, 1.0):
        options = sampling(model, max_new_tokens=4, temperature=temperature, entropy=True)
        whole = GraphEngine(view(model)).generate(prompts, options, DRAW)
        assert_same(GraphEngine(view(model), prefill_tokens=size).generate(prompts, options, DRAW), whole)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma3"])
def test_every_kind_of_attention_sees_the_earlier_pieces(kind, monkeypatch):
    model, prompts = make(kind), long_prompts([33, 7, 50, 1, 50, 12])
    options = sampling(model)
    expected = HFEngine(view(model)).generate(prompts, options, DRAW)
    for size in (64, 16, 5):
        forwards = []
        monkeypatch.setattr(
            "lit_ppo.rollout.graph.PrefillAttention",
            lambda *args, seen=forwards: seen.append(sum(args[1])) or PrefillAttention(*args),
        )
        engine = GraphEngine(view(model), prefill_tokens=size, max_rows=2)
        assert_same(engine.generate(prompts, options, DRAW), expected)
        assert size // 2 < max(forwards) <= size
        assert sum(forwards) == 32 + 6 + 49 + 49 + 11


def test_fused_layers_read_prompts_in_pieces():
    pytest.importorskip("triton")
    from test_graph_fused import DEVICE, setup, small

    policy, options = setup(small("qwen3"), max_new_tokens=2)
    prompts = long_prompts([9, 4]).to(DEVICE)
    engine = GraphEngine(policy, use_kernels=True, prefill_tokens=3)
    ours = engine.generate(prompts, options, DRAW)
    assert isinstance(engine._trunk, FusedTrunk)
    assert_same(ours, HFEngine(policy).generate(prompts, options, DRAW))
