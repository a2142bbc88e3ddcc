"""The hf engine: what is sampled, with which noise, and what is recorded of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch

from lit_ppo.config import SamplingConfig
from lit_ppo.experience import Rollout
from lit_ppo.roles.model import RoleModel, RoleView
from lit_ppo.rollout.base import Draw, finish, resolve_sampling
from lit_ppo.rollout.hf import HFEngine, measured

DRAW = Draw(seed=1, iteration=2)


def sampling(model, pad="<pad>", **options):
    config = SamplingConfig(**({"max_new_tokens": 8, "temperature": 1.0} | options))
    return resolve_sampling(config, tiny.tokenizer(pad), model.config, model.generation_config)


def engine(model):
    return HFEngine(RoleView(RoleModel(model), "logprobs"))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_decoding_is_that_of_generate(kind):
    model, prompts = tiny.model(kind), tiny.prompts()
    ours = engine(model).generate(prompts, sampling(model, temperature=0.0), DRAW)
    theirs = model.generate(
        prompts.ids,
        attention_mask=prompts.mask.long(),
        do_sample=False,
        max_new_tokens=8,
        eos_token_id=2,
        pad_token_id=0,
    )[:, prompts.ids.shape[1] :]
    mask = ours.mask
    assert torch.equal(ours.ids[mask], theirs[:, : ours.ids.shape[1]][mask])


def test_the_noise_of_a_sample_does_not_depend_on_who_shares_its_batch():
    model, prompts = tiny.model(), tiny.prompts(8)
    options = sampling(model)
    whole = engine(model).generate(prompts, options, DRAW)
    for size in (1, 3):
        parts = [engine(model).generate(prompts.select(rows), options, DRAW) for rows in torch.arange(8).split(size)]
        joined = Rollout.cat(parts)
        assert torch.equal(joined.lengths, whole.lengths)
        assert torch.equal(joined.ids[joined.mask], whole.ids[whole.mask])
        torch.testing.assert_close(joined.logprobs[joined.mask], whole.logprobs[whole.mask])
        assert torch.equal(joined.prompts.ids, whole.prompts.ids)
    order = torch.tensor([5, 0, 7])
    few = engine(model).generate(prompts.select(order), options, DRAW)
    assert torch.equal(few.ids[few.mask], whole.select(order).ids[whole.select(order).mask])


@pytest.mark.parametrize("change", [{"seed": 9}, {"iteration": 9}, {"stream": 1}])
def test_seed_iteration_and_stream_each_change_the_noise(change):
    model, prompts = tiny.model(scale=1.0), tiny.prompts()
    first = engine(model).generate(prompts, sampling(model), DRAW)
    again = engine(model).generate(prompts, sampling(model), DRAW)
    other = engine(model).generate(prompts, sampling(model), replace(DRAW, **change))
    assert torch.equal(first.ids, again.ids)
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_drawn_from_the_tempered_softmax(temperature):
    model = tiny.model(scale=3.0)
    one = tiny.prompts(1)
    count = 4000
    many = one.repeat(count)
    drawn = engine(model).generate(many, sampling(model, max_new_tokens=1, temperature=temperature), DRAW).ids[:, 0]
    with torch.no_grad():
        expected = (model(one.ids[:, -int(one.lengths[0]) :]).logits[0, -1] / temperature).softmax(-1)
    seen = torch.bincount(drawn, minlength=tiny.VOCAB) / count
    error = (expected * (1 - expected) / count).sqrt()
    assert ((seen - expected).abs() <= 5 * error + 1e-3).all()
    assert len(drawn.unique()) > 5


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.7, "suppress_tokens": ["w1", 7]}])
def test_the_samplers_log_probs_are_those_of_the_training_forward(options):
    model, prompts = tiny.model(), tiny.prompts()
    chosen = sampling(model, **options)
    rollout = engine(model).generate(prompts, chosen, DRAW)
    view = RoleView(RoleModel(model), "logprobs")
    with torch.no_grad():
        ours, _ = view(rollout, temperature=chosen.temperature, suppress=chosen.suppress)
    torch.testing.assert_close(rollout.logprobs, ours, rtol=1e-4, atol=1e-4)
    assert not torch.isin(rollout.ids[rollout.mask], chosen.suppress).any()


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7, "suppress_tokens": ["w1", 7]}, {"temperature": 1.0, "top_k": 2}]
)
def test_the_entropy_is_that_of_the_whole_tempered_distribution(options):
    model, prompts = tiny.model(scale=2.0), tiny.prompts()
    chosen = sampling(model, entropy=True, **options)
    rollout = engine(model).generate(prompts, chosen, DRAW)
    with torch.no_grad():
        _, expected = RoleView(RoleModel(model), "logprobs")(
            rollout, temperature=chosen.temperature, suppress=chosen.suppress, entropy=True
        )
    torch.testing.assert_close(rollout.entropy, expected, rtol=1e-4, atol=1e-4)
    assert (rollout.entropy[rollout.mask] > 0).all()
    parts = [engine(model).generate(prompts.select(rows), chosen, DRAW) for rows in torch.arange(6).split(4)]
    torch.testing.assert_close(Rollout.cat(parts).entropy, rollout.entropy)
    assert engine(model).generate(prompts, sampling(model, **options), DRAW).entropy is None


def test_entropies_by_hand():
    logits = torch.tensor([[0.0, 0.0, -1e30, -1e30], [0.0, torch.tensor(3.0).log(), -torch.inf, -1e30]])
    logprob, entropy = measured(logits, torch.tensor([1, 1]), True)
    assert logprob.exp().tolist() == pytest.approx([0.5, 0.75])
    half, quarters = torch.tensor(2.0).log(), torch.tensor(4.0).log() - 0.75 * torch.tensor(3.0).log()
    assert entropy.tolist() == pytest.approx([float(half), float(quarters)])


@pytest.mark.parametrize("pad", ["<pad>", "<eos>", None])
def test_the_end_is_found_by_the_stop_token_whatever_the_padding(pad):
    model, prompts = tiny.model(scale=1.0), tiny.prompts(30)
    chosen = sampling(model, pad=pad, max_new_tokens=30)
    rollout = engine(model).generate(prompts, chosen, DRAW)
    assert rollout.stopped.any()
    assert not rollout.stopped.all()
    for ids, length, stopped in zip(rollout.ids, rollout.lengths, rollout.stopped, strict=True):
        body = ids[:length].tolist()
        assert (body[-1] == 2) == bool(stopped)
        assert 2 not in body[:-1]
        assert stopped or length == 30


def test_other_stop_tokens_end_a_response():
    model, prompts = tiny.model(scale=1.0), tiny.prompts(20)
    rollout = engine(model).generate(prompts, sampling(model, max_new_tokens=20, stop_tokens=["w5", "w6", 2]), DRAW)
    last = rollout.ids.gather(1, rollout.lengths[:, None] - 1)[:, 0]
    assert torch.isin(last[rollout.stopped], torch.tensor([9, 10, 2])).all()


def test_the_models_own_generation_config_does_not_leak_in():
    model, prompts = tiny.model(), tiny.prompts()
    plain = engine(model).generate(prompts, sampling(model), DRAW)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.min_new_tokens = 8
    model.generation_config.suppress_tokens = list(range(3, 40))
    again = engine(model).generate(prompts, sampling(model), DRAW)
    assert torch.equal(plain.ids, again.ids)
    assert model.generation_config.repetition_penalty == 5.0  # put back


def test_truncated_samplers_draw_from_what_they_keep():
    model, prompts = tiny.model(scale=3.0), tiny.prompts(1).repeat(300)
    with torch.no_grad():
        logits = model(tiny.prompts(1).ids[:, -1:]).logits[0, -1]
    for options, allowed in (
        ({"top_k": 3}, logits.topk(3).indices),
        ({"top_p": 1e-6}, logits.topk(1).indices),
        ({"min_p": 1.0}, logits.topk(1).indices),
    ):
        rollout = engine(model).generate(prompts, sampling(model, max_new_tokens=1, **options), DRAW)
        assert set(rollout.ids[:, 0].tolist()) == set(allowed.tolist())


def test_unknown_and_contradictory_tokens_are_errors():
    model = tiny.model()
    with pytest.raises(
        ValueError, match=r"`sampling.suppress_tokens` names 'w999', which is not one of the model's 64"
    ):
        sampling(model, suppress_tokens=["w999"])
    with pytest.raises(ValueError, match=r"`sampling.stop_tokens` names 64"):
        sampling(model, stop_tokens=[64])
    with pytest.raises(ValueError, match=r"`sampling.suppress_tokens` holds \[2\], which are stop tokens"):
        sampling(model, suppress_tokens=["<eos>"])


def test_finish_cuts_after_the_first_stop_token():
    ids = torch.tensor([[5, 2, 2, 7], [5, 6, 7, 8], [2, 5, 5, 5]])
    rollout = finish(tiny.prompts(3), ids, torch.ones(3, 4), torch.tensor([2]))
    assert rollout.lengths.tolist() == [2, 4, 1]
    assert rollout.stopped.tolist() == [True, False, True]
    assert rollout.logprobs.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    trimmed = rollout.select(torch.tensor([2, 0])).trim()
    assert trimmed.ids.tolist() == [[2, 5], [5, 2]]
