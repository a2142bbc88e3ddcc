"""Checkpoints: complete, exact, never lost. A run that is stopped and resumed ends with the bits of one that is not."""

from __future__ import annotations

import csv
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resumable
import tiny
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from resumable import CASES, ITERATIONS, UPDATES, Recorder, module, train
from transformers import LlamaConfig, LlamaForCausalLM

from lit_ppo import LoRAConfig, OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule, SamplingConfig
from lit_ppo.checkpoint import AtomicCheckpointIO

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:The dirpath has changed",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
)


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def load(path: Path | str) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def same(a: Any, b: Any, where: str = "") -> None:
    """Assert that two checkpoints, or parts of them, are the same bits."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}/{i}")
    else:
        assert a == b, where


STATE = ("state_dict", "optimizer_states", "lr_schedulers", "lit_ppo", "global_step")


def same_run(a: Path, b: Path, parts: tuple[str, ...] = (*STATE, "epoch")) -> None:
    """Assert that two checkpoints hold the same weights, optimizer, schedule, counters and random states."""
    one, two = load(a), load(b)
    for part in parts:
        same(one[part], two[part], part)


def metrics(folder: Path, marker: str = "objective/scores") -> dict[int, dict[str, str]]:
    """Rows of the logs by step, without times; later runs in the same folder come last."""
    rows = {}
    for file in sorted((folder / "logs").glob("*/metrics.csv")):
        with open(file, newline="") as lines:
            for row in csv.DictReader(lines):
                if row.get(marker):
                    rows[int(row["step"])] = {
                        k: v
                        for k, v in row.items()
                        if v and not k.startswith("time/") and not k.endswith("tokens_per_s")
                    }
    return rows


def start(folder: Path, case: str, moment: str) -> subprocess.Popen[bytes]:
    """Run resumable.py."""
    script = [sys.executable, "-W", "ignore", resumable.__file__, tiny.folder(), str(folder), case, moment]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(script, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# ------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("case", CASES)
def test_a_run_stopped_anywhere_and_resumed_ends_with_the_same_bits(tmp_path: Path, case: str) -> None:
    whole, samples = tmp_path / "whole", Recorder()
    seed()
    train(whole, module(case), None, samples)
    assert samples.samples.keys() == set(range(1, ITERATIONS + 1))
    assert len({str(s) for s in samples.samples.values()}) == ITERATIONS  # nothing is repeated
    expected, validated = metrics(whole), metrics(whole, "val/reward")
    assert len(expected) == ITERATIONS
    after = range(1, ITERATIONS) if case in ("full", "stateful") else (2,)
    stops = [whole / f"step={UPDATES * i}.ckpt" for i in after] + [whole / "end-of-epoch=0.ckpt"]
    assert len(list(whole.glob("*.ckpt"))) == ITERATIONS + 2 + 1
    for stop in stops:
        folder, again = tmp_path / stop.stem, Recorder()
        torch.manual_seed(99)  # what the resumed process draws before is not what the first one drew
        train(folder, module(case), stop, again)
        same_run(folder / "last.ckpt", whole / "last.ckpt")
        done = load(stop)["lit_ppo"]["iteration"]
        assert again.samples == {i: s for i, s in samples.samples.items() if i > done}
        assert metrics(folder) == {step: row for step, row in expected.items() if step >= done}
        assert metrics(folder, "val/reward").items() <= validated.items()


def test_a_resumed_run_can_be_resumed_again(tmp_path: Path) -> None:
    optim = OptimConfig(actor_lr=1e-3, total_iterations=ITERATIONS)  # by itself it ends where the fit does
    train(tmp_path / "whole", module(optim=optim))
    stop = None
    for i in (1, 3, 4, ITERATIONS):
        train(tmp_path / str(i), module(optim=optim), stop, max_epochs=-1, max_steps=UPDATES * i)
        stop = tmp_path / str(i) / "last.ckpt"
        assert load(stop)["lit_ppo"]["iteration"] == i
    same_run(stop, tmp_path / "whole" / "last.ckpt")


def test_validation_changes_nothing_in_training(tmp_path: Path) -> None:
    seed()
    train(tmp_path / "with", module("stateful"))
    seed()
    train(tmp_path / "without", module("stateful"), limit_val_batches=0, num_sanity_val_steps=0)
    same_run(tmp_path / "with" / "last.ckpt", tmp_path / "without" / "last.ckpt")


def test_sigkill_while_saving_costs_neither_checkpoints_nor_metrics(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    killed = start(folder, "stateful", "save:6")  # the third step is written, `last` for the third time is not
    seed()
    train(whole, module("stateful"))
    assert killed.wait(120) == -signal.SIGKILL
    assert (folder / "last.ckpt.part").stat().st_size > 1000  # it was on its way
    assert load(folder / "last.ckpt")["lit_ppo"]["iteration"] == 2
    assert set(metrics(folder)) == {0, 1}
    resumed = start(folder, "stateful", "never")
    assert resumed.wait(120) == 0
    same_run(folder / "last.ckpt", whole / "last.ckpt")
    assert metrics(folder) == metrics(whole)
    assert not (folder / "last.ckpt.part").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["rollout:3", "score:1", "update:2", "update:5", "save:1", "save:4", "save:9"])
def test_sigkill_at_any_moment(tmp_path: Path, moment: str) -> None:
    killed = start(tmp_path / "killed", "stateful", moment)
    seed()
    train(tmp_path / "whole", module("stateful"))
    assert killed.wait(200) == -signal.SIGKILL
    for file in (tmp_path / "killed").glob("*.ckpt"):
        load(file)
    assert start(tmp_path / "killed", "stateful", "never").wait(200) == 0
    same_run(tmp_path / "killed" / "last.ckpt", tmp_path / "whole" / "last.ckpt")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigkill_from_outside_again_and_again(tmp_path: Path) -> None:
    folder, dice = tmp_path / "killed", random.Random(7)
    seed()
    train(tmp_path / "whole", module("lora"))
    kills, code = 0, None
    while code != 0:
        running = start(folder, "lora", "never")
        before = (folder / "last.ckpt").stat().st_mtime_ns if (folder / "last.ckpt").exists() else 0
        while running.poll() is None:  # let it save at least once, so that the run gets on
            if (folder / "last.ckpt").exists() and (folder / "last.ckpt").stat().st_mtime_ns > before:
                time.sleep(dice.random() * 0.6)
                running.kill()
                break
            time.sleep(0.01)
        code = running.wait()
        kills += code == -signal.SIGKILL
        for file in folder.glob("*.ckpt"):
            load(file)
    assert kills >= 1
    # A run killed after its last checkpoint has nothing to do but to save again, when its last epoch counts as over.
    same_run(folder / "last.ckpt", tmp_path / "whole" / "last.ckpt", STATE)


def test_ctrl_c_keeps_the_last_checkpoint_and_the_metrics(tmp_path: Path) -> None:
    calls = []

    def interrupted(responses: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return tiny.count_w1(responses)

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            train(tmp_path / "stopped", module(reward=interrupted), limit_val_batches=0, num_sanity_val_steps=0)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    assert load(tmp_path / "stopped" / "last.ckpt")["lit_ppo"]["iteration"] == 2
    assert set(metrics(tmp_path / "stopped")) == {0, 1}
    train(tmp_path / "stopped", module(), "last")
    train(tmp_path / "whole", module())
    same_run(tmp_path / "stopped" / "last.ckpt", tmp_path / "whole" / "last.ckpt")


# ----------------------------------------------------------------------------------------------- what is in a file


def parameters(state: dict[str, Any]) -> int:
    return sum(weight.numel() for weight in state.values())


@pytest.mark.parametrize("case", ["full", "lora", "shared"])
def test_the_file_holds_what_is_trained_and_nothing_frozen(tmp_path: Path, case: str) -> None:
    run = module(case, reward=tiny.folder(labels=1), critic=None if case == "shared" else tiny.folder())
    train(tmp_path, run, max_epochs=1, limit_val_batches=0)
    state = load(tmp_path / "last.ckpt")["state_dict"]
    trained = {id(p) for named in run.trained.values() for _, p in named}
    assert len(trained) == len(state)
    assert {name for name, p in run.named_parameters() if id(p) in trained} == set(state)
    assert all(torch.equal(state[name], p) for name, p in run.named_parameters() if id(p) in trained)
    assert not any("reference" in name or "reward" in name for name in state)
    if case == "full":
        assert {name.split(".")[0] for name in state} == {"actor", "critic"}
    else:
        assert all("lora_" in name or "score" in name or "value_head" in name for name in state)
        assert parameters(state) < 0.5 * parameters(dict(run.named_parameters()))
    held = 3 * 4 * parameters(state)  # weights and two moments in float32
    assert held < (tmp_path / "last.ckpt").stat().st_size < 1.5 * held + 200_000


# ------------------------------------------------------------------------------------------------ ModelCheckpoint


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, {16}),
        ({"every_n_train_steps": 4, "save_top_k": -1}, {4, 8, 12, 16}),
        ({"every_n_train_steps": 8, "save_top_k": -1}, {8, 16}),
        ({"every_n_train_steps": 12}, {12}),
        ({"every_n_epochs": 1, "save_top_k": -1}, {4, 8, 12, 16}),
        ({"every_n_epochs": 2, "save_top_k": -1}, {12, 16}),
        ({"save_top_k": -1, "save_on_train_epoch_end": True}, {8, 16}),
        ({"save_top_k": -1, "save_on_train_epoch_end": False}, {4, 8, 12, 16}),
        ({"monitor": "val/reward", "save_top_k": -1}, {4, 8, 12, 16}),
        ({"monitor": "val/reward", "save_top_k": -1, "every_n_train_steps": 4}, {4, 8, 12, 16}),
        ({"monitor": "objective/scores", "save_top_k": -1, "every_n_train_steps": 4}, {4, 8, 12, 16}),
        ({"monitor": "objective/kl", "save_top_k": -1, "save_on_train_epoch_end": True}, {8, 16}),
        ({"save_top_k": 0, "save_last": True}, {"last": 16}),
        ({"every_n_train_steps": 4, "save_last": True}, {16, "last"}),
        ({"every_n_train_steps": 4, "save_last": "link"}, {16, "last"}),
        ({"save_top_k": 0}, set()),
    ],
    ids=str,
)
def test_every_trigger_of_model_checkpoint_writes(tmp_path: Path, options: dict[str, Any], steps: Any) -> None:
    saver = ModelCheckpoint(tmp_path / "saved", "{step}", **options)
    trainer = tiny.trainer(
        tmp_path, max_epochs=2, val_check_interval=0.5, enable_checkpointing=True, callbacks=[saver]
    )  # 0.5 of an epoch is every iteration
    run = module(ppo=PPOConfig(epochs=2, minibatches=2), sampling=SamplingConfig(max_new_tokens=2))
    trainer.fit(run, PromptDataModule(tiny.rows(), val=tiny.rows(4), batch_size=8))
    files = {f.stem.removeprefix("step="): f for f in (tmp_path / "saved").glob("*.ckpt")}
    assert set(files) == {str(s) for s in steps}
    for name, file in files.items():
        assert load(file)["global_step"] == (int(name) if name != "last" else 16)


def test_the_best_are_kept(tmp_path: Path) -> None:
    saver = ModelCheckpoint(
        tmp_path / "saved", "{step}", monitor="objective/scores", mode="max", save_top_k=2, every_n_train_steps=UPDATES
    )
    train(tmp_path, module(), None, saver)
    scores = {
        f"step={UPDATES * (step + 1)}.ckpt": float(row["objective/scores"]) for step, row in metrics(tmp_path).items()
    }
    kept = [scores[file.name] for file in (tmp_path / "saved").iterdir()]
    assert sorted(kept) == sorted(scores.values())[-2:]
    assert min(scores.values()) < min(kept)


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=")  # Lightning's, of any OnExceptionCheckpoint
def test_triggers_that_could_not_work_are_refused(tmp_path: Path) -> None:
    from datetime import timedelta

    def refused(match: str, callback: Any, ppo: Any = PPOConfig(epochs=2, minibatches=2)) -> None:  # noqa: B008
        with pytest.raises(ValueError, match=match):
            tiny.fit(tmp_path, module(ppo=ppo), enable_checkpointing=True, callbacks=[callback])

    refused("never fires under manual.*every_n_train_steps", ModelCheckpoint(train_time_interval=timedelta(minutes=1)))
    refused(r"every_n_train_steps=6\).*multiple of 4", ModelCheckpoint(every_n_train_steps=6))
    refused("middle of an iteration.*save_last", ModelCheckpoint(save_on_exception=True))
    refused("middle of an iteration.*save_last", OnExceptionCheckpoint(tmp_path))
    stops = PPOConfig(epochs=2, minibatches=2, target_kl=0.1)
    refused("target_kl.*every_n_epochs", ModelCheckpoint(every_n_train_steps=4), stops)


# ------------------------------------------------------------------------------------------- coming back by other ways


def test_load_from_checkpoint_builds_the_module_again(tmp_path: Path) -> None:
    run = module("shared", actor=Path(tiny.folder()), optim={"actor_lr": np.float64(0.02)})
    train(tmp_path, run, max_epochs=1)
    again = PPOLightningModule.load_from_checkpoint(tmp_path / "last.ckpt")
    same(dict(run.state_dict()), dict(again.state_dict()))
    assert (again.iteration, again.episodes, again.seed, again.lora) == (3, 24, 3, LoRAConfig(r=4))
    assert again.hparams["reward"] == "tiny.count_w1"
    data = PromptDataModule(val=tiny.rows(5), batch_size=3)
    (expected,) = tiny.trainer(tmp_path).validate(run, data, verbose=False)
    for candidate, path in ((again, None), (module("shared"), tmp_path / "last.ckpt")):
        (found,) = tiny.trainer(tmp_path).validate(candidate, data, ckpt_path=path, verbose=False)
        assert found == expected
        assert "val/reward" in found
    (untrained,) = tiny.trainer(tmp_path).validate(module("shared"), data, verbose=False)
    assert untrained != expected  # so that the above says something


def test_a_reward_that_cannot_be_imported_is_passed_again(tmp_path: Path) -> None:
    class Judge:
        def score(self, responses: list[str]) -> list[float]:
            return tiny.count_w1(responses)

    for reward in (Judge().score, lambda responses: tiny.count_w1(responses)):
        train(tmp_path, module(reward=reward), max_epochs=1, limit_train_batches=1)
        bare = PPOLightningModule.load_from_checkpoint(tmp_path / "last.ckpt")
        with pytest.raises(ValueError, match="`reward` is missing"):
            tiny.trainer(tmp_path).validate(bare, PromptDataModule(val=tiny.rows(5)))
        again = PPOLightningModule.load_from_checkpoint(tmp_path / "last.ckpt", reward=reward)
        tiny.trainer(tmp_path).validate(again, PromptDataModule(val=tiny.rows(5)), verbose=False)


def test_a_model_made_in_python_is_passed_again(tmp_path: Path) -> None:
    def build() -> PPOLightningModule:
        return module(actor=tiny.model(), tokenizer=tiny.tokenizer())

    train(tmp_path / "whole", build())
    train(tmp_path / "resumed", build(), tmp_path / "whole" / "step=4.ckpt")
    same_run(tmp_path / "resumed" / "last.ckpt", tmp_path / "whole" / "last.ckpt")
    path = tmp_path / "whole" / "last.ckpt"
    again = PPOLightningModule.load_from_checkpoint(path, actor=tiny.model(), tokenizer=tiny.tokenizer())
    same(dict(again.state_dict()), load(path)["state_dict"])
    with pytest.raises(ValueError, match="`actor` is missing"):
        PPOLightningModule.load_from_checkpoint(path)


def test_fit_goes_on_from_the_last(tmp_path: Path) -> None:
    train(tmp_path, module(), max_epochs=1)
    trainer = train(tmp_path, module(), "last")
    assert (trainer.global_step, trainer.current_epoch) == (UPDATES * ITERATIONS, 2)
    assert load(tmp_path / "last.ckpt")["lit_ppo"]["iteration"] == ITERATIONS


# ------------------------------------------------------------------------------------------- checkpoints of another


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each of these cases after one epoch."""
    found = {}
    for case in ("full", "lora", "shared"):
        folder = tmp_path_factory.mktemp(case)
        train(folder, module(case), max_epochs=1, limit_val_batches=0)
        found[case] = folder / "last.ckpt"
    return found


def other(path: Path, **shape: Any) -> str:
    """A model of another shape."""
    LlamaForCausalLM(LlamaConfig(**(tiny.SHAPE | shape))).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("saved", "case", "shape", "match"),
    [
        ("full", "full", {"hidden_size": 16}, "`actor` is .*hidden size 32.*this module's is .*hidden size 16"),
        ("full", "full", {"vocab_size": 80}, "`actor` is .*vocabulary 64.*this module's is .*vocabulary 80"),
        ("full", "full", {"num_hidden_layers": 1}, "`actor` is .*2 layers.*this module's is .*1 layers"),
        (
            "full",
            "full",
            {"intermediate_size": 40},
            r"of another shape.*mlp.* \(48, 32\) for \(40, 32\)",
        ),
        ("full", "no critic", {}, "`critic` is a llama.*this module's is absent"),
        ("full", "lora", {}, "`actor` is a llama.*this module's is .*LoRA adapter of rank 4"),
        ("lora", "full", {}, "`actor` is .*LoRA adapter of rank 4.*this module's is a llama"),
        ("lora", "shared", {}, "`actor` is .*rank 4, scaled by .*, and .*shared trunk"),
        ("shared", "lora", {}, "`actor` is .*rank 4 on a shared trunk, .*, and"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, checkpoints: dict[str, Path], saved: str, case: str, shape: dict[str, Any], match: str
) -> None:
    model = other(tmp_path / "model", **shape) if shape else None
    with pytest.raises((ValueError, RuntimeError), match=f"(?s){match}.* configuration .*trained with"):
        train(tmp_path, module(case, model), checkpoints[saved])


def test_adapters_of_another_rank_or_place_are_refused(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"adapter of rank 4, scaled by 8, and .*adapter of rank 8"):
        train(tmp_path, module("lora", lora=LoRAConfig(r=8)), checkpoints["lora"])
    for other_scale, said in ((LoRAConfig(r=4, alpha=16), 4), (LoRAConfig(r=4, use_rslora=True), 16)):
        with pytest.raises(ValueError, match=f"rank 4, scaled by 8, and .*rank 4, scaled by {said}"):
            train(tmp_path, module("lora", lora=other_scale), checkpoints["lora"])
    with pytest.raises(RuntimeError, match=r"another model; not of this model: .*mlp"):
        train(tmp_path, module("lora", lora=LoRAConfig(r=4, target_modules=["q_proj"])), checkpoints["lora"])


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    foreign = load(checkpoints["full"])
    del foreign["lit_ppo"]
    torch.save(foreign, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match=r"not written by PPOLightningModule.*pass that as `actor`"):
        train(tmp_path, module(), tmp_path / "foreign.ckpt")


@pytest.mark.parametrize(("case", "role"), [("full", "reference"), ("lora", "actor's trunk")])
def test_frozen_weights_that_changed_since_are_noticed(tmp_path: Path, case: str, role: str) -> None:
    shutil.copytree(tiny.folder(), tmp_path / "model")
    train(tmp_path / "run", module(case, str(tmp_path / "model")), max_epochs=1, limit_val_batches=0)
    changed = tiny.model(seed=1)
    changed.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=f"frozen `{role}` is not the one.*Restore the original"):
        train(tmp_path / "run", module(case, str(tmp_path / "model")), "last")
    tiny.model().save_pretrained(tmp_path / "model")
    train(tmp_path / "run", module(case, str(tmp_path / "model")), "last")


def test_a_reward_model_that_changed_since_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(tiny.folder("qwen2", labels=1), tmp_path / "reward")

    def run() -> PPOLightningModule:
        return PPOLightningModule(
            tiny.folder(), reward=str(tmp_path / "reward"), sampling=SamplingConfig(max_new_tokens=4, temperature=1.0)
        )

    saver = ModelCheckpoint(dirpath=tmp_path / "run", save_last=True)
    tiny.fit(tmp_path, run(), enable_checkpointing=True, callbacks=[saver])
    shutil.copytree(tiny.folder("qwen2", labels=1, seed=1), tmp_path / "reward", dirs_exist_ok=True)
    trainer = tiny.trainer(tmp_path, max_epochs=2)
    with pytest.raises(ValueError, match=r"frozen `reward` is not the one.*Restore the original"):
        trainer.fit(run(), PromptDataModule(tiny.rows(), batch_size=8), ckpt_path=str(tmp_path / "run" / "last.ckpt"))


def test_a_resumed_run_takes_the_options_of_its_configuration(tmp_path: Path) -> None:
    def run(**options: Any) -> PPOLightningModule:
        return PPOLightningModule(
            tiny.folder(),
            reward=tiny.count_w1,
            sampling=SamplingConfig(max_new_tokens=4, temperature=1.0),
            ppo=PPOConfig(epochs=1),
            optim=OptimConfig(**options),
        )

    saver = ModelCheckpoint(dirpath=tmp_path / "run", save_last=True)
    tiny.fit(tmp_path, run(actor_lr=1e-3), enable_checkpointing=True, callbacks=[saver], max_epochs=1)
    resumed, rates = run(actor_lr=8e-4, critic_lr=4e-4, eps=1e-3, weight_decay=0.5, betas=(0.8, 0.9)), []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            rates.append(float(trainer.callback_metrics["lr"]))

    trainer = tiny.trainer(tmp_path, max_epochs=2, callbacks=[Watch()])
    trainer.fit(resumed, PromptDataModule(tiny.rows(), batch_size=8), ckpt_path=str(tmp_path / "run" / "last.ckpt"))
    assert rates == pytest.approx([4e-4, 2e-4])  # iterations 2 and 3 of the 4 that the run now has
    actor, critic = trainer.optimizers[0].param_groups
    assert (actor["eps"], actor["weight_decay"], actor["betas"]) == (1e-3, 0.5, (0.8, 0.9))
    assert (actor["initial_lr"], critic["initial_lr"]) == (8e-4, 4e-4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("there", ["float32", "8bit"])
def test_an_optimizer_state_that_is_converted_says_so(tmp_path, caplog, there, precision) -> None:
    half = precision == "bf16-true"  # float32 weights have no masters
    plain = {"state": "float32", "rounding": "master"}
    lean = {"state": "8bit", "rounding": "stochastic" if half else "master"}
    first, then = (plain, lean) if there == "float32" else (lean, plain)
    other = tmp_path / "again"
    for folder, options, ckpt in (
        (tmp_path, first, None),
        (tmp_path, first, "last.ckpt"),
        (other, then, "last.ckpt"),
    ):
        caplog.clear()
        changed = module(optim=OptimConfig(actor_lr=1e-3, **options))
        epochs = {"max_epochs": 1 if ckpt is None else 2, "precision": precision}
        trainer = train(folder, changed, None if ckpt is None else tmp_path / ckpt, **epochs)
        said = [m for m in caplog.messages if "in another form" in m]
        assert len(said) == (folder == other)
        assert trainer.global_step == epochs["max_epochs"] * 3 * resumable.UPDATES
    assert f"`optim.state` was {first['state']} and is {then['state']}: the moments are converted" in said[0]
    masters = "start from the rounded weights" if there == "8bit" else "masters are left out"
    assert (masters in said[0]) == half


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_averaged_weights_are_in_the_checkpoint(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "run", save_last=True)
    averaging = EMAWeightAveraging(decay=0.5)
    run = PPOLightningModule(
        tiny.folder(),
        reward=tiny.count_w1,
        sampling=SamplingConfig(max_new_tokens=4, temperature=1.0),
        optim=OptimConfig(actor_lr=1e-2, schedule="constant"),
    )
    tiny.fit(tmp_path, run, enable_checkpointing=True, callbacks=[averaging, saver])
    saved = load(tmp_path / "run" / "last.ckpt")["state_dict"]
    assert set(saved) == set(run.state_dict())
    loaded = PPOLightningModule.load_from_checkpoint(tmp_path / "run" / "last.ckpt")
    assert all(torch.equal(saved[name], weight) for name, weight in loaded.state_dict().items())
    together = torch.nn.ModuleDict({"other": torch.nn.Linear(1, 1), "ppo": run})
    names = set(together.state_dict())
    assert {"other.weight", "other.bias"} < names
    assert {f"ppo.{name}" for name in saved} < names


def test_a_last_checkpoint_that_would_be_old_is_refused(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, monitor="val/reward", mode="max", save_last=True)
    with pytest.raises(ValueError, match=r"only when the metric is among the best.*Use two"):
        tiny.fit(tmp_path, module(), enable_checkpointing=True, callbacks=[saver])


# ------------------------------------------------------------------------------------------------ writing the file


def test_a_checkpoint_is_never_written_through_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = module()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "there is no such folder"))
    trainer = train(tmp_path, run, max_epochs=1, limit_val_batches=0)
    assert type(trainer.strategy.checkpoint_io) is AtomicCheckpointIO
    assert load(tmp_path / "last.ckpt")["global_step"] == 3 * UPDATES


def test_a_checkpoint_plugin_of_the_user_is_kept(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    class Mine(TorchCheckpointIO):
        pass

    trainer = train(tmp_path, module(), plugins=[Mine()], max_epochs=1, limit_val_batches=0)
    assert type(trainer.strategy.checkpoint_io) is Mine


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, error: type[BaseException]) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            raise error("no")

    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"a": torch.ones(3)}, tmp_path / "new" / "last.ckpt")
    with pytest.raises(error, match="no"):
        writer.save_checkpoint({"a": torch.zeros(3), "b": Bad()}, tmp_path / "new" / "last.ckpt")
    same(load(tmp_path / "new" / "last.ckpt"), {"a": torch.ones(3)})
    assert os.listdir(tmp_path / "new") == ["last.ckpt"]
    writer.save_checkpoint({"a": torch.zeros(3)}, f"file://{tmp_path}/new/last.ckpt")  # Lightning's own way
    same(load(tmp_path / "new" / "last.ckpt"), {"a": torch.zeros(3)})


def test_metrics_are_on_the_disk_after_every_iteration(tmp_path: Path) -> None:
    seen = []

    class Reader(Recorder):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(pl_module.iteration)

        def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                assert set(metrics(tmp_path)) == set(range(pl_module.iteration))
                seen.append("validated")

    train(tmp_path, module(), None, Reader(), max_epochs=1)
    assert seen == [0, "validated", 1, "validated", 2, "validated"]


def test_samplers_of_a_loaded_module_are_those_it_was_saved_with(tmp_path: Path) -> None:
    sampling = SamplingConfig(max_new_tokens=4, temperature=0.9, suppress_tokens=["w3"], stop_tokens=["w1", 2])
    train(tmp_path, module(sampling=sampling), max_epochs=1, limit_val_batches=0)
    again = PPOLightningModule.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.sampling_config == sampling
    assert again.sampling.stop.tolist() == [tiny.WORDS.index("w1"), 2]
