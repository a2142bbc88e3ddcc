"""Options and callbacks that meet: roles that a callback freezes, steps without gradients, gradient scalers."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision

from lit_ppo import OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule
from lit_ppo.callbacks import FreezeParameters
from lit_ppo.rewards import FunctionReward


def module_of(reward=tiny.count_w1, **ppo):
    return PPOLightningModule(
        tiny.folder(),
        reward,
        sampling={"max_new_tokens": 6},
        ppo=PPOConfig(epochs=2, minibatches=2, micro_batch_size=3, **ppo),
        optim=OptimConfig(actor_lr=1e-3),
    )


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_values_at_the_cut_in_every_precision(tmp_path, precision):
    """A training step in `bf16-true` makes tensors bfloat16 where none is asked for."""
    module = module_of(bootstrap_truncated=True)
    found, plain = [], module.value_at_cut
    module.value_at_cut = lambda rollout: (found.append(plain(rollout)), found[-1])[1]
    assert tiny.fit(tmp_path, module, precision=precision).global_step == 8
    assert [x.dtype for x in found] == [torch.float32] * 2


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_reward_functions_compute_as_they_would_alone(tmp_path, precision):
    """Neither a default dtype of bfloat16 nor autocast reaches them."""

    def exact(responses, **_):
        return torch.tensor([[1.2345]] * len(responses)) @ torch.tensor([1.0])

    trainer = tiny.fit(tmp_path, module_of(exact), precision=precision)
    assert trainer.logged_metrics["objective/scores"] == pytest.approx(1.2345, abs=1e-6)


class Steps(Callback):
    """Which roles had gradients at each step; makes some of them NaN."""

    def __init__(self, spoil=()):
        self.seen, self.spoil = [], spoil

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        alive = {r for r, named in pl_module.trained.items() if any(p.grad is not None for _, p in named)}
        if trainer.global_step in self.spoil:
            for role in alive:
                pl_module.trained[role][0][1].grad.fill_(math.nan)
        self.seen.append(sorted(alive))


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_role_that_a_callback_freezes_waits_while_the_other_trains(tmp_path, role, sequential):
    steps = Steps()
    module = module_of(sequential_roles=sequential)
    trainer = tiny.fit(tmp_path, module, callbacks=[FreezeParameters(role, until="step 4"), steps])
    assert trainer.global_step == 8
    other = "critic" if role == "actor" else "actor"
    both = [["actor"], ["critic"]] * 4 if sequential else [["actor", "critic"]] * 4
    assert steps.seen == [[other]] * 4 + both


def test_nothing_moves_while_every_role_is_frozen(tmp_path):
    steps = Steps()
    module = module_of(critic_warmup_iterations=1)
    trainer = tiny.fit(tmp_path, module, callbacks=[FreezeParameters("critic", until="step 4"), steps])
    assert trainer.global_step == 8
    assert steps.seen == [[]] * 4 + [["actor", "critic"]] * 4


@pytest.mark.filterwarnings("ignore:The gradient of iteration")
def test_bad_gradients_that_are_not_in_a_row_do_not_stop_a_run_with_a_frozen_critic(tmp_path):
    """The good steps between them count, though the critic has no gradient in them."""
    module = module_of()
    steps = Steps(spoil=(0, 2, 4, 6))
    trainer = tiny.fit(tmp_path, module, callbacks=[FreezeParameters("critic", until="step 100"), steps])
    assert trainer.global_step == 8
    assert module.nonfinite_in_a_row == 0


@pytest.mark.filterwarnings("ignore:The rewards skipped every sample", "ignore:Reward .second_is_bad.")
@pytest.mark.parametrize("sequential", [False, True])
def test_a_gradient_scaler_survives_an_iteration_whose_samples_are_all_skipped(tmp_path, sequential):
    calls = []

    def second_is_bad(responses, **_):
        calls.append(len(responses))
        return [math.nan if len(calls) != 2 else 1.0 for _ in responses]

    module = module_of(FunctionReward(second_is_bad, on_error="skip"), sequential_roles=sequential)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer = tiny.fit(
        tmp_path, module, plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler)], max_epochs=2
    )
    assert trainer.global_step == 16
    assert trainer.precision_plugin.scaler is scaler
    assert all(p.isfinite().all() for p in module.parameters())


def test_an_overflow_of_the_actor_drops_the_whole_step_one_by_one_too(tmp_path):
    """As with both at once: a critic that learns from what the policy did not would be another run."""
    runs = []
    for sequential in (False, True):
        module = module_of(sequential_roles=sequential)
        trainer = tiny.trainer(
            tmp_path, plugins=[MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", 1024.0))]
        )

        def overflow(grad, trainer=trainer):
            return grad * (math.inf if trainer.global_step == 2 else 1.0)

        module.on_train_start = lambda module=module, hook=overflow: module.trained["actor"][0][1].register_hook(hook)
        trainer.fit(module, PromptDataModule(tiny.rows(), batch_size=8))
        assert trainer.global_step == 8
        assert trainer.precision_plugin.scaler.get_scale() == 512.0
        assert module.skipped_steps == module.nonfinite_in_a_row == 0  # a scaler's own are no fault
        runs.append(module)
    for (name, one), (_, other) in zip(*(run.named_parameters() for run in runs), strict=True):
        assert torch.equal(one, other), name
