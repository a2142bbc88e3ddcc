"""The sampler's log-probs as the old ones: the same numbers within rounding, one forward less, the gap measured."""

from __future__ import annotations

import pytest
import tiny
import torch

from lit_ppo import OptimConfig, PPOConfig, PPOLightningModule
from lit_ppo.roles.model import RoleView


def run(tmp_path, monkeypatch, source, **sampling):
    forwards = {"policy": 0}
    plain = RoleView.__call__

    def call(self, rollout, **options):
        if self is module.views.actor and not torch.is_grad_enabled():
            forwards["policy"] += len(rollout)
        return plain(self, rollout, **options)

    monkeypatch.setattr(RoleView, "__call__", call)
    module = PPOLightningModule(
        tiny.folder(),
        tiny.count_w1,
        sampling={"max_new_tokens": 6} | sampling,
        ppo=PPOConfig(old_logprobs=source, micro_batch_size=2, epochs=1),
        optim=OptimConfig(actor_lr=1e-3),
    )
    kept = []
    update = module.update
    monkeypatch.setattr(module, "update", lambda experience: (kept.append(experience), update(experience)))
    trainer = tiny.fit(tmp_path / source, module)
    return module, kept, trainer.logged_metrics, forwards["policy"]


@pytest.mark.filterwarnings("ignore:.sampling.top_k")
@pytest.mark.parametrize("sampling", [{}, {"top_k": 4}])
def test_they_are_the_same_within_rounding(tmp_path, monkeypatch, sampling):
    exact, kept, metrics, forwards = run(tmp_path, monkeypatch, "forward", **sampling)
    reused, kept_reused, metrics_reused, forwards_reused = run(tmp_path, monkeypatch, "rollout", **sampling)
    assert (forwards, forwards_reused) == (16, 4)  # of 2 x 8 rows, a micro-batch of 2 in each iteration
    first, other = kept[0], kept_reused[0]
    assert torch.equal(first.ids, other.ids)
    assert torch.equal(other.old_logprobs, other.logprobs)
    torch.testing.assert_close(other.old_logprobs, first.old_logprobs, rtol=1e-5, atol=1e-5)
    assert metrics["policy/ratio_first_step"] == 1
    assert metrics_reused["policy/ratio_first_step"] == pytest.approx(1, abs=1e-5)
    assert 0 <= metrics_reused["rollout/logprob_gap"] < 1e-5
    assert metrics_reused["objective/entropy"] > 0
    for (name, p), (_, q) in zip(exact.named_parameters(), reused.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=2e-4, msg=name)


def test_the_gap_is_that_of_the_first_micro_batch(tmp_path, monkeypatch):
    """An engine whose log-probs are off by 0.25 says so."""
    module = PPOLightningModule(
        tiny.folder(), tiny.count_w1, sampling={"max_new_tokens": 6}, ppo=PPOConfig(old_logprobs="rollout", epochs=1)
    )
    generate = PPOLightningModule.generate

    def off(self, *args):
        rollout = generate(self, *args)
        rollout.logprobs = torch.where(rollout.mask, rollout.logprobs - 0.25, 0.0)
        return rollout

    monkeypatch.setattr(PPOLightningModule, "generate", off)
    metrics = tiny.fit(tmp_path, module).logged_metrics
    assert metrics["rollout/logprob_gap"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["policy/ratio_first_step"] == pytest.approx(2.718281828**0.25, rel=1e-3)


def test_the_value_is_checked():
    with pytest.raises(ValueError, match=r"`ppo.old_logprobs='sampler'` must be one of 'forward', 'rollout'"):
        PPOConfig(old_logprobs="sampler")
