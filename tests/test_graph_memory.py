"""What the graph engine does where memory is short: fewer slots than rows, none at all, and giving it back."""

from __future__ import annotations

import pytest
import tiny
import torch
from test_graph_engine import DRAW, assert_same, sampling, view

from lit_ppo.rollout.cache import SlotCache
from lit_ppo.rollout.capture import CaptureFailed, Captures
from lit_ppo.rollout.graph import GraphEngine, Unservable
from lit_ppo.rollout.hf import HFEngine
from lit_ppo.rollout.select import AutoEngine
from lit_ppo.rollout.trunk import HFTrunk, cache_shape

WIDTH = 64
"""Tokens of a slot: prompts of up to 5 and 12 more, rounded up."""


def slots_of_memory(monkeypatch, model, count):
    """Leave memory for so many slots and the one that nobody reads."""
    one = SlotCache.slot_bytes(width=WIDTH, **cache_shape(model))
    monkeypatch.setattr("lit_ppo.rollout.graph.free_bytes", lambda device: int(one * (count + 1) / 0.8) + 1)


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_rows_without_a_slot_wait(monkeypatch, count):
    model, prompts = tiny.model(scale=1.0), tiny.prompts(9).repeat(2)
    options = sampling(model, stop_tokens=list(range(2, 12)))
    expected = HFEngine(view(model)).generate(prompts, options, DRAW)
    slots_of_memory(monkeypatch, model, count)
    engine = GraphEngine(view(model), read_behind=1)
    caches = []
    for _ in range(2):
        assert_same(engine.generate(prompts, options, DRAW), expected)
        caches.append(engine._cache)
        engine.sleep()
    assert caches[0].slots == min(count, 18)
    assert caches[0] is caches[1]  # no more would fit: what is held is kept, and graphs with it
    engine.release()
    assert engine.memory_bytes() == {"KV cache": 0, "CUDA graphs": 0}


def test_more_slots_are_taken_where_there_is_room_again(monkeypatch):
    model, prompts = tiny.model(scale=1.0), tiny.prompts(9)
    options = sampling(model)
    engine = GraphEngine(view(model))
    slots_of_memory(monkeypatch, model, 2)
    engine.generate(prompts, options, DRAW)
    slots_of_memory(monkeypatch, model, 100)
    engine.release()
    engine.generate(prompts, options, DRAW)
    assert engine._cache.slots == 9


def test_no_slot_at_all_is_an_error_that_says_what_to_lower(monkeypatch):
    model = tiny.model(scale=1.0)
    engine = GraphEngine(view(model))
    slots_of_memory(monkeypatch, model, 0)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"CUDA out of memory: a rollout needs .* of KV memory a sequence .*Lower `sampling.max_new_tokens`",
    ):
        engine.generate(tiny.prompts(2), sampling(model), DRAW)
    assert engine._cache is None


def test_a_capture_that_breaks_off_is_told_in_a_line(monkeypatch):
    """As far as it goes without CUDA: the engine's own path, with a capture that cannot work here."""
    model = tiny.model(scale=1.0)
    said = []
    monkeypatch.setattr("lit_ppo.rollout.select.rank_zero_info", said.append)
    auto = AutoEngine(view(model), capture=True)
    auto.engine = GraphEngine(view(model), capture=True)

    def run(self, key, work, device):
        work()
        raise CaptureFailed("RuntimeError: operation not permitted when stream is capturing")

    monkeypatch.setattr(Captures, "run", run)
    prompts, options = tiny.prompts(3), sampling(model)
    ours = auto.generate(prompts, options, DRAW)
    assert_same(ours, HFEngine(view(model)).generate(prompts, options, DRAW))
    assert isinstance(auto.engine, HFEngine)
    assert said == [
        "The graph engine cannot serve LlamaForCausalLM: its decode step cannot be captured (RuntimeError: operation "
        "not permitted when stream is capturing). Rollouts use transformers' `generate`."
    ]


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_is_left_to_generate(monkeypatch):
    model = tiny.model(scale=3.0).cuda()
    prompts, options = tiny.prompts(5).to("cuda"), sampling(model)
    expected = HFEngine(view(model)).generate(prompts, options, DRAW)
    logits = HFTrunk.logits
    monkeypatch.setattr(HFTrunk, "logits", lambda self, hidden: logits(self, hidden) + 0 * hidden.sum().item())
    stream, said = torch.cuda.current_stream(), []
    with pytest.raises(Unservable, match="cannot serve LlamaForCausalLM: its decode step cannot be captured"):
        GraphEngine(view(model)).generate(prompts, options, DRAW)
    assert torch.cuda.current_stream() == stream
    monkeypatch.setattr("lit_ppo.rollout.select.rank_zero_info", said.append)
    assert_same(AutoEngine(view(model)).generate(prompts, options, DRAW), expected)
    assert len(said) == 1
    monkeypatch.undo()
    assert_same(GraphEngine(view(model)).generate(prompts, options, DRAW), expected)  # and others still can


@pytest.mark.gpu
def test_sleep_gives_the_memory_back():
    model = tiny.model(scale=3.0).cuda()
    prompts, options = tiny.prompts(40).to("cuda"), sampling(model, entropy=True)
    engine = GraphEngine(view(model), keep_fraction=0.0)
    engine.generate(prompts, options, DRAW)
    engine.sleep()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        engine.generate(prompts, options, DRAW)
        assert engine.memory_bytes()["KV cache"] > 0
        engine.sleep()
        assert engine.memory_bytes()["KV cache"] == 0
        assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "gpt-neox", "opt", "gemma2"])
def test_other_decoders_are_captured_and_long_prompts_cut(kind):
    from test_graph_engine import make
    from test_prefill import long_prompts

    model, prompts = make(kind).cuda(), long_prompts([33, 7, 50, 1, 50, 12]).to("cuda")
    options = sampling(model, temperature=0.0, entropy=True)
    engine = GraphEngine(view(model), prefill_tokens=16, max_rows=2)
    assert_same(engine.generate(prompts, options, DRAW), HFEngine(view(model)).generate(prompts, options, DRAW))
    assert engine.stats["captures"] > 0
