"""One PPO iteration, and what must not change it."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lit_ppo import (
    LoRAConfig,
    OptimConfig,
    PPOConfig,
    PPOLightningModule,
    PromptDataModule,
    RewardConfig,
    RoleConfig,
    SamplingConfig,
    preflight,
)
from lit_ppo.algo.advantages import gae
from lit_ppo.experience import Rollout
from lit_ppo.rollout.base import TRAIN, Draw

SHARED = {"layout": "shared", "lora": LoRAConfig(r=4)}


def make(actor=None, sampling=None, ppo=None, **options) -> PPOLightningModule:
    defaults = dict(reward=tiny.count_w1, optim=OptimConfig(actor_lr=1e-3, schedule="constant"))
    return PPOLightningModule(
        tiny.folder() if actor is None else actor,
        sampling=SamplingConfig(**({"max_new_tokens": 6, "temperature": 1.0} | (sampling or {}))),
        ppo=PPOConfig(**({"epochs": 1, "minibatches": 1} | (ppo or {}))),
        **(defaults | options),
    )


def weights(module: PPOLightningModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **tolerance) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


class Spy(Callback):
    """Keeps the experience of every iteration, and what hooks of other people's callbacks see."""

    def __init__(self):
        self.experiences, self.grad_norms, self.phases = [], [], []

    def on_fit_start(self, trainer, pl_module):
        score = pl_module.score

        def keep(rollout):
            self.experiences.append(score(rollout))
            return self.experiences[-1]

        pl_module.score = keep
        pl_module.phase_listeners.append(self.phases.append)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norms = [p.grad.norm() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        self.grad_norms.append(torch.stack(norms).norm() if norms else torch.zeros(()))


# --------------------------------------------------------------------------------------------- right from scratch


def test_an_update_is_that_of_the_formulas(tmp_path):
    """The whole iteration again, in float64, row by row, unpadded, with nothing of ours but the GAE."""
    spy, beta, lr = Spy(), 0.2, 1e-3
    module = make(
        ppo={"kl_coef": beta, "value_clip": 0.2, "vf_coef": 0.3, "entropy_coef": 0.01, "max_grad_norm": None},
        sampling={"temperature": 0.8, "max_new_tokens": 5},
        reference=tiny.folder(seed=1),
        optim=OptimConfig(actor_lr=lr, critic_lr=2e-3, schedule="constant", betas=(0.9, 0.95), eps=1e-5),
    )
    trainer = tiny.fit(tmp_path, module, PromptDataModule(tiny.rows(6), batch_size=6), callbacks=[spy])
    experience = spy.experiences[0]

    actor, ref, critic = (tiny.model(seed=s).double() for s in (0, 1, 0))
    head = nn.Linear(32, 1, bias=False).double()
    nn.init.zeros_(head.weight)
    B, R = experience.ids.shape

    def run(model, value_head=None):
        rows = []
        for i in range(B):
            n, r = int(experience.prompts.lengths[i]), int(experience.lengths[i])
            ids = torch.cat([experience.prompts.ids[i, -n:], experience.ids[i, :r]])[None]
            hidden = model.model(input_ids=ids).last_hidden_state[0, n - 1 : n - 1 + r]
            if value_head is not None:
                rows.append(value_head(hidden)[:, 0])
            else:
                table = (model.lm_head(hidden) / 0.8).log_softmax(-1)
                picked = table.gather(-1, experience.ids[i, :r, None])[:, 0]
                rows.append((picked, -(table.exp() * table).sum(-1)))
        return rows

    with torch.no_grad():
        old, refs, values = [o for o, _ in run(actor)], [o for o, _ in run(ref)], run(critic, head)
    text = [
        " ".join(tiny.WORDS[t] for t in row[:n] if t > 3)
        for row, n in zip(experience.ids, experience.lengths, strict=True)
    ]
    scores = tiny.count_w1(text)
    padded = torch.zeros(3, B, R, dtype=torch.float64)
    for i in range(B):
        r = len(old[i])
        padded[0, i, :r] = -beta * (old[i] - refs[i])
        padded[0, i, r - 1] += scores[i]
        padded[1, i, :r] = values[i]
        padded[2, i, :r] = 1
    mask = padded[2].bool()
    advantages, returns = gae(padded[0], padded[1], mask, 1.0, 0.95)
    white = (advantages[mask] - advantages[mask].mean()) / (advantages[mask].var() + 1e-8).sqrt()
    torch.testing.assert_close(experience.advantages[mask].double(), white, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(experience.returns[mask].double(), returns[mask], rtol=1e-4, atol=1e-4)

    logp, entropy = (torch.cat(x) for x in zip(*run(actor), strict=True))
    ratio = (logp - torch.cat(old)).exp()
    policy = torch.maximum(-white * ratio, -white * ratio.clamp(0.8, 1.2)).mean()
    v, v_old, target = torch.cat(run(critic, head)), torch.cat(values), returns[mask]
    value = 0.5 * torch.maximum((v - target) ** 2, (v_old + (v - v_old).clamp(-0.2, 0.2) - target) ** 2).mean()
    (policy + 0.3 * value - 0.01 * entropy.mean()).backward()

    def stepped(weight, gradient, rate):
        return weight - rate * gradient / (gradient.abs() + 1e-5)  # the first step of Adam

    moved = 0
    for name, p in actor.named_parameters():
        torch.testing.assert_close(
            module.actor.model.get_parameter(name).double(), stepped(p, p.grad, lr), rtol=1e-4, atol=lr / 20
        )
        moved += int((p.grad.abs() > 1e-4).sum())
    assert moved > 1000
    torch.testing.assert_close(
        module.critic.model.score.weight.double(), stepped(head.weight, head.weight.grad, 2e-3), rtol=1e-4, atol=1e-4
    )
    logged = trainer.callback_metrics
    assert float(logged["loss/policy_avg"]) == pytest.approx(policy.item(), abs=1e-4)
    assert float(logged["loss/value_avg"]) == pytest.approx(value.item(), rel=1e-3)
    assert float(logged["objective/kl"]) == pytest.approx(
        sum(float((o - r).sum()) for o, r in zip(old, refs, strict=True)) / B, rel=1e-3
    )
    assert float(logged["objective/scores"]) == pytest.approx(sum(scores) / B)
    assert float(logged["policy/entropy_avg"]) == pytest.approx(entropy.mean().item(), rel=1e-4)


# ------------------------------------------------------------------------------------------------------ invariances


@pytest.mark.parametrize("layout", [{}, SHARED], ids=["separate", "shared"])
@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_the_micro_batch_size_changes_nothing(tmp_path, layout, mode):
    ppo = {"epochs": 2, "minibatches": 2, "loss_aggregation": mode, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
    results = []
    for micro, score in ((None, None), (1, None), (3, 5)):
        module = make(ppo={**ppo, "micro_batch_size": micro, "score_batch_size": score}, **layout)
        trainer = tiny.fit(tmp_path, module)
        logged = {
            k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("time/") and "per_s" not in k
        }
        results.append((weights(module), logged))
    for other, logged in results[1:]:
        assert_same(results[0][0], other, rtol=1e-4, atol=2e-5)
        assert logged == pytest.approx(results[0][1], rel=2e-3, abs=2e-3)


def test_a_plain_change_of_the_data_does_change_the_weights(tmp_path):
    """So that the invariances above can fail."""
    a, b = make(), make(seed=1)
    tiny.fit(tmp_path, a)
    tiny.fit(tmp_path, b)
    with pytest.raises(AssertionError):
        assert_same(weights(a), weights(b), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("pad", ["<eos>", None])
def test_the_pad_token_changes_nothing(tmp_path, pad):
    usual, other = make(), make(actor=tiny.folder(pad=pad))
    tiny.fit(tmp_path, usual)
    tiny.fit(tmp_path, other)
    assert_same(weights(usual), weights(other))


def test_the_rollout_batch_size_changes_nothing(tmp_path):
    whole, cut = make(), make(ppo={"rollout_batch_size": 3})
    tiny.fit(tmp_path, whole)
    tiny.fit(tmp_path, cut)
    assert_same(weights(whole), weights(cut), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("layout", [{}, {"lora": LoRAConfig(r=4)}, SHARED], ids=["full", "lora", "shared"])
@pytest.mark.parametrize("micro", [None, 3])
def test_the_first_ratio_is_exactly_one(tmp_path, layout, micro):
    seen = []

    class First(Callback):
        def on_fit_start(self, trainer, pl_module):
            loss = pl_module.loss

            def watch(batch, tokens, sequences, roles):
                if not pl_module.updated:
                    new, _ = pl_module.views.actor(batch, **pl_module.tempering)
                    seen.append((new - batch.old_logprobs)[batch.mask].abs().max().item())
                return loss(batch, tokens, sequences, roles)

            pl_module.loss = watch

    module = make(ppo={"minibatches": 2, "epochs": 2, "micro_batch_size": micro}, **layout)
    trainer = tiny.fit(tmp_path, module, callbacks=[First()])
    assert len(seen) == 2 * (1 if micro is None else 2)
    assert max(seen) == 0.0
    assert float(trainer.callback_metrics["policy/ratio_first_step"]) == 1.0


def test_another_score_batch_size_keeps_the_first_ratio_within_rounding(tmp_path):
    trainer = tiny.fit(tmp_path, make(ppo={"micro_batch_size": 2, "score_batch_size": 7}))
    assert float(trainer.callback_metrics["policy/ratio_first_step"]) == pytest.approx(1.0, abs=1e-5)


# ---------------------------------------------------------------------------------------------------- the algorithm


@pytest.mark.parametrize("layout", [{}, SHARED], ids=["separate", "shared"])
def test_the_reward_rises(tmp_path, layout):
    module = make(
        ppo={"epochs": 2, "minibatches": 2, "kl_coef": 0.01},
        optim=OptimConfig(actor_lr=3e-2 if layout else 1e-2, critic_lr=1e-2, schedule="constant"),
        sampling={"max_new_tokens": 8},
        actor=tiny.model(scale=1.0),
        tokenizer=tiny.tokenizer(),
        **layout,
    )
    rewards = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, *_):
            rewards.append(float(trainer.callback_metrics["objective/scores"]))

    tiny.fit(tmp_path, module, PromptDataModule(tiny.rows(32), batch_size=32), max_epochs=25, callbacks=[Watch()])
    rise = 0.15 if layout else 1.0  # adapters of a random trunk can do less; the noise is about 0.03
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + rise


def test_an_untouched_policy_has_no_kl_and_the_adaptive_controller_moves(tmp_path):
    spy = Spy()
    module = make(ppo={"kl_coef": 0.1, "kl_target": 1.0, "kl_horizon": 10})
    trainer = tiny.fit(tmp_path, module, callbacks=[spy], max_epochs=1, limit_train_batches=1)
    assert torch.equal(spy.experiences[0].old_logprobs, spy.experiences[0].ref_logprobs)
    assert float(trainer.callback_metrics["objective/kl"]) == 0.0
    assert float(trainer.callback_metrics["kl_coef"]) == pytest.approx(0.1)  # the value before the update
    assert module.kl.value == pytest.approx(0.1 * (1 - 0.2 * 8 / 10))


def test_no_kl_means_no_reference(tmp_path):
    module = make(ppo={"kl_coef": 0.0})
    trainer = tiny.fit(tmp_path, module)
    assert module.views.reference is None
    assert "objective/kl" not in trainer.callback_metrics
    assert "objective/kl" in tiny.fit(tmp_path, make(ppo={"kl_coef": 0.0, "log_kl": True})).callback_metrics


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_pp"])
def test_estimators_without_a_critic_build_none(tmp_path, advantage):
    spy = Spy()
    module = make(ppo={"advantage": advantage}, sampling={"samples_per_prompt": 4})
    trainer = tiny.fit(tmp_path, module, callbacks=[spy])
    assert module.views.critic is None
    assert not any(name.startswith("critic") for name in module.state_dict())
    assert len(spy.experiences[0]) == 32
    assert [g["name"] for g in trainer.optimizers[0].param_groups] == ["actor"]
    assert "loss/value_avg" not in trainer.callback_metrics
    if advantage != "reinforce_pp":  # the advantages of a prompt's samples add up to nothing
        experience = spy.experiences[0]
        first = experience.advantages[:, 0]
        groups = experience.prompts.index // 4
        sums = torch.zeros(8).index_add(0, groups, first)
        torch.testing.assert_close(sums, torch.zeros(8), atol=1e-4, rtol=0)
        assert first.abs().max() > 0.1


def test_the_samples_of_a_prompt_differ(tmp_path):
    spy = Spy()
    tiny.fit(tmp_path, make(sampling={"samples_per_prompt": 3}), callbacks=[spy])
    experience = spy.experiences[0]
    assert sorted(experience.prompts.index.tolist()) == list(range(24))
    groups = {}
    for text, ids in zip(experience.prompts.text, experience.ids.tolist(), strict=True):
        groups.setdefault(text, set()).add(tuple(ids))
    assert len(groups) == 8
    assert all(len(samples) == 3 for samples in groups.values())


def test_critic_warm_up_leaves_the_actor_alone(tmp_path):
    module, seen = make(ppo={"critic_warmup_iterations": 2}), []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append((weights(pl_module), pl_module.critic.model.score.weight.abs().sum()))

    tiny.fit(tmp_path, module, max_epochs=2, callbacks=[Watch()])
    before = {f"actor.model.{name}": weight for name, weight in tiny.model().state_dict().items()}
    for state, head in seen[:2]:
        assert_same(before, {name: w for name, w in state.items() if name.startswith("actor.")})
        assert head > 0
    assert any(not torch.equal(before[name], seen[2][0][name]) for name in before)


def test_a_warm_up_as_long_as_the_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"`ppo.critic_warmup_iterations=2` leaves nothing of the run's 2 iterations"):
        tiny.fit(tmp_path, make(ppo={"critic_warmup_iterations": 2}))


def test_target_kl_ends_the_epochs_early(tmp_path):
    module = make(ppo={"epochs": 10, "target_kl": 1e-9}, optim=OptimConfig(actor_lr=1e-2, schedule="constant"))
    trainer = tiny.fit(tmp_path, module, limit_train_batches=1)
    assert trainer.global_step == 2  # the first epoch is on-policy: its KL is 0


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"missing_eos_penalty": 2.0}, lambda s, stopped: s - 2.0 * (not stopped)),
        ({"score_clip": 0.5}, lambda s, stopped: max(-0.5, min(0.5, s))),
        ({"scale_scores": True}, None),
    ],
)
def test_scores_are_shaped_as_asked(tmp_path, option, expected):
    spy = Spy()
    module = make(
        ppo={"kl_coef": 0.0, "lam": 1.0, **option},
        sampling={"max_new_tokens": 12},
        actor=tiny.model(scale=1.0),
        tokenizer=tiny.tokenizer(),
    )
    tiny.fit(tmp_path, module, limit_train_batches=1, callbacks=[spy])
    experience = spy.experiences[0]
    texts = [
        " ".join(tiny.WORDS[t] for t in ids[:n] if t > 3)
        for ids, n in zip(experience.ids, experience.lengths, strict=True)
    ]
    raw = tiny.count_w1(texts)
    if expected is None:
        deviation = torch.tensor(raw).std().item()
        wanted = [s / deviation for s in raw]
    else:
        wanted = [expected(s, stopped) for s, stopped in zip(raw, experience.stopped.tolist(), strict=True)]
    # gamma = lam = 1 and a critic at 0: every return is the score
    torch.testing.assert_close(experience.returns[:, 0], torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def test_truncated_responses_bootstrap_from_the_value_at_the_cut(tmp_path):
    spy, critic = Spy(), Path(tiny.folder(labels=1, seed=5))
    module = make(
        ppo={"kl_coef": 0.0, "bootstrap_truncated": True, "lam": 1.0, "micro_batch_size": 3}, critic=str(critic)
    )
    tiny.fit(tmp_path, module, limit_train_batches=1, callbacks=[spy])
    experience = spy.experiences[0]
    from transformers import AutoModelForSequenceClassification

    fresh = AutoModelForSequenceClassification.from_pretrained(critic).eval()
    cut = int((~experience.stopped).nonzero()[0])
    n, r = int(experience.prompts.lengths[cut]), int(experience.lengths[cut])
    ids = torch.cat([experience.prompts.ids[cut, -n:], experience.ids[cut, :r]])[None]
    with torch.no_grad():
        value = fresh.score(fresh.model(input_ids=ids).last_hidden_state[0, -1])
    score = tiny.count_w1([" ".join(tiny.WORDS[t] for t in experience.ids[cut, :r] if t > 3)])[0]
    assert float(experience.returns[cut, r - 1]) == pytest.approx(score + float(value), rel=1e-4)


def scores_nan_for_short(responses, **_):
    return [math.nan if len(r.split()) % 2 else float(len(r)) for r in responses]


def test_a_skipped_sample_has_no_part_in_anything(tmp_path):
    from lit_ppo import RewardConfig

    spy = Spy()
    reward = RewardConfig(source="test_module.scores_nan_for_short", on_error="skip")
    module = make(
        reward=reward, sampling={"max_new_tokens": 12}, actor=tiny.model(scale=1.0), tokenizer=tiny.tokenizer()
    )
    with pytest.warns(UserWarning, match="left out of the update"):
        trainer = tiny.fit(tmp_path, module, limit_train_batches=1, callbacks=[spy])
    experience = spy.experiences[0]
    assert not experience.keep.all()
    assert experience.keep.any()
    assert not experience.advantages[~experience.keep].any()
    assert not experience.loss_mask[~experience.keep].any()
    assert float(trainer.callback_metrics["rollout/skipped_rate"]) == pytest.approx(1 - experience.keep.float().mean())
    assert all(v.isfinite().all() for v in module.state_dict().values())


def all_nan_at_first(responses, **_):
    all_nan_at_first.calls += 1
    return [math.nan if all_nan_at_first.calls == 1 else float(len(r)) for r in responses]


@pytest.mark.parametrize("advantage", ["gae", "reinforce_pp"])
def test_an_iteration_of_which_every_sample_is_skipped_changes_nothing(tmp_path, advantage):
    from lit_ppo import RewardConfig

    all_nan_at_first.calls = 0
    reward = RewardConfig(source="test_module.all_nan_at_first", on_error="skip")
    module = make(reward=reward, ppo={"advantage": advantage, "minibatches": 2, "whiten_rewards": True})
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append((float(trainer.callback_metrics["rollout/skipped_rate"]), weights(pl_module)))

    with pytest.warns(UserWarning, match="skipped every sample of iteration 0|left out of the update"):
        trainer = tiny.fit(tmp_path, module, callbacks=[Watch()])
    assert [rate for rate, _ in seen] == [1.0, 0.0]
    assert_same(dict(tiny.model().state_dict()), {n[12:]: w for n, w in seen[0][1].items() if n.startswith("actor.")})
    assert trainer.global_step == 4
    with pytest.raises(AssertionError):
        assert_same(seen[0][1], seen[1][1])


def test_a_gradient_that_is_not_finite_is_dropped_and_three_in_a_row_stop_the_run(tmp_path):
    class Poison(Callback):
        def __init__(self, *steps):
            self.steps, self.step = steps, 0

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if self.step in self.steps:
                next(iter(pl_module.actor.parameters())).grad.fill_(math.nan)
            self.step += 1

    module = make(ppo={"epochs": 2})
    with pytest.warns(UserWarning, match="gradient of iteration 0 is not finite: this update is dropped"):
        trainer = tiny.fit(tmp_path, module, callbacks=[Poison(1)], limit_train_batches=1)
    assert float(trainer.callback_metrics["optim/skipped_steps"]) == 1.0
    assert trainer.global_step == 2
    once = make(ppo={"epochs": 1})
    tiny.fit(tmp_path, once, limit_train_batches=1)
    assert_same(weights(module), weights(once))  # the dropped update changed nothing
    with (
        pytest.warns(UserWarning, match="dropped"),
        pytest.raises(FloatingPointError, match="3 updates in a row had a gradient that is not finite; the run stops"),
    ):
        tiny.fit(tmp_path, make(ppo={"epochs": 4}), callbacks=[Poison(0, 1, 2)])


def test_gradients_are_clipped_by_role(tmp_path):
    spy, norms = Spy(), []

    class After(Callback):
        def on_train_batch_end(self, trainer, *_):
            norms.append({k: float(v) for k, v in trainer.callback_metrics.items() if "grad_norm" in k})

    module = make(ppo={"max_grad_norm": 1e-3})
    seen = {}
    original = module.on_before_optimizer_step

    def clip(optimizer):
        original(optimizer)
        for role, named in module.trained.items():
            seen[role] = torch.stack([p.grad.norm() for _, p in named if p.grad is not None]).norm().item()

    module.on_before_optimizer_step = clip
    tiny.fit(tmp_path, module, callbacks=[spy, After()], limit_train_batches=1)
    assert norms[0]["optim/grad_norm_actor"] > 1e-2  # what is logged is the norm before clipping
    assert seen == pytest.approx({"actor": 1e-3, "critic": 1e-3}, rel=1e-3)
    assert spy.grad_norms[0] > 1e-2  # other people's callbacks see the hook


def test_the_dry_run_finds_the_micro_batch_and_changes_nothing(tmp_path, monkeypatch):
    """Scoring follows the update's size, so that the first ratio stays 1."""
    from lit_ppo.callbacks import OOMGuard
    from lit_ppo.roles.model import RoleModel

    plain = make(ppo={"kl_loss_coef": 0.1})
    tiny.fit(tmp_path, plain)
    hidden, tried = RoleModel._hidden, []

    def short_of_memory(self, rollout, layout):
        if torch.is_grad_enabled():
            tried.append((len(rollout), rollout.prompts.ids.shape[1], rollout.ids.shape[1]))
            if len(rollout) > 3:
                raise torch.OutOfMemoryError("made by the test")
        return hidden(self, rollout, layout)

    monkeypatch.setattr(RoleModel, "_hidden", short_of_memory)
    guard, guarded = OOMGuard(), make(ppo={"kl_loss_coef": 0.1})
    trainer = tiny.fit(tmp_path, guarded, callbacks=[guard])
    assert tried[0] == (8, 5, 6)  # the longest prompt and response of the whole batch
    assert guard.policy.state_dict()["sizes"] == {"update": 3}
    assert float(trainer.callback_metrics["oom/events"]) == 0
    assert float(trainer.callback_metrics["policy/ratio_first_step"]) == 1.0
    assert_same(weights(plain), weights(guarded), rtol=1e-4, atol=2e-5)


def test_the_dry_run_tries_the_actor_too_while_the_critic_warms_up(tmp_path, monkeypatch):
    from lit_ppo.callbacks import OOMGuard
    from lit_ppo.roles.model import RoleModel

    hidden, guarded = RoleModel._hidden, make(ppo={"critic_warmup_iterations": 1})

    def short_of_memory(self, rollout, layout):
        if torch.is_grad_enabled() and self is guarded.actor and len(rollout) > 3:
            raise torch.OutOfMemoryError("made by the test")
        return hidden(self, rollout, layout)

    monkeypatch.setattr(RoleModel, "_hidden", short_of_memory)
    guard = OOMGuard()
    trainer = tiny.fit(tmp_path, guarded, callbacks=[guard])
    assert guard.policy.state_dict()["sizes"] == {"update": 3}
    assert float(trainer.callback_metrics["oom/events"]) == 0  # nothing was left to find out after the warm-up


def test_a_budget_of_tokens_is_cut_too_when_memory_runs_out(tmp_path, monkeypatch):
    from lit_ppo.callbacks import OOMGuard
    from lit_ppo.roles.model import RoleModel

    plain = make()
    tiny.fit(tmp_path, plain)
    hidden, largest = RoleModel._hidden, [0]

    def short_of_memory(self, rollout, layout):
        tokens = sum(map(sum, rollout.on_host()))
        if torch.is_grad_enabled():
            if tokens > 20:
                raise torch.OutOfMemoryError("made by the test")
            largest[0] = max(largest[0], tokens)
        return hidden(self, rollout, layout)

    monkeypatch.setattr(RoleModel, "_hidden", short_of_memory)
    for dry_run in (True, False):
        guard, guarded = OOMGuard(dry_run=dry_run), make(ppo={"micro_batch_tokens": 64})
        trainer = tiny.fit(tmp_path, guarded, callbacks=[guard])
        assert set(guard.policy.state_dict()["sizes"]) == {"update (tokens)"}
        assert guard.policy.state_dict()["sizes"]["update (tokens)"] == (11 if dry_run else 16)
        assert 8 < largest[0] <= 20
        assert float(trainer.callback_metrics["policy/ratio_first_step"]) == 1.0
        assert_same(weights(plain), weights(guarded), rtol=1e-4, atol=2e-5)


def test_a_budget_of_tokens_is_not_cut_further_once_every_row_is_alone(tmp_path, monkeypatch):
    from lit_ppo.callbacks import OOMGuard
    from lit_ppo.memory.retry import OutOfMemoryReport
    from lit_ppo.roles.model import RoleModel

    hidden, tried = RoleModel._hidden, []

    def short_of_memory(self, rollout, layout):
        if torch.is_grad_enabled():
            tried.append(len(rollout))
            raise torch.OutOfMemoryError("made by the test")
        return hidden(self, rollout, layout)

    monkeypatch.setattr(RoleModel, "_hidden", short_of_memory)
    guarded = make(ppo={"micro_batch_tokens": 64})
    with pytest.raises(OutOfMemoryReport, match="One row at a time does not fit either") as stopped:
        tiny.fit(tmp_path, guarded, callbacks=[OOMGuard(dry_run=False)])
    assert "smaller micro-batch" not in str(stopped.value)
    assert len(tried) == 4  # with 64, 32 and 16 tokens, and with 13: the two shortest have 14
    assert tried[-1] == 1


@pytest.mark.parametrize("ppo", [{}, {"micro_batch_size": 4}, {"micro_batch_tokens": 25}])
def test_scoring_cuts_as_the_update_does_where_a_rank_has_more_of_one_minibatch(tmp_path, monkeypatch, ppo):
    def uneven(self, rollout, epoch):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(self.iteration))
        yield from (order[:6], order[6:])  # of 16 over two ranks, say: the other has 2 and 6

    monkeypatch.setattr(PPOLightningModule, "minibatches", uneven)
    cut = {"score": [], "update": []}
    views, part = make(ppo={"minibatches": 2} | ppo), Rollout.part

    def recorded(self, rows):
        if views.phase in cut:
            cut[views.phase].append(self.prompts.index[rows].tolist())
        return part(self, rows)

    monkeypatch.setattr(Rollout, "part", recorded)
    trainer = tiny.fit(tmp_path, views)
    assert cut["score"] == cut["update"]
    assert float(trainer.callback_metrics["policy/ratio_first_step"]) == 1.0


@pytest.mark.parametrize("layout", [{}, SHARED])
def test_neither_packing_nor_a_budget_of_tokens_changes_anything(tmp_path, layout):
    results = []
    for ppo in (
        {},
        {"packing": False},
        {"micro_batch_tokens": 25, "epochs": 2},
        {"micro_batch_tokens": 1, "epochs": 2},
    ):
        module = make(ppo={"epochs": 2, "minibatches": 2} | ppo, **layout)
        trainer = tiny.fit(tmp_path, module)
        assert float(trainer.callback_metrics["policy/ratio_first_step"]) == 1.0
        assert module.views.actor.store.packs == ("packing" not in ppo)
        results.append(weights(module))
    for result in results[1:]:
        assert_same(results[0], result, rtol=1e-4, atol=2e-5)


def test_a_model_that_cannot_run_packed_says_so_and_runs_padded(tmp_path, caplog):
    model = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=tiny.VOCAB, hidden_size=32, n_layer=1, n_head=2)
    )
    module = make(actor=model, tokenizer=tiny.tokenizer())
    with caplog.at_level("INFO"):
        tiny.fit(tmp_path, module, limit_train_batches=1)
    assert not module.views.actor.store.packs
    assert not module.views.critic.store.packs
    said = "The models run padded: `actor` cannot run packed, as its attention does not go through transformers'"
    assert caplog.text.count(said) == 1


# ------------------------------------------------------------------------------------------------ Lightning's promises


def test_steps_iterations_and_rows_of_the_log(tmp_path):
    logger = CSVLogger(tmp_path)
    module = make(ppo={"epochs": 3, "minibatches": 2}, optim=OptimConfig(actor_lr=1e-3))
    trainer = tiny.fit(tmp_path, module, logger=logger, max_epochs=2)
    assert trainer.global_step == 2 * 2 * 3 * 2
    assert module.iteration == 4
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(r["episode"]) for r in rows] == [8, 16, 24, 32]
    assert [float(r["lr"]) for r in rows] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    glossary = {
        "objective/kl", "objective/kl_token", "objective/entropy", "objective/non_score_reward",
        "objective/rlhf_reward", "objective/scores", "objective/scores_std", "policy/approxkl_avg",
        "policy/clipfrac_avg", "policy/entropy_avg", "policy/ratio_first_step", "loss/policy_avg", "loss/value_avg",
        "val/clipfrac_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens", "critic/explained_var", "episode",
        "lr", "kl_coef", "rollout/length_mean", "rollout/length_max", "rollout/eos_rate", "rollout/truncated_rate",
        "rollout/logprob_gap", "rollout/tokens_per_s", "optim/grad_norm_actor", "optim/grad_norm_critic",
        "optim/skipped_steps", "time/rollout", "time/score", "time/update", "time/idle", "reward/count_w1",
    }  # fmt: skip
    assert glossary <= set(rows[-1])
    assert all(rows[-1][name] for name in glossary)


def test_phases_modes_and_frozen_roles(tmp_path):
    spy, modes = Spy(), []
    module = make(reference=RoleConfig(source=tiny.folder()))

    def note(phase):
        if phase is not None:
            modes.append((phase, module.phase))

    module.phase_listeners.append(note)
    during = {}
    loss, generate = module.loss, module.generate

    def in_update(*args):
        during["update"] = (
            module.actor.training and module.critic.training and not module.views.reference.store.training
        )
        return loss(*args)

    def in_rollout(*args):
        rollout = generate(*args)
        during["rollout"] = not module.actor.training
        return rollout

    module.loss, module.generate = in_update, in_rollout
    tiny.fit(tmp_path, module, callbacks=[spy], limit_train_batches=1)
    assert modes == [("rollout", "rollout"), ("score", "score"), ("update", "update")]
    assert during == {"update": True, "rollout": True}
    assert set(module.roles) == {"actor", "critic", "reference"}
    assert not any("reference" in name for name in module.state_dict())
    assert not any(p.requires_grad for p in module.views.reference.store.parameters())
    fresh = tiny.model().state_dict()
    assert all(torch.equal(fresh[n], w) for n, w in module.views.reference.store.model.state_dict().items())


def test_validation_test_and_predict(tmp_path):
    module = make(eval_sampling=SamplingConfig(max_new_tokens=4, temperature=0.0))
    data = PromptDataModule(
        tiny.rows(), val=tiny.rows(10), test=[{"prompt": "w3 w4", "answer": 7}], batch_size=8, val_batch_size=4
    )
    trainer = tiny.trainer(tmp_path)
    trainer.fit(module, data)
    assert {"val/reward", "val/length_mean", "val/eos_rate"} <= set(trainer.callback_metrics)
    first = trainer.validate(module, data, verbose=False)[0]
    before = module.iteration
    assert first == trainer.validate(module, data, verbose=False)[0]  # greedy, and the noise is its own
    assert module.iteration == before
    rows = [row for batch in trainer.predict(module, data) for row in batch]
    assert len(rows) == 10
    assert first["val/reward"] == pytest.approx(sum(tiny.count_w1([r["response"] for r in rows])) / 10)
    result = trainer.test(module, data, verbose=False)[0]
    assert {"test/reward", "test/length_mean"} <= set(result)
    assert module.samples[0]["answer"] == 7
    assert module.samples[0]["prompt"] == "w3 w4"


def test_validation_in_between_changes_nothing_in_training(tmp_path):
    plain, with_validation = make(), make()
    tiny.fit(tmp_path, plain, max_epochs=2)
    data = PromptDataModule(tiny.rows(), val=tiny.rows(4), batch_size=8)
    tiny.fit(tmp_path, with_validation, data, max_epochs=2, val_check_interval=1)
    assert_same(weights(plain), weights(with_validation))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("batch", [["w5", "w6 w7"], [{"prompt": "w5", "x": 1}, {"prompt": "w6 w7", "x": 2}]])
def test_any_dataloader_will_do(tmp_path, batch):
    from torch.utils.data import DataLoader

    seen = []

    def reward(responses, prompts, x=None):
        seen.append((prompts, x))
        return [0.5] * len(responses)

    loader = DataLoader(batch, batch_size=2, collate_fn=list)
    module = make(reward=reward)
    tiny.trainer(tmp_path, max_epochs=1).fit(module, loader)
    assert seen == [(["w5", "w6 w7"], None if isinstance(batch[0], str) else [1, 2])]
    collated = DataLoader([{"prompt": "w5", "x": 1}, {"prompt": "w6", "x": 2}], batch_size=2)
    tiny.trainer(tmp_path, max_epochs=1).fit(make(reward=reward), collated)


def test_models_given_as_modules(tmp_path):
    actor = tiny.model("qwen2-tied")
    start = {n: w.clone() for n, w in actor.state_dict().items()}
    module = make(actor=actor, tokenizer=tiny.tokenizer())
    tiny.fit(tmp_path, module)
    assert module.actor.model is actor
    assert any(not torch.equal(start[n], w) for n, w in actor.state_dict().items())
    assert all(torch.equal(start[n], w) for n, w in module.views.reference.store.model.state_dict().items())


def test_the_critic_starts_from_the_reward_model(tmp_path):
    path = tiny.folder(labels=1, seed=3)
    module = make(reward=path, optim=OptimConfig(actor_lr=0.0, schedule="constant"))
    tiny.fit(tmp_path, module)
    from transformers import AutoModelForSequenceClassification

    assert_same(
        AutoModelForSequenceClassification.from_pretrained(path).state_dict(), dict(module.critic.model.state_dict())
    )
    assert set(module.roles) == {"actor", "critic", "reference", "reward"}
    trusting = make(reward=RewardConfig(path, trust_remote_code=True))
    assert preflight.plan(trusting).critic.trust_remote_code  # it is loaded as the reward model is, revision included


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_bar_shows_phase_speed_and_reward(tmp_path, bar, capsys):
    shown = []
    module = make()

    class Watch(Callback):
        def on_train_batch_start(self, trainer, pl_module, *_):
            pl_module.phase_listeners.append(self.look)
            self.trainer = trainer

        def look(self, phase):
            callback = self.trainer.progress_bar_callback
            if phase is not None and isinstance(callback, TQDMProgressBar):
                shown.append(callback.train_progress_bar.postfix or "")
            elif phase is not None:
                shown.append(callback.progress.tasks[callback.train_progress_bar_id].description)

    tiny.fit(tmp_path, module, enable_progress_bar=True, callbacks=[bar(), Watch()])
    assert any("rollout" in s for s in shown)
    assert any("update" in s and "tok/s" in s and "reward" in s and "kl" in s for s in shown)


def test_the_effective_configuration_is_printed(tmp_path, capsys):
    tiny.fit(tmp_path, make(ppo={"minibatches": 2, "micro_batch_size": 2}, sampling={"samples_per_prompt": 2}))
    printed = " ".join(capsys.readouterr().out.split())
    for text in (
        "actor", "critic", "reference", "float32", "8 prompts x 2 samples = 16 episodes",
        "1 epochs x 2 minibatches = 2 optimizer steps", "micro-batches of 2", "KL k1 x 0.05", "seed 0",
    ):  # fmt: skip
        assert text in printed, text


@pytest.mark.parametrize("layout", [{}, SHARED], ids=["separate", "shared"])
@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_an_iteration_in_other_precisions(tmp_path, layout, precision):
    spy = Spy()
    module = make(ppo={"minibatches": 2, "micro_batch_size": 3}, **layout)
    trainer = tiny.fit(tmp_path, module, precision=precision, callbacks=[spy])
    first = spy.experiences[0]
    assert torch.equal(first.old_logprobs, first.ref_logprobs)  # the reference has the actor's dtype
    assert first.old_logprobs.dtype == first.advantages.dtype == torch.float32
    assert float(trainer.callback_metrics["policy/ratio_first_step"]) == pytest.approx(1.0, abs=1e-5)
    dtypes = {p.dtype for named in module.trained.values() for _, p in named}
    assert dtypes == {{"bf16-true": torch.bfloat16, "64-true": torch.float64, "bf16-mixed": torch.float32}[precision]}
    if precision == "bf16-true":
        assert all(s["master"].dtype == torch.float32 for s in trainer.optimizers[0].state.values())


def test_a_dtype_that_the_precision_would_overrule_is_an_error(tmp_path):
    role = RoleConfig(source=tiny.folder(), dtype="float32")
    with pytest.raises(ValueError, match=r"`actor.dtype='float32'` contradicts the trainer's precision.*bfloat16"):
        tiny.fit(tmp_path, make(actor=role), precision="bf16-true")


def test_bf16_weights_learn_at_a_small_learning_rate(tmp_path):
    """Plain bf16 AdamW would round every one of these updates away."""
    role = RoleConfig(source=tiny.folder(), dtype="bfloat16")
    module = make(actor=role, critic=role, optim=OptimConfig(actor_lr=1e-5, schedule="constant"), ppo={"epochs": 4})
    tiny.fit(tmp_path, module, max_epochs=4)
    masters = [s["master"] for s in module.trainer.optimizers[0].state.values()]
    assert masters
    assert all(m.dtype == torch.float32 for m in masters)
    start = tiny.model().bfloat16().float().state_dict()
    moved = [
        (module.trainer.optimizers[0].state[p]["master"] - start[n]).abs().max()
        for n, p in module.actor.model.named_parameters()
    ]
    assert max(moved) > 5e-5


def test_the_engine_can_be_asked_directly():
    module = make()
    module.configure_model()
    from lit_ppo import preflight

    prompts = preflight.as_prompts(["w4 w5"], module)
    a = module.generate(prompts, module.sampling, TRAIN, 0)
    b = module.engine.generate(prompts, module.sampling, Draw(seed=0, iteration=0))
    assert torch.equal(a.ids, b.ids)
    assert replace(a, stopped=a.stopped).mask.shape == a.ids.shape
