"""The PPO module under OOMGuard: errors while sampling, scoring and updating, and the undisturbed run's weights."""

import pytest
import tiny
import torch

from lit_ppo import OptimConfig, PPOConfig, PPOLightningModule, SamplingConfig
from lit_ppo.callbacks import OOMGuard
from lit_ppo.memory.retry import OutOfMemoryReport

pytestmark = pytest.mark.usefixtures("fast_collections")


def train(tmp_path, failures, *callbacks):
    """Train for two iterations; the calls of the actor numbered in `failures[phase]` run out of memory."""
    module = PPOLightningModule(
        actor=tiny.folder(),
        reward=tiny.count_w1,
        sampling=SamplingConfig(max_new_tokens=5, temperature=1.0),
        ppo=PPOConfig(epochs=2, minibatches=2),
        optim=OptimConfig(actor_lr=1e-3),
    )
    calls, raised = {}, []

    def check(layer, args, output):
        number = calls[module.phase] = calls.get(module.phase, -1) + 1
        if number in failures.get(module.phase, ()):
            raised.append(module.phase)
            raise torch.OutOfMemoryError(f"CUDA out of memory. ({module.phase} {number})")

    def backward(layer, args, output):
        if output.requires_grad:
            output.register_hook(lambda _: check(None, None, None) if "backward" in failures else None)

    def start():
        layer = next(m for m in module.modules() if type(m).__name__ == "LlamaMLP")
        layer.register_forward_hook(backward if "backward" in failures else check)

    module.on_train_start = start
    tiny.fit(tmp_path, module, callbacks=list(callbacks))
    weights = torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])
    return weights, raised, module


@pytest.mark.parametrize(
    ("failures", "phase", "size"),
    [
        ({"rollout": {2}}, "rollout", 4),
        ({"score": {1}}, "score", 2),  # of the 4 rows of a minibatch
        ({"update": {1}}, "update", 2),
        ({"update": {1, 3}}, "update", 1),
        ({"update": {2}, "backward": ()}, "update", 2),
    ],
)
def test_recovers_in_every_phase(tmp_path, failures, phase, size):
    expected, _, _ = train(tmp_path, {})
    guard = OOMGuard()
    got, raised, module = train(tmp_path, failures, guard)
    assert raised == [phase] * len(failures[phase])
    assert guard.policy is module.oom_policy
    assert guard.policy.events == {phase: len(raised)}
    assert guard.policy.sizes == {phase: size}
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_an_undisturbed_run_is_bit_equal(tmp_path):
    expected, _, _ = train(tmp_path, {})
    got, _, _ = train(tmp_path, {}, OOMGuard())
    assert torch.equal(expected, got)


def test_without_the_guard_the_phase_and_the_lever_are_named(tmp_path):
    with pytest.raises(OutOfMemoryReport, match=r"(?s)Out of memory on cpu in update, size 4.*ppo\.micro_batch_size"):
        train(tmp_path, {"update": {1}})
