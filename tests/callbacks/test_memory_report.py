"""MemoryReport on modules of any kind: the tables, the metrics, and that nothing else changes."""

from __future__ import annotations

import pickle

import pytest
import tiny
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lit_ppo import PPOConfig, PPOLightningModule, PromptDataModule, SamplingConfig
from lit_ppo.callbacks import MemoryReport
from lit_ppo.memory.ledger import GIB


class Plain(LightningModule):
    """A module that knows nothing of lit-ppo."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.body = nn.Linear(256, 256, bias=False)
        self.head = nn.Linear(256, 1)

    def training_step(self, batch, batch_idx):
        loss = self.head(self.body(batch).tanh()).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rows() -> DataLoader:
    return DataLoader(torch.randn(6, 256), batch_size=2)


@pytest.mark.parametrize("automatic", [True, False])
def test_any_module_gets_tables_and_metrics(tmp_path, capsys, automatic):
    torch.manual_seed(0)
    module, bare = Plain(automatic), Plain(automatic)
    bare.load_state_dict(module.state_dict())
    report = MemoryReport(by_role=True)
    data = rows()
    trainer = tiny.trainer(tmp_path, callbacks=[report])
    trainer.fit(module, data)
    tiny.trainer(tmp_path).fit(bare, data)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), bare.parameters(), strict=True))
    out = capsys.readouterr().out
    assert "memory before the first step (cpu)" in out
    assert "memory after the last step (cpu)" in out
    assert "peaks by phase" in out
    assert "Between iterations" in out
    assert list(report.peaks) == ["load", "step"]
    seen = trainer.callback_metrics
    assert float(seen["memory/host_gib"]) > 0
    # weights, gradients (which automatic optimization keeps until the next step), two moments
    size = 256 * 256 * 4
    assert float(seen["memory/role/body_gib"]) * GIB == pytest.approx(4 * size, rel=0.01)
    assert not any(name.startswith("memory/allocated") for name in seen)  # nothing is kept apart on the CPU


def test_a_ppo_module_has_rows_by_role_and_phase(tmp_path, capsys):
    module = PPOLightningModule(
        tiny.folder(),
        tiny.folder("qwen2", labels=1),
        sampling=SamplingConfig(max_new_tokens=4),
        ppo=PPOConfig(epochs=1),
    )
    report = MemoryReport(by_role=True)
    data = PromptDataModule(tiny.rows(), val=tiny.rows(2), batch_size=8)
    saved = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1)
    trainer = tiny.fit(tmp_path, module, data, callbacks=[report, saved], enable_checkpointing=True)
    assert list(report.peaks) == ["load", "validation", "rollout", "score", "update", "save"]
    assert {"memory/role/actor_gib", "memory/role/critic_gib", "memory/role/reference_gib"} <= set(
        trainer.callback_metrics
    )
    out = capsys.readouterr().out
    last = out[out.index("after the last step") :]
    for name in ("actor", "critic", "reference", "reward", "this process", "rollout", "save"):
        assert name in last
    assert module.phase_listeners == []


def test_it_can_be_quiet(tmp_path, capsys):
    trainer = tiny.trainer(tmp_path, callbacks=[MemoryReport(table=False)])
    trainer.fit(Plain(True), rows())
    assert "memory" not in capsys.readouterr().out
    assert "memory/host_gib" in trainer.callback_metrics
    assert not any("role" in name for name in trainer.callback_metrics)


def test_a_second_fit_starts_anew(tmp_path):
    report = MemoryReport(table=False)
    for _ in range(2):
        trainer = tiny.trainer(tmp_path, callbacks=[report])
        trainer.fit(Plain(True), rows())
        assert list(report.peaks) == ["load", "step"]
    trainer.validate  # noqa: B018
    assert report._module is None


def test_bad_options_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"`MemoryReport\(by_role='yes'\)` must be True or False"):
        MemoryReport(by_role="yes")
    with pytest.raises(ValueError, match=r"`MemoryReport\(snapshot=''\)` must be the name of a file"):
        MemoryReport(snapshot="")
    trainer = tiny.trainer(tmp_path, callbacks=[MemoryReport(snapshot="x.pickle")])
    with pytest.raises(ValueError, match=r"snapshot='x.pickle'\)` records CUDA memory, and this run is on cpu"):
        trainer.fit(Plain(True), rows())


@pytest.mark.gpu
def test_on_cuda_the_device_is_accounted_for(tmp_path, capsys):
    path = tmp_path / "worst.pickle"
    report = MemoryReport(by_role=True, snapshot=str(path))
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[report],
    )
    trainer.fit(Plain(True), rows())
    seen = trainer.callback_metrics
    names = ("allocated", "reserved", "fragmentation", "others", "step_peak", "host")
    assert {f"memory/{name}_gib" for name in names} <= set(seen)
    assert seen["memory/step_peak_gib"] >= seen["memory/allocated_gib"] > 0
    assert seen["memory/reserved_gib"] >= seen["memory/allocated_gib"]
    assert "segments" in pickle.loads(path.read_bytes())
    assert "reserved" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_cuda_a_ppo_module_logs_each_peak_once(tmp_path):
    module = PPOLightningModule(
        tiny.folder(), tiny.count_w1, sampling=SamplingConfig(max_new_tokens=4), ppo=PPOConfig(epochs=1)
    )
    report = MemoryReport()
    trainer = tiny.fit(tmp_path, module, accelerator="cuda", callbacks=[report])
    assert report._ours == set()
    assert {"memory/rollout_peak_gib", "memory/update_peak_gib", "memory/allocated_gib"} <= set(
        trainer.callback_metrics
    )
    assert report.peaks["update"].peak > 0
