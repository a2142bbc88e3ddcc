"""The graph engine without CUDA: the same scheduling, refills, ends and sharing, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    SmolLM3Config,
)

from lit_ppo.config import LoRAConfig, SamplingConfig
from lit_ppo.experience import Prompts
from lit_ppo.roles.adapters import POLICY, add_adapters
from lit_ppo.roles.model import RoleModel, RoleView
from lit_ppo.rollout.base import Draw, resolve_sampling
from lit_ppo.rollout.board import REQUEST
from lit_ppo.rollout.graph import GraphEngine
from lit_ppo.rollout.hf import HFEngine
from lit_ppo.rollout.scheduler import Feeder, bucket_of

DRAW = Draw(seed=1, iteration=2)
GEMMA = tiny.SHAPE | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
FEW = {name: value for name, value in tiny.SHAPE.items() if name != "num_key_value_heads"}
MORE = {
    "mistral": MistralConfig(**tiny.SHAPE, sliding_window=4),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=20.0, final_logit_softcapping=10.0),
    "gemma3": Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"]),
    "cohere": CohereConfig(**tiny.SHAPE, logit_scale=0.5),
    "granite": GraniteConfig(**tiny.SHAPE, logits_scaling=0.5),
    "gemma": GemmaConfig(**tiny.SHAPE, head_dim=8),
    "gpt-neox": GPTNeoXConfig(**FEW),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
    "opt": OPTConfig(**{n: v for n, v in FEW.items() if n != "intermediate_size"}, ffn_dim=48, word_embed_proj_dim=32),
    "phi": PhiConfig(**tiny.SHAPE),
    "phi3": Phi3Config(**tiny.SHAPE),
    "qwen2-windows": Qwen2Config(**tiny.SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "smollm3": SmolLM3Config(**tiny.SHAPE, no_rope_layers=[1, 0]),
}


def make(kind, scale=3.0):
    if kind in tiny.CONFIGS:
        return tiny.model(kind, scale=scale)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MORE[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.eval()


def view(model, adapter=None):
    return RoleView(RoleModel(model), "logprobs", adapter)


def sampling(model, **options):
    config = SamplingConfig(**({"max_new_tokens": 12, "temperature": 1.0} | options))
    return resolve_sampling(config, tiny.tokenizer(), model.config, model.generation_config)


def assert_same(ours, theirs):
    assert torch.equal(ours.lengths, theirs.lengths)
    assert torch.equal(ours.stopped, theirs.stopped)
    mask = ours.mask
    assert torch.equal(ours.ids[mask], theirs.ids[mask])
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.entropy, theirs.entropy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3", *MORE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_generate(kind, temperature):
    model, prompts = make(kind), tiny.prompts(9)
    options = sampling(model, temperature=temperature)
    ours = GraphEngine(view(model)).generate(prompts, options, DRAW)
    theirs = HFEngine(view(model)).generate(prompts, options, DRAW)
    assert_same(ours, theirs)
    assert len(ours.ids[ours.mask].unique()) > 5


@pytest.mark.parametrize(("rows", "behind"), [(1, 0), (2, 0), (5, 0), (2, 1), (5, 1), (5, 2)])
def test_refills_change_nothing(rows, behind):
    model, prompts = tiny.model(scale=1.0), tiny.prompts(23)
    options = sampling(model, stop_tokens=list(range(2, 12)), max_new_tokens=20, entropy=True)
    engine = GraphEngine(view(model), max_rows=rows, prefill_tokens=7, read_behind=behind)
    ours = engine.generate(prompts, options, DRAW)
    assert_same(ours, HFEngine(view(model)).generate(prompts, options, DRAW))
    assert ours.stopped.any()
    assert len(ours.lengths.unique()) > 5
    waste = engine.stats["steps"] * bucket_of(rows) - int(ours.lengths.sum())
    assert 0 <= waste <= (40 + 16 * behind) * rows  # rows do not wait for the longest of their batch


def test_rows_move_to_the_front_while_the_host_reads_behind():
    model, prompts = tiny.model(scale=1.0), tiny.prompts(30)
    options = sampling(model, stop_tokens=list(range(2, 9)), max_new_tokens=60)
    engine = GraphEngine(view(model), max_rows=16, read_behind=1)
    moves = []
    inner = engine._step
    engine._step = lambda rows, *args: moves.append(rows) or inner(rows, *args)
    ours = engine.generate(prompts, options, DRAW)
    assert len(set(moves)) > 1
    assert_same(ours, HFEngine(view(model)).generate(prompts, options, DRAW))


def test_no_row_is_idle_while_prompts_wait():
    model, prompts = tiny.model(scale=1.0), tiny.prompts(60)
    options = sampling(model, stop_tokens=[2, 3], max_new_tokens=58)
    engine = GraphEngine(view(model), max_rows=8, read_behind=1)
    busy = []
    inner = engine._step

    def step(rows, *args):
        if int(engine._board.scalars[0]) < 60:  # the head of the queue
            busy.append(int((engine._board.rows[REQUEST, :rows] >= 0).sum()))
        inner(rows, *args)

    engine._step = step
    rollout = engine.generate(prompts, options, DRAW)
    assert len(rollout.lengths.unique()) > 10
    assert sum(busy) >= 0.98 * 8 * len(busy)
    assert len(busy) > 0.6 * engine.stats["steps"]  # the rest is the end, when none waits


def test_samples_of_a_prompt_share_its_prefill(monkeypatch):
    model, prompts = tiny.model(), tiny.prompts(4).repeat(3)
    options = sampling(model)
    engine = GraphEngine(view(model))
    seen = []
    inner = Feeder.batch
    monkeypatch.setattr(Feeder, "batch", lambda *args: seen.append(inner(*args)) or seen[-1])
    ours = engine.generate(prompts, options, DRAW)
    assert seen[0].leaders == [0, 3, 6, 9]
    assert not any(seen[1:])
    assert all(len(group) == 3 for group in seen[0].groups)
    assert_same(ours, HFEngine(view(model)).generate(prompts, options, DRAW))


def test_a_sample_does_not_depend_on_who_shares_its_batch():
    model, prompts = tiny.model(scale=1.0), tiny.prompts(12)
    options = sampling(model)
    whole = GraphEngine(view(model)).generate(prompts, options, DRAW)
    order = torch.tensor([7, 2, 10])
    assert_same(
        GraphEngine(view(model)).generate(prompts.select(order), options, DRAW).trim(), whole.select(order).trim()
    )


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"suppress_tokens": ["w1", 7]}])
def test_truncated_and_suppressed_distributions_are_those_of_hf(options):
    model, prompts = tiny.model(scale=3.0), tiny.prompts(8)
    chosen = sampling(model, temperature=0.7, entropy=True, **options)
    assert_same(
        GraphEngine(view(model)).generate(prompts, chosen, DRAW), HFEngine(view(model)).generate(prompts, chosen, DRAW)
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize(("lengths", "new", "options"), [
    ([3], 1, {}),  # one token of one response
    ([63, 2, 63], 1, {"stop_strings": ["w1"]}),  # a prompt as long as the context allows
    ([60, 1, 59], 4, {"top_k": 1000}),  # more than there are
    ([1, 4], 60, {"top_k": 9, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8}),
    ([5] * 9, 9, {"stop_tokens": list(range(64))}),  # every token ends
])  # fmt: skip
def test_extremes(kind, lengths, new, options):
    model = make(kind, 2.0)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for number, (row, n) in enumerate(zip(ids, lengths, strict=True)):
        row[-n:] = (torch.arange(n) * 7 + number) % (tiny.VOCAB - 3) + 3
    count = len(lengths)
    prompts = Prompts(ids, torch.tensor(lengths), torch.arange(count), [""] * count, [None] * count, [{}] * count)
    chosen = sampling(model, max_new_tokens=new, entropy=True, **options)
    ours = GraphEngine(view(model), max_rows=2, read_behind=1).generate(prompts, chosen, DRAW)
    assert_same(ours, HFEngine(view(model)).generate(prompts, chosen, DRAW))


def test_one_engine_serves_longer_shorter_larger_and_smaller_rollouts():
    model = tiny.model(scale=1.0)
    engine = GraphEngine(view(model), max_rows=4)
    for count, length, temperature in ((3, 4, 1.0), (9, 12, 1.0), (2, 3, 0.0), (9, 12, 1.0)):
        options = sampling(model, max_new_tokens=length, temperature=temperature, entropy=count != 9)
        prompts = tiny.prompts(count)
        assert_same(engine.generate(prompts, options, DRAW), HFEngine(view(model)).generate(prompts, options, DRAW))
        engine.sleep()
        engine.wake()
    engine.release()
    assert_same(engine.generate(prompts, options, DRAW), HFEngine(view(model)).generate(prompts, options, DRAW))


def test_weights_that_change_are_the_weights_that_sample():
    model, prompts = tiny.model(), tiny.prompts(4)
    engine, options = GraphEngine(view(model)), sampling(model)
    before = engine.generate(prompts, options, DRAW)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    after = engine.generate(prompts, options, DRAW)
    assert before.ids.shape != after.ids.shape or not torch.equal(before.ids, after.ids)
    assert_same(after, HFEngine(view(model)).generate(prompts, options, DRAW))


def test_adapters_are_on_while_sampling_and_the_bare_trunk_can_sample_too():
    peft_model = add_adapters(tiny.model(), LoRAConfig(r=4), [POLICY], seed=0)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    prompts, options = tiny.prompts(5), sampling(peft_model)
    store = RoleModel(peft_model)
    drawn = []
    for adapter in (POLICY, None):
        policy = RoleView(store, "logprobs", adapter)
        drawn.append(GraphEngine(policy).generate(prompts, options, DRAW))
        assert_same(drawn[-1], HFEngine(policy).generate(prompts, options, DRAW))
    assert drawn[0].ids.shape != drawn[1].ids.shape or not torch.equal(drawn[0].ids, drawn[1].ids)


def test_the_models_own_attention_is_put_back():
    model = tiny.model()
    before = model.config._attn_implementation
    GraphEngine(view(model)).generate(tiny.prompts(2), sampling(model), DRAW)
    assert model.config._attn_implementation == before
    broken = replace(tiny.prompts(2), lengths=torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"Prompt 0 of the batch has no token"):
        GraphEngine(view(model)).generate(broken, sampling(model), DRAW)
    assert model.config._attn_implementation == before


def test_the_feeder_hands_out_everything_once_and_in_order():
    lengths = [3, 3, 5, 1, 4, 4, 4, 2]
    ids = torch.arange(8)[:, None].expand(8, 5).clone()
    ids[5], ids[6] = ids[4], ids[4]
    prompts = Prompts(ids, torch.tensor(lengths), torch.arange(8), [""] * 8, [None] * 8, [{}] * 8)
    feeder = Feeder(prompts)
    feeder.open(5)
    given, done = [], [0] * 8
    while feeder.ended < 8:
        if (batch := feeder.batch(at_least=2)) is not None:
            given += range(batch.first, batch.first + len(batch.slots))
            assert [slot for group in batch.groups for slot in group] == batch.slots
            rows = range(batch.first, given[-1] + 1)
            assert batch.leaders == [r for r in rows if r == batch.first or not feeder.repeats[r]]
        assert len(set(feeder._slot.values())) == len(feeder._slot)
        done[given[sum(map(bool, done))]] = 1
        feeder.collect(done)
    assert given == list(range(8))
    assert feeder.repeats == [False] * 5 + [True, True, False]
