"""What the ranks need of each other, as far as one process can show it; tests/distributed has the rest."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import tiny
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from lit_ppo import PPOLightningModule, PromptDataModule, RoleConfig, SamplingConfig
from lit_ppo.experience import Experience, Rollout
from lit_ppo.ranks import check_same, gather, together
from lit_ppo.roles.build import build_roles, plan_roles
from lit_ppo.roles.loading import empty_model, load_causal_lm, load_critic
from lit_ppo.roles.model import RoleModel
from lit_ppo.roles.names import named_tensors
from lit_ppo.sharding import sharding_for
from lit_ppo.sharding.fsdp1 import FSDP1, unscalable_to_float32
from lit_ppo.sharding.materialize import Source, fill
from lit_ppo.sharding.units import check_floats, layers

SHORT = SamplingConfig(max_new_tokens=4, temperature=1.0)


def rollout(rows: int) -> Rollout:
    prompts, lengths = tiny.prompts(rows), torch.arange(1, rows + 1)
    return Rollout(prompts, torch.ones(rows, rows, dtype=torch.long), lengths, lengths > 1, torch.zeros(rows, rows))


def test_a_ghost_runs_through_the_model_and_counts_for_nothing():
    store = RoleModel(tiny.model())
    real = rollout(3)
    full = torch.ones(3, 3)
    scored = Experience(**vars(real), old_logprobs=full, advantages=full, returns=full, keep=torch.ones(3).bool())
    ghost = scored.part(torch.arange(0))
    assert len(ghost) == 1
    assert ghost.mask.sum() == 1
    assert ghost.loss_mask.sum() == 0
    assert scored.values is None is ghost.values
    logprobs, _ = store("logprobs", None, ghost)
    (logprobs * ghost.loss_mask).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in store.parameters())
    assert torch.equal(scored.part(torch.tensor([0])).ids, real.select(torch.tensor([0])).trim().ids)


def test_no_prompts_make_an_empty_rollout():
    none = Rollout.empty(tiny.prompts(2).select(torch.arange(0)))
    assert len(none) == 0
    assert none.mask.shape == (0, 1)
    assert len(Rollout.cat([none])) == 0


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3"])
def test_an_empty_model_has_the_shapes_of_the_loaded_one(kind):
    config = RoleConfig(source=tiny.folder(kind))
    for critic in (False, True):
        loaded = load_critic(config, torch.bfloat16, 0) if critic else load_causal_lm(config, torch.bfloat16)
        empty = empty_model(config, torch.bfloat16, critic=critic)
        assert {n: (t.shape, t.dtype) for n, t in named_tensors(loaded).items()} == {
            n: (t.shape, t.dtype) for n, t in named_tensors(empty).items()
        }
        assert all(p.is_meta for p in empty.parameters())


def test_filling_keeps_weights_tied_and_frozen_ones_frozen():
    model = tiny.model("llama-tied").double()
    model.model.norm.requires_grad_(False)
    fill(model, Source(False, torch.device("cpu"), torch.device("cpu")))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.model.norm.weight.requires_grad


def test_layers_are_those_that_may_not_be_split():
    store = RoleModel(tiny.model())
    assert [type(layer).__name__ for _, _, layer in layers(store)] == ["LlamaDecoderLayer"] * 2
    store.base._no_split_modules = None  # then the longest list of one class
    assert [type(layer).__name__ for _, _, layer in layers(store)] == ["LlamaDecoderLayer"] * 2
    plain = SimpleNamespace(base=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`Linear` names no decoder layers"):
        layers(plain)


def test_quantized_weights_are_not_sharded():
    store = nn.Module()
    store.packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"`packed` is quantized \(torch.uint8\), and FSDP1 shards floating-point"):
        check_floats(store, "FSDP1")


def test_a_trained_trunk_is_float32_where_gradients_are_scaled():
    store = RoleModel(tiny.model().bfloat16())
    unscalable_to_float32(store.requires_grad_(False))
    assert {p.dtype for p in store.parameters()} == {torch.bfloat16}  # a frozen one has no gradients
    unscalable_to_float32(store.requires_grad_(True))
    assert {p.dtype for p in store.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["ignored_modules", "ignored_states"])
def test_nothing_is_left_out_of_fsdp1(name):
    with pytest.raises(ValueError, match=f"`FSDPStrategy\\({name}=...\\)`: what is left out would train apart"):
        FSDP1(FSDPStrategy(**{name: [nn.Linear(2, 2)]}))


def test_fsdp1_leaves_dtypes_alone_without_a_precision():
    """As every other strategy: Lightning's would make a bfloat16 trunk float32."""
    strategy = FSDPStrategy(precision_plugin=FSDPPrecision("32-true"))
    FSDP1(strategy)
    trunk = nn.Linear(2, 2).bfloat16()
    assert strategy.precision_plugin.convert_module(trunk).weight.dtype == torch.bfloat16
    assert strategy.mixed_precision_config == MixedPrecision()
    half = FSDPStrategy(precision_plugin=FSDPPrecision("bf16-true"))
    FSDP1(half)
    assert half.precision_plugin.convert_module(nn.Linear(2, 2)).weight.dtype == torch.bfloat16
    assert half.mixed_precision_config.param_dtype == torch.bfloat16
    assert half.mixed_precision_config.buffer_dtype is None


def test_float32_buffers_stay_float32():
    store = RoleModel(tiny.model()).to(torch.bfloat16)
    assert {p.dtype for p in store.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in store.buffers()} == {torch.float32}


def test_other_strategies_are_refused():
    with pytest.raises(ValueError, match=r"`Trainer\(strategy=...\)` is a SimpleNamespace, which is not supported"):
        sharding_for(SimpleNamespace())


@pytest.mark.parametrize(
    ("role", "config", "match"),
    [
        ("critic", RoleConfig(sharded=True), r"`critic.sharded=True`: a trained role is cut over the ranks"),
        ("reference", RoleConfig(sharded=True, device="cpu"), r"`reference.device='cpu'` puts it on another"),
    ],
)
def test_options_of_sharding_that_contradict_each_other(role, config, match):
    sources = {"actor": tiny.folder(), "critic": None, "reference": None} | {role: config}
    options = dict(critic_start=None, layout="separate", lora=None, has_critic=True, has_reference=True, seed=0)
    with pytest.raises(ValueError, match=match):
        plan_roles(**sources, **options)


def test_empty_roles_are_built_without_reading_weights():
    options = dict(critic_start=None, layout="separate", lora=None, has_critic=True, has_reference=True, seed=0)
    plan = plan_roles(actor=tiny.folder("llama-tied"), critic=None, reference=None, **options)
    plan.empty = True
    roles = build_roles(plan, torch.device("cpu"))
    for view in (roles.actor, roles.critic, roles.reference):
        assert all(p.is_meta for p in view.store.parameters())


def test_one_process_agrees_with_itself():
    assert gather(3) == [3]
    assert together("this", lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        together("this", lambda: 1 // 0)
    check_same({"a": 1})


def test_a_strategy_of_one_rank_logs_an_evaluation_without_a_warning(tmp_path):
    """Lightning warns wherever there is a process group, if only of one rank."""
    alone, spread = (PPOLightningModule(tiny.folder(), reward=tiny.count_w1, sampling=SHORT) for _ in range(2))
    data = PromptDataModule(tiny.rows(8), val=tiny.rows(5), batch_size=8, val_batch_size=4)
    want = tiny.fit(tmp_path, alone, data).callback_metrics["val/reward"]
    got = tiny.fit(tmp_path, spread, data, strategy=DDPStrategy(process_group_backend="gloo"))
    assert got.callback_metrics["val/reward"] == want
    again = pickle.loads(pickle.dumps(spread))  # what a fit leaves goes with the trainer, not with the module
    assert torch.equal(again.state_dict()["actor.model.lm_head.weight"], spread.actor.model.lm_head.weight)
    torch.distributed.destroy_process_group()
    tiny.fit(tmp_path, again, data)
