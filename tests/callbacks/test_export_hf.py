"""ExportHF: the best model so far, as plain transformers and PEFT load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import Callback, LightningModule
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule, SamplingConfig
from lit_ppo.callbacks import ExportHF


def ppo(actor: str | None = None, **options: Any) -> PPOLightningModule:
    return PPOLightningModule(
        actor or tiny.folder(),
        reward=tiny.count_w1,
        sampling=SamplingConfig(max_new_tokens=4, temperature=1.0),
        ppo=PPOConfig(epochs=1),
        optim=OptimConfig(actor_lr=1e-2),
        **options,
    )


class Scripted(Callback):
    """Logs these values, one a validation, and keeps the policy's weights at each."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val/scripted", float(self.values[0 if trainer.sanity_checking else len(self.seen)]))
        if not trainer.sanity_checking:
            state = pl_module.actor.model.state_dict()
            self.seen.append({n: p.detach().clone() for n, p in state.items()})


def export(folder: Path, **options: Any) -> ExportHF:
    return ExportHF(str(folder), "val/scripted", **options)


def data() -> PromptDataModule:
    return PromptDataModule(tiny.rows(), val=tiny.rows(2), batch_size=4)


def same(folder: Path, weights: dict[str, torch.Tensor]) -> bool:
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert theirs.keys() == weights.keys()
    return all(torch.equal(theirs[n], p) for n, p in weights.items())


@pytest.mark.parametrize(
    ("mode", "values", "best"), [("max", [0.1, 0.5, 0.5, 0.2], 1), ("min", [3, 2, float("nan"), 2.5], 1)]
)
def test_the_folder_holds_the_best_model(tmp_path, mode, values, best):
    log, callback = Scripted(values), export(tmp_path / "best", mode=mode)
    tiny.fit(tmp_path, ppo(), data(), callbacks=[callback, log], val_check_interval=1, num_sanity_val_steps=2)
    assert callback.best == pytest.approx(values[best])
    assert same(tmp_path / "best", log.seen[best])
    assert not same(tmp_path / "best", log.seen[-1])
    assert len(AutoTokenizer.from_pretrained(tmp_path / "best")) == tiny.VOCAB
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".best")], "nothing else is left"


def test_a_resumed_run_knows_what_was_best(tmp_path):
    callbacks = [export(tmp_path / "best"), Scripted([0.5])]
    trainer = tiny.fit(tmp_path, ppo(), data(), callbacks=callbacks, val_check_interval=4)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    callbacks = [export(tmp_path / "best"), Scripted([0.4, 0.6])]
    trainer = tiny.trainer(tmp_path, callbacks=callbacks, max_epochs=3, val_check_interval=4)
    trainer.fit(ppo(), data(), ckpt_path=str(tmp_path / "c.ckpt"))
    assert callbacks[0].best == pytest.approx(0.6)
    assert same(tmp_path / "best", callbacks[1].seen[1])
    assert not same(tmp_path / "best", callbacks[1].seen[0])


def test_adapters_of_a_shared_trunk(tmp_path):
    from peft import PeftModel

    module = ppo(lora=LoRAConfig(r=2), layout="shared")
    tiny.fit(tmp_path, module, data(), callbacks=[ExportHF(str(tmp_path / "adapter"), monitor=None)])
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny.folder()), tmp_path / "adapter")
    theirs = dict(plain.named_parameters())
    ours = {n: p for n, p in module.actor.model.named_parameters() if ".policy." in n}
    assert ours
    assert all(torch.equal(theirs[n.replace(".policy.", ".default.")], p) for n, p in ours.items())


def test_the_critic_by_name(tmp_path):
    module = ppo()
    tiny.fit(tmp_path, module, data(), callbacks=[ExportHF(str(tmp_path / "critic"), None, model="critic")])
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert torch.equal(plain.score.weight, module.critic.model.score.weight)


def test_an_interrupted_export_costs_nothing(tmp_path, monkeypatch):
    log = Scripted([0.1, 0.5, 0.6, 0.7])
    save = AutoTokenizer.from_pretrained(tiny.folder()).__class__.save_pretrained
    calls = []

    def failing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("No space left on device")
        return save(self, *args, **kwargs)

    module = ppo()
    monkeypatch.setattr(type(module.tokenizer), "save_pretrained", failing)
    with pytest.raises(OSError, match="No space left"):
        tiny.fit(tmp_path, module, data(), callbacks=[export(tmp_path / "best"), log], val_check_interval=1)
    assert same(tmp_path / "best", log.seen[0])
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".best")]


eval_mode = pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")


class Plain(LightningModule):
    """Any module with a transformers model, and automatic optimization."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, tiny.model())
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(2, 1))

    val_dataloader = train_dataloader


@eval_mode
def test_any_module(tmp_path):
    callback = ExportHF(str(tmp_path / "best"), monitor="val/loss", mode="min")
    module = Plain("lm")
    tiny.trainer(tmp_path, callbacks=[callback]).fit(module)
    assert same(tmp_path / "best", module.lm.state_dict())


@eval_mode
def test_what_cannot_be_exported_is_refused(tmp_path):
    def run(callback: ExportHF, module: Any, **options: Any) -> None:
        tiny.trainer(tmp_path, callbacks=[callback], **options).fit(module)

    here = str(tmp_path / "best")
    with pytest.raises(ValueError, match=r"fits 0 of the models of Plain that transformers can save: `a`, `b`. Name"):
        run(ExportHF(here, "val/loss"), Plain("a", "b"))
    with pytest.raises(ValueError, match=r"`ExportHF\(model='c'\)` fits 0 .*: none. Hold one"):
        run(ExportHF(here, "val/loss", model="c"), Plain())
    with pytest.raises(ValueError, match=r"logs no such metric. Nearest names: `val/loss`"):
        run(ExportHF(here, "val/los"), Plain("a"), num_sanity_val_steps=0)
    with pytest.raises(ValueError, match=r"exports after validations, and this fit has none"):
        run(ExportHF(here, "val/loss"), Plain("a"), limit_val_batches=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    with pytest.raises(FileExistsError, match="is no earlier export"):
        run(ExportHF(str(tmp_path / "mine"), "val/loss"), Plain("a"))
    with pytest.raises(FileExistsError, match="holds the model that the training started from"):
        tiny.fit(tmp_path, ppo(), data(), callbacks=[ExportHF(tiny.folder())])
    unknown, shared = ExportHF(here, None, adapter="x"), ppo(lora=LoRAConfig(r=2), layout="shared")
    with pytest.raises(ValueError, match=r"`ExportHF\(adapter='x'\)`: the model has the adapters 'policy', 'value'"):
        tiny.fit(tmp_path, shared, data(), callbacks=[unknown])


@pytest.mark.parametrize(
    ("options", "match"),
    [({"directory": " "}, "name of a folder"), ({"directory": "a", "mode": "up"}, "'max' or 'min'")],
)
def test_bad_arguments(options, match):
    with pytest.raises(ValueError, match=match):
        ExportHF(**options)
