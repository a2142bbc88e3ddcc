"""`lit-ppo doctor`: every known mistake gets its line, what is right gets none, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import yaml

from lit_ppo.cli import main
from lit_ppo.cli.doctor import diagnose
from lit_ppo.doctor import STATUSES, Line
from lit_ppo.doctor.config import Here, option_in
from lit_ppo.doctor.machine import examine, existing

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),  # Lightning's calls
]

ROOT = Path(__file__).parent.parent
RUN = {
    "model": {
        "actor": "ACTOR",
        "reward": ["lit_ppo.rewards.rules.length_penalty"],
        "sampling": {"max_new_tokens": 4},
        "ppo": {"epochs": 1, "minibatches": 2},
        "optim": {"actor_lr": 1e-5},
    },
    "data": {"train": "prompts.jsonl", "val": ["w1 w2"], "batch_size": 4},
    "trainer": {"max_epochs": 1, "accelerator": "cpu", "devices": 1},
}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A user's folder, outside of torchrun and SLURM, with prompts of up to 5 words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE"):
            monkeypatch.delenv(name)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in tiny.rows(8)))
    return tmp_path


def config(changes: dict[str, object], actor: str | None = None) -> str:
    """Write a configuration with some options changed, `model.ppo.epochs: 2`, and return its name."""
    given = json.loads(json.dumps(RUN))
    given["model"]["actor"] = actor or tiny.folder()
    Path("run.yaml").write_text(yaml.safe_dump(changed(given, changes)))
    return "run.yaml"


def changed(given: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """A configuration with some options changed, in place."""
    for key, value in changes.items():
        *path, last = key.split(".")
        place = given
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return given


def lines(changes: dict[str, object], actor: str | None = None) -> list[Line]:
    """What is said of that configuration."""
    return diagnose(["fit", "--config", config(changes, actor)])


def gpus(monkeypatch, *capabilities: tuple[int, int]) -> None:
    """Have the configuration looked at as if on a machine with these GPUs."""
    here = Here(capabilities, {name: value for name, value in os.environ.items() if "WORLD" in name or "SLURM" in name})
    monkeypatch.setattr(Here, "now", classmethod(lambda cls: here))


def callback(name: str, **options: object) -> dict[str, object]:
    return {"class_path": name, "init_args": options}


def fsdp(**options: object) -> dict[str, object]:
    return {"class_path": "FSDPStrategy", "init_args": options}


def test_what_is_right_gets_no_line_and_leaves_nothing_behind():
    before = set(Path().rglob("*"))
    assert lines({}) == []
    assert set(Path().rglob("*")) - before == {Path("run.yaml")}


MISTAKES = {
    "temperature 0": (
        {"model.sampling.temperature": 0},
        "error",
        "greedy decoding: nothing is explored",
    ),
    "truncated sampling": ({"model.sampling.top_k": 50}, "warn", "the measured KL is then biased"),
    "unknown option": ({"model.ppo.epoch": 2}, "error", "`model.ppo.epoch`"),
    "bad value": ({"model.ppo.clip": 0}, "error", "`ppo.clip=0"),
    "batch not divisible": ({"model.ppo.minibatches": 3}, "error", "`ppo.minibatches=3` does not divide"),
    "no prompts": ({"data.train": "nowhere.jsonl"}, "error", "nowhere.jsonl"),
    "no reward model": ({"model.reward": ["./nowhere"]}, "error", "does not exist"),
    "role on a device that is not there": (
        {"model.reference": {"device": "cuda:77"}},
        "error",
        "`reference.device='cuda:77'` does not exist",
    ),
    "reference unused": (
        {"model.reference": {"dtype": "bfloat16"}, "model.ppo.kl_coef": 0.0},
        "error",
        "`reference` has no effect",
    ),
    "no KL": ({"model.ppo.kl_coef": 0.0}, "info", "neither penalised nor charted"),
    "KL for a chart": ({"model.ppo.kl_coef": 0.0, "model.ppo.log_kl": True}, "info", "for the KL's chart alone"),
    "KL charted anyway": ({"model.ppo.log_kl": True}, "info", "`ppo.log_kl` changes nothing"),
    "high learning rate": ({"model.optim.actor_lr": 0.01}, "warn", "`optim.actor_lr` is 0.01, far from"),
    "no learning rate": ({"model.optim.actor_lr": 0.0}, "warn", "nothing is learned"),
    "adapters' learning rate": (
        {"model.lora": {"r": 2}, "model.optim.actor_lr": 1e-8},
        "warn",
        "usual for adapters",
    ),
    "targets that match nothing": (
        {"model.lora": {"r": 2, "target_modules": ["query_proj"]}, "model.optim.actor_lr": 1e-4},
        "error",
        "`lora.target_modules=['query_proj']` does not fit",
    ),
    "quantized role that trains": (
        {"trainer.callbacks": [callback("QuantizeModules", modules=["actor"])]},
        "error",
        "quantizes `actor`, which is trained",
    ),
    "checkpointing twice": (
        {"trainer.callbacks": [callback("GradientCheckpointing"), callback("GradientCheckpointing")]},
        "error",
        "2 `GradientCheckpointing` callbacks",
    ),
    "checkpointing by the strategy": (
        {
            "trainer.callbacks": [callback("GradientCheckpointing")],
            "trainer.strategy": fsdp(activation_checkpointing_policy=["torch.nn.Linear"]),
        },
        "error",
        "recompute the same layers",
    ),
    "fsdp on one device": ({"trainer.strategy": "fsdp"}, "warn", "shards weights over 1 device"),
    "graph under fsdp": (
        {"trainer.strategy": "fsdp", "model.ppo.rollout_engine": "graph"},
        "error",
        "captures layers that a sharding strategy hooks into",
    ),
    "deepspeed": ({"trainer.strategy": "deepspeed_stage_2"}, "error", "DeepSpeed, which is not supported"),
    "half precision on a CPU": ({"trainer.precision": "16-mixed"}, "error", "16-mixed, which needs a GPU"),
    "GPU that is not there": ({"trainer.accelerator": "cuda"}, "error", "this machine has none"),
    "accumulation": ({"trainer.accumulate_grad_batches": 4}, "error", "`trainer.accumulate_grad_batches` is for"),
    "clipping": ({"trainer.gradient_clip_val": 0.5}, "error", "`trainer.gradient_clip_val` is for"),
    "never validated": (
        {"trainer.callbacks": [callback("ModelCheckpoint", monitor="val/reward", mode="max")], "data.val": None},
        "error",
        "never validates: there are no prompts to validate on",
    ),
    "validation off": (
        {
            "trainer.callbacks": [callback("ModelCheckpoint", monitor="val/reward", mode="max")],
            "trainer.limit_val_batches": 0,
        },
        "error",
        "`trainer.limit_val_batches` is 0",
    ),
    "validated too late": (
        {
            "trainer.callbacks": [callback("EarlyStopping", monitor="val/reward", mode="max")],
            "trainer.check_val_every_n_epoch": 5,
        },
        "error",
        "`EarlyStopping` monitors 'val/reward', and the run never validates: `trainer.check_val_every_n_epoch` is 5",
    ),
    "metric that is not logged": (
        {"trainer.callbacks": [callback("ModelCheckpoint", monitor="val/rewards", mode="max")]},
        "error",
        "'val/rewards', which is not logged",
    ),
    "the worst for the best": (
        {"trainer.callbacks": [callback("ModelCheckpoint", monitor="val/reward")]},
        "warn",
        "takes the lowest 'val/reward' for the best",
    ),
    "micro-batch without effect": ({"model.ppo.micro_batch_size": 64}, "info", "a minibatch of a rank has 2"),
    "no end": ({"trainer.max_epochs": None, "model.optim.schedule": "constant"}, "warn", "1,000 epochs"),
    "missing attention kernel": (
        {"model.reference": {"attn_implementation": "flash_attention_2"}},
        "error",
        "needs the package flash-attn",
    ),
    "ranks with more prompts": (
        {"trainer.devices": 3, "trainer.strategy": "ddp", "model.ppo.minibatches": 1},
        "info",
        "some have more prompts than others",
    ),
    "nodes that nobody starts": (
        {"trainer.num_nodes": 2, "trainer.strategy": "ddp"},
        "warn",
        "neither torchrun nor SLURM",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_gets_its_line(name):
    changes, status, text = MISTAKES[name]
    found = [line for line in lines(changes) if text in line.what]
    assert [line.status for line in found] == [status], lines(changes)


def test_a_reward_input_longer_than_its_context():
    reward = tiny.folder("llama", labels=1)
    assert lines({"model.reward": [reward]}) == []
    [line] = lines({"model.reward": [{"source": reward, "max_length": 8}]})
    assert line.status == "warn"
    assert "reads 8 tokens, and the longest prompt has 5 of them before the response of up to 4" in line.what
    assert line.fix == "data.max_prompt_length: 4"


@pytest.mark.parametrize(("pad", "text"), [("<eos>", "pads with its EOS token"), (None, "has no pad token")])
def test_pad_and_eos(pad, text):
    [line] = lines({}, actor=tiny.folder(pad=pad))
    assert (line.status, line.fix) == ("info", "")
    assert text in line.what


def test_a_model_that_says_it_checkpoints(tmp_path):
    folder = tmp_path / "model"
    model = tiny.model()
    model.config.gradient_checkpointing = True
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"gradient_checkpointing": True}))
    [line] = lines({"trainer.callbacks": [callback("GradientCheckpointing")]}, actor=str(folder))
    assert "config.json says `gradient_checkpointing`" in line.what


def test_processes_and_devices(monkeypatch):
    two = {"trainer.devices": 2, "trainer.strategy": "ddp"}
    assert lines(two) == []  # Lightning starts the second one
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    [line] = lines(two)
    assert "torchrun starts 4 processes on this node, and `trainer.devices` is 2" in line.what
    assert line.fix == "trainer.devices: 4"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    [line] = lines(two)
    assert line.fix == "trainer.num_nodes: 2"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    [line] = lines(two)
    assert line.fix == "#SBATCH --nodes=1 --ntasks-per-node=2"
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert lines(two) == []


def test_devices_of_a_machine_with_gpus(monkeypatch):
    gpus(monkeypatch, (9, 0), (9, 0))
    assert lines({"trainer.accelerator": "cuda", "trainer.devices": 2, "trainer.strategy": "ddp"}) == []
    [line] = lines({"trainer.accelerator": "gpu", "trainer.devices": 4, "trainer.strategy": "ddp"})
    assert (line.status, line.fix) == ("error", "trainer.devices: 2")
    [line] = lines({"trainer.accelerator": "cuda", "trainer.devices": [0, 2], "trainer.strategy": "ddp"})
    assert "names [0, 2]" in line.what
    [line] = lines({"trainer.accelerator": "cuda", "trainer.devices": "1,5", "trainer.strategy": "ddp"})
    assert "names [1, 5]" in line.what
    [line] = lines({"trainer.accelerator": "auto"})
    assert (line.status, line.what) == ("info", "1 of this machine's 2 GPUs are left idle")
    found = lines({"trainer.accelerator": "auto", "trainer.devices": "auto", "model.ppo.rollout_engine": "hf"})
    assert [line.status for line in found] == ["info"]
    assert "slower than graph" in found[0].what


def test_precision_of_an_older_gpu(monkeypatch):
    gpus(monkeypatch, (7, 5))
    [line] = lines({"trainer.accelerator": "cuda", "trainer.precision": "bf16-mixed"})
    assert (line.status, line.fix) == ("warn", "trainer.precision: 16-mixed")
    [line] = lines({"trainer.accelerator": "cuda", "trainer.precision": "16-true"})
    assert "there is no loss scaling" in line.what
    gpus(monkeypatch, (8, 0))
    assert lines({"trainer.accelerator": "cuda", "trainer.precision": "bf16-mixed"}) == []


def test_an_output_that_cannot_be_written():
    Path("file").write_text("")
    found = lines({"trainer.default_root_dir": "file/runs"})
    assert [line.status for line in found] == ["error"]
    assert "file/runs" in found[0].what


def test_a_checkpoint_that_does_not_fit_on_the_disk(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000})())
    [line] = lines({})
    assert (line.status, line.option) == ("error", "default_root_dir")
    assert lines({"model.lora": {"r": 2}, "model.optim.actor_lr": 1e-4}) == []


def test_several_mistakes_come_with_their_places_worst_first(capsys):
    config({"model.sampling.top_k": 50, "model.ppo.minibatches": 3, "model.ppo.kl_coef": 0.0})
    number = next(i for i, line in enumerate(Path("run.yaml").read_text().splitlines(), 1) if "minibatches" in line)
    assert main(["doctor", "--config", "run.yaml", "nowhere.yaml"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "run.yaml:"
    assert out[1].startswith("error  ")
    assert out[1].endswith(f"(run.yaml, line {number})")
    assert [line.split()[0] for line in out[1:] if line.split()[0] in STATUSES] == ["error", "warn", "info", "error"]
    assert "         -> model.ppo.log_kl: true" in out
    assert "1 error" in out[-1]
    assert "there is no file 'nowhere.yaml'" in out[-2]


def test_options_of_the_command_line_count(capsys):
    assert main(["doctor", "--config", config({}), "--model.ppo.minibatches=3"]) == 1
    assert main(["doctor", "--config", config({"model.ppo.minibatches": 3}), "--model.ppo.minibatches=2"]) == 0
    assert "no known mistakes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["doctor", "--model.ppo.minibatches=3"])
    assert "need --config" in capsys.readouterr().err


EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "lit-ppo fit" in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_the_examples_are_clean(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    small = ["--model.actor", tiny.folder(), "--model.sampling.max_new_tokens=6", "--trainer.accelerator=cpu"]
    small += ["--data.max_prompt_length=50", "--trainer.precision=32-true"]
    given = yaml.safe_load(path.read_text())
    for i, reward in enumerate(given["model"]["reward"]):
        if isinstance(reward, dict) and "/" in reward["source"]:  # on the hub
            given["model"]["reward"][i] = reward | {"source": tiny.folder("llama", labels=1)}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    assert main(["doctor", "--config", str(tmp_path / "run.yaml"), *small]) == 0
    said = capsys.readouterr().out
    assert "warn" not in said


STAGES = {
    "sft": (
        {"actor": "ACTOR", "sft": {"micro_batch_size": 2}, "optim": {"lr": 1e-5}},
        [{"prompt": "w1 w2", "answer": " w3"}] * 6,
    ),
    "reward": (
        {"reward": "ACTOR", "ranking": {"micro_batch_size": 2}, "optim": {"lr": 1e-5}},
        [{"prompt": "w1 w2", "chosen": " w3", "rejected": " w4"}] * 6,
    ),
}
OF_STAGES = {
    "right": ("sft", {}, None, ""),
    "right pairs": ("reward", {}, None, ""),
    "clipping": ("sft", {"trainer.gradient_clip_val": 0.5}, "error", "`trainer.gradient_clip_val` is for"),
    "too long": ("sft", {"data.max_length": 2}, "error", "longer than"),
    "rate": ("sft", {"model.optim.lr": 0.1}, "warn", "`optim.lr` is 0.1, far from what is usual for all weights"),
    "adapter's rate": ("reward", {"model.optim.lr": 0.0}, "warn", "nothing is learned"),
    "monitor": (
        "reward",
        {"trainer.callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/reward"}}]},
        "error",
        "'val/reward', which is not logged",
    ),
    "worst": (
        "reward",
        {"trainer.callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/accuracy"}}]},
        "warn",
        "takes the lowest 'val/accuracy'",
    ),
    "highest loss": (
        "sft",
        {"trainer.callbacks": [{"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "mode": "max"}}]},
        "warn",
        "takes the highest 'val/loss' for the best",
    ),
    "quantized": (
        "reward",
        {"trainer.callbacks": [{"class_path": "QuantizeModules", "init_args": {"modules": ["reward"]}}]},
        "error",
        "quantizes `reward`, which is trained",
    ),
    "no effect": (
        "sft",
        {"model.sft.micro_batch_size": 9},
        "info",
        "`sft.micro_batch_size` is 9, and a batch of a rank",
    ),
    "targets": (
        "reward",
        {"model.lora": {"r": 2, "target_modules": ["query_proj"]}, "model.optim.lr": 1e-4},
        "error",
        "`lora.target_modules=['query_proj']` does not fit",
    ),
    "unknown": ("reward", {"model.ranking.normalise": "mean"}, "error", "normalise"),
}


@pytest.mark.parametrize("name", OF_STAGES)
def test_the_stages_before_ppo_are_looked_at_too(name):
    stage, changes, status, text = OF_STAGES[name]
    model, rows = STAGES[stage]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "model": json.loads(json.dumps(model).replace("ACTOR", tiny.folder())),
        "data": {"train": "rows.jsonl", "val_fraction": 2, "batch_size": 4},
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "devices": 1},
    }
    Path("run.yaml").write_text(yaml.safe_dump(changed(given, changes)))
    found = diagnose(["fit", "--config", "run.yaml"])
    assert [line.status for line in found if text in line.what] == ([] if status is None else [status]), found
    if status is None:
        assert found == []
        assert main([stage, "doctor", "--config", "run.yaml"]) == 0


def test_messages_name_the_option_at_fault():
    assert option_in("`ppo.minibatches=3` does not divide") == "ppo.minibatches"
    assert option_in("something else, `Trainer`") == ""


# ------------------------------------------------------------------------------------------------------ the machine


def test_this_machine_is_usable(tmp_path, capsys):
    found = examine(str(tmp_path))
    assert all(line.status in STATUSES for line in found)
    assert not [line for line in found if line.status == "error"]
    said = "\n".join(line.what for line in found)
    assert f"torch {torch.__version__}" in said
    assert "bf16 runs on cpu" in said
    assert "gloo runs" in said
    assert "of disk free" in said
    if not torch.cuda.is_available():
        assert "no GPU" in said


def test_a_probe_that_fails_is_a_line(monkeypatch):
    def fails():
        raise RuntimeError("driver says no\nmore")

    monkeypatch.setattr("lit_ppo.doctor.machine.PROBES", {"CUDA": fails})
    assert Line("warn", "CUDA failed: driver says no") in examine()


def test_what_there_is_of_a_folder(tmp_path):
    assert existing(str(tmp_path / "a" / "b")) == tmp_path


def test_the_command_runs_as_a_process(tmp_path):
    config({"model.sampling.temperature": 0})
    done = subprocess.run(
        [sys.executable, "-m", "lit_ppo", "doctor", "-c", "run.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "greedy decoding" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
def test_everything_runs_on_a_gpu():
    found = examine()
    said = {line.what: line.status for line in found}
    assert not [line for line in found if line.status == "error"]
    for text in ("bf16 runs on cuda", "Triton", "flash attention runs", "NCCL"):
        assert any(text in what and status == "ok" for what, status in said.items()), (text, found)
