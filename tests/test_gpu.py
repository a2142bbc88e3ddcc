"""The module on one CUDA device: precision, placement, and what must be as on the CPU."""

from __future__ import annotations

import pytest
import tiny
import torch
from lightning.pytorch import Callback

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule, RoleConfig, SamplingConfig

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "full": {},
    "lora": {"lora": LoRAConfig(r=4)},
    "shared": {"layout": "shared", "lora": LoRAConfig(r=4)},
}


def make(**options) -> PPOLightningModule:
    defaults = dict(
        reward=tiny.count_w1,
        sampling=SamplingConfig(max_new_tokens=8, temperature=1.0),
        ppo=PPOConfig(epochs=2, minibatches=2, micro_batch_size=3),
        optim=OptimConfig(actor_lr=1e-3, schedule="constant"),
    )
    return PPOLightningModule(options.pop("actor", tiny.folder()), **(defaults | options))


def run(tmp_path, module, accelerator="gpu", **options):
    return tiny.fit(tmp_path, module, accelerator=accelerator, **options)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_an_iteration_in_each_precision(tmp_path, layout, precision):
    module = make(**LAYOUTS[layout])
    start = {k: v.clone() for k, v in module_weights(module).items()}
    trainer = run(tmp_path, module, precision=precision)
    logged = {k: float(v) for k, v in trainer.callback_metrics.items()}
    assert trainer.global_step == 8
    assert logged["policy/ratio_first_step"] == pytest.approx(1.0, abs=0.0 if precision == "32-true" else 1e-2)
    assert {"memory/rollout_peak_gib", "memory/score_peak_gib", "memory/update_peak_gib"} <= set(logged)
    end = module_weights(module)
    assert any(not torch.equal(start[k].cpu(), end[k].cpu()) for k in start)
    assert all(v.isfinite().all() for v in end.values())


def module_weights(module):
    if module.views is None:
        module.configure_model()
    return module.state_dict()


def test_cuda_and_cpu_agree(tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu, on_gpu = make(), make()
    run(tmp_path, on_cpu, accelerator="cpu")
    run(tmp_path, on_gpu)
    for name, weight in on_cpu.state_dict().items():
        torch.testing.assert_close(on_gpu.state_dict()[name].cpu(), weight, rtol=1e-3, atol=2e-4, msg=name)


def test_a_bf16_trunk_with_float32_adapters(tmp_path):
    module = make(actor=RoleConfig(source=tiny.folder()), **LAYOUTS["shared"])
    run(tmp_path, module)
    dtypes = {p.dtype for n, p in module.actor.named_parameters() if "lora_" not in n and "value_head" not in n}
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for named in module.trained.values() for _, p in named} == {torch.float32}


def test_trained_bf16_weights_have_float32_masters(tmp_path):
    role = RoleConfig(source=tiny.folder(), dtype="bfloat16")
    module = make(actor=role, critic=role)
    trainer = run(tmp_path, module)
    assert all(s["master"].dtype == torch.float32 for s in trainer.optimizers[0].state.values())
    assert next(module.actor.parameters()).dtype == torch.bfloat16


def test_frozen_roles_on_another_device(tmp_path):
    path = tiny.folder("qwen2", labels=1)
    from lit_ppo import RewardConfig

    module = make(
        reference={"device": "cpu", "dtype": "float32"}, reward=RewardConfig(source=path, device="cpu", dtype="float32")
    )
    devices = {}

    class Look(Callback):  # after the fit Lightning takes the module back to the CPU
        def on_train_batch_end(self, trainer, pl_module, *_):
            devices.update({role: next(m.parameters()).device.type for role, m in pl_module.roles.items()})

    trainer = run(tmp_path, module, callbacks=[Look()])
    assert devices == {"actor": "cuda", "critic": "cuda", "reference": "cpu", "reward": "cpu"}
    assert torch.isfinite(trainer.callback_metrics["objective/kl"])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")  # the saver is not needed
def test_resume_on_cuda_is_exact(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    def data():
        return PromptDataModule(tiny.rows(), batch_size=8)

    whole = make()
    run(tmp_path / "a", whole, data=data(), max_epochs=2)
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    run(tmp_path / "b", make(), data=data(), max_epochs=2, enable_checkpointing=True, callbacks=[saver])
    resumed = make()
    trainer = tiny.trainer(tmp_path / "c", accelerator="gpu", max_epochs=2)
    trainer.fit(resumed, data(), ckpt_path=str(tmp_path / "saved" / "step=8.ckpt"))
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
