"""The command line: every command on a tiny model, every kind of mistake, and what is kept of a stopped run."""

from __future__ import annotations

import csv
import io
import json
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from transformers import AutoTokenizer

import lit_ppo
from lit_ppo import OptimConfig, PPOConfig, PPOLightningModule, SamplingConfig
from lit_ppo.cli import COMMANDS, main
from lit_ppo.cli.trainer import for_command_line

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),  # Lightning's calls
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # a resumed run has a folder of its own
]

ROOT = Path(__file__).parent.parent
RUN = """
model:
  actor: ACTOR
  reward:
    - lit_ppo.rewards.rules.length_penalty
    - {source: lit_ppo.rewards.rules.exact_match, weight: 0.5}
  sampling: {max_new_tokens: 4}
  ppo:
    epochs: 2
    minibatches: 2
  optim: {actor_lr: 1.0e-3, total_iterations: 4}
data:
  train: prompts.jsonl
  val: [{prompt: w1 w2, answer: w3}, {prompt: w4, answer: w5}]
  test: [{prompt: w1 w2, answer: w3}]
  batch_size: 4
trainer:
  max_epochs: 1
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A user's folder with run.yaml and prompts, to be in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("LIT_PPO_DEBUG", raising=False)
    rows = [{"prompt": row, "answer": "w1", "id": i} for i, row in enumerate(tiny.rows(8))]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("run.yaml").write_text(RUN.replace("ACTOR", tiny.folder()))
    return tmp_path


def weights(path: str | Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def metrics(folder: str) -> list[dict[str, str]]:
    with open(f"{folder}/metrics.csv") as file:
        return [row for row in csv.DictReader(file) if row["objective/scores"]]


# ----------------------------------------------------------------------------------------------------- the commands


def test_one_file_runs_every_command(capsys):
    assert main(["fit", "--config", "run.yaml"]) == 0
    assert len(metrics("outputs/version_0")) == 2  # iterations
    last = "outputs/version_0/checkpoints/last.ckpt"
    assert Path(last).is_file()
    saved = yaml.safe_load(Path("outputs/version_0/config.yaml").read_text())
    assert saved["model"]["ppo"]["epochs"] == 2
    capsys.readouterr()

    assert main(["validate", "--config", "run.yaml", "--ckpt_path", "last"]) == 0
    assert re.search(r"^val/reward +-?\d\.?\d{0,3}$", capsys.readouterr().out, re.MULTILINE)
    assert main(["test", "--config", "run.yaml", "--ckpt_path", last]) == 0
    assert "test/reward" in capsys.readouterr().out

    assert main(["predict", "--config", "run.yaml", "--ckpt_path", "last"]) == 0
    assert "2 responses written to outputs/predictions.jsonl" in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("outputs/predictions.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["answer"]) for row in rows] == [("w1 w2", "w3"), ("w4", "w5")]
    assert all(isinstance(row["response"], str) and isinstance(row["stopped"], bool) for row in rows)
    assert main(["predict", "--config", "run.yaml", "--ckpt_path", "last", "--output", "mine/p.jsonl"]) == 0
    assert Path("mine/p.jsonl").read_text() == Path("outputs/predictions.jsonl").read_text()
    assert not list(Path().rglob("*.part"))

    capsys.readouterr()
    assert main(["generate", "--ckpt", last, "--prompt", "w1 w2", "--prompt", "w4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["> w1 w2", rows[0]["response"], "> w4", rows[1]["response"]]  # the same noise as predict's

    assert main(["export", "--ckpt", "outputs", "--to", "model"]) == 0  # the last one of a folder
    assert "actor written to model" in capsys.readouterr().out
    assert main(["fit", "--config", "run.yaml", "--model.actor", "model", "--trainer.fast_dev_run", "true"]) == 0
    assert main(["export", "--ckpt", last, "--to", "model"]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main(["export", "--ckpt", last, "--to", "model", "--role", "critic", "--overwrite"]) == 0
    assert "score.weight" in str(Path("model/model.safetensors").read_bytes()[:4000])


@pytest.mark.slow  # two processes that each import torch
def test_two_ranks_predict_what_one_does_in_the_same_order():
    argv = ["predict", "--config", "run.yaml", "--data.predict=prompts.jsonl", "--data.val_batch_size=3"]
    assert main([*argv, "--output=one.jsonl"]) == 0
    ranks = ["--trainer.devices=2", "--trainer.strategy=ddp", "--output=two.jsonl"]
    subprocess.run([sys.executable, "-m", "lit_ppo", *argv, *ranks], check=True, capture_output=True)
    rows = Path("two.jsonl").read_text()
    assert [json.loads(row)["id"] for row in rows.splitlines()] == list(range(8))
    assert rows == Path("one.jsonl").read_text()


def test_a_resumed_run_is_the_uninterrupted_one(capsys):
    fit = ["fit", "--config", "run.yaml"]
    assert main([*fit, "--trainer.max_epochs", "2", "--trainer.default_root_dir", "whole"]) == 0
    assert main([*fit, "--trainer.default_root_dir", "parts"]) == 0
    assert main([*fit, "--trainer.max_epochs", "2", "--trainer.default_root_dir", "parts", "--ckpt_path", "last"]) == 0
    whole, parts = (
        weights(p) for p in ("whole/version_0/checkpoints/last.ckpt", "parts/version_1/checkpoints/last.ckpt")
    )
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [row["episode"] for row in metrics("parts/version_1")] == ["12.0", "16.0"]


def test_what_is_set_on_resume_is_not_overwritten_by_the_checkpoint():
    fit = ["fit", "--config", "run.yaml"]
    assert main(fit) == 0
    more = ["--model.ppo.kl_coef", "0.125", "--trainer.max_epochs", "2"]
    assert main([*fit, *more, "--ckpt_path", "outputs/version_0/checkpoints/last.ckpt"]) == 0
    saved = torch.load("outputs/version_1/checkpoints/last.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["ppo"]["kl_coef"] == 0.125


def test_the_saved_configuration_runs_again():
    assert main(["fit", "--config", "run.yaml", "--trainer.default_root_dir", "first"]) == 0
    assert main(["fit", "--config", "first/version_0/config.yaml", "--trainer.default_root_dir", "second"]) == 0
    first, second = (weights(f"{name}/version_0/checkpoints/last.ckpt") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_second_run_in_the_same_folder_needs_no_logger():
    for seed in (1, 2):
        more = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", f"--seed_everything={seed}"]
        assert main(["fit", "--config", "run.yaml", *more]) == 0
        assert yaml.safe_load(Path("outputs/config.yaml").read_text())["seed_everything"] == seed


def test_callbacks_by_name_appended_on_the_command_line():
    more = ["--trainer.callbacks+=GradientCheckpointing", "--trainer.callbacks+=LearningRateMonitor"]
    assert main(["fit", "--config", "run.yaml", *more]) == 0
    saved = yaml.safe_load(Path("outputs/version_0/config.yaml").read_text())
    names = [callback["class_path"].rsplit(".", 1)[-1] for callback in saved["trainer"]["callbacks"]]
    assert names == ["GradientCheckpointing", "LearningRateMonitor"]
    assert Path("outputs/version_0/checkpoints/last.ckpt").is_file()  # ours is added beside them


def test_checkpoints_and_loggers_of_the_user_replace_ours():
    ours = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=kept", "--trainer.logger=CSVLogger"]
    assert main(["fit", "--config", "run.yaml", *ours, "--trainer.logger.save_dir=logs"]) == 0
    assert [path.name for path in Path().rglob("*.ckpt")] == ["epoch=0-step=8.ckpt"]
    assert Path("logs/lightning_logs/version_0/metrics.csv").is_file()
    assert main(["fit", "--config", "run.yaml", "--trainer.enable_checkpointing=false"]) == 0
    assert len(list(Path().rglob("*.ckpt"))) == 1


def test_roles_as_text_mapping_and_list():
    folder = tiny.folder()
    Path("roles.yaml").write_text(
        RUN.replace(
            "actor: ACTOR", f"actor: {{source: {folder}, dtype: float32}}\n  reference: {folder}\n  lora: {{r: 2}}"
        )
    )
    assert main(["fit", "--config", "roles.yaml", "--model.lora.alpha", "8"]) == 0
    saved = torch.load("outputs/version_0/checkpoints/last.ckpt", weights_only=True)["hyper_parameters"]
    assert saved["actor"]["source"] == saved["reference"] == folder
    assert (saved["lora"]["r"], saved["lora"]["alpha"]) == (2, 8)
    assert saved["reward"][0] == "lit_ppo.rewards.rules.length_penalty"
    assert saved["reward"][1]["weight"] == 0.5


def test_generate_options(capsys, monkeypatch):
    assert main(["fit", "--config", "run.yaml"]) == 0
    generate = ["generate", "--ckpt", "outputs/version_0/checkpoints/last.ckpt"]

    def said(*options: str) -> list[str]:
        capsys.readouterr()
        assert main([*generate, *options]) == 0
        return capsys.readouterr().out.splitlines()

    long = said("--prompt", "w1", "--max-new-tokens", "30", "--temperature", "3", "--seed", "1")
    assert 4 < len(long[0].split()) <= 30
    assert long == said("--prompt", "w1", "--max-new-tokens", "30", "--temperature", "3", "--seed", "1")
    assert long != said("--prompt", "w1", "--max-new-tokens", "30", "--temperature", "3", "--seed", "2")
    assert len(said("--prompt", "w1", "--samples", "3")) == 6
    assert said("--prompt", "w1", "--prompt", "w2", "--chat")[0] == "> user w1 w1"  # the template adds a last w1
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1\n\nw2\n"))
    assert len(said("--prompt", "-")) == 4  # two prompts
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main([*generate, "--prompt", "-"]) == 1
    assert "`--prompt` is empty" in capsys.readouterr().err
    assert main([*generate, "--prompt", "w1", "--max-new-tokens", "900"]) == 1
    assert "exceed the actor's context of 64" in capsys.readouterr().err
    assert main([*generate, "--prompt", "w1", "--device", "cuda:99"]) == 1
    assert "`--device='cuda:99'` does not exist: this machine has" in capsys.readouterr().err
    assert main([*generate, "--prompt", "w1", "--temperature", "-1"]) == 1
    assert "`sampling.temperature=-1.0` must be >= 0" in capsys.readouterr().err


def test_the_chat_template_of_the_data_is_kept(capsys):
    template = "{% for m in messages %}w7 {{ m['content'] }}{% endfor %}"
    chat = [{"prompt": [{"role": "user", "content": "w1"}]}] * 4
    text = Path("run.yaml").read_text().replace("prompts.jsonl", "chat.jsonl")
    text = text.replace("    - {source: lit_ppo.rewards.rules.exact_match, weight: 0.5}\n", "")
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    Path("run.yaml").write_text(text.replace("  batch_size: 4", f'  batch_size: 4\n  chat_template: "{template}"'))
    assert main(["fit", "--config", "run.yaml"]) == 0
    capsys.readouterr()
    assert main(["generate", "--ckpt", "outputs", "--prompt", "w1", "--prompt", "w2", "--chat"]) == 0
    assert capsys.readouterr().out.startswith("> w7 w1\n")
    assert main(["export", "--ckpt", "outputs", "--to", "model"]) == 0
    assert AutoTokenizer.from_pretrained("model").chat_template == template


def test_other_packages_noise_is_left_out():
    text = Path("run.yaml").read_text().replace("  enable_model_summary: false\n", "")
    Path("run.yaml").write_text(text.replace("sampling:", "lora: {r: 2}\n  sampling:"))
    run = subprocess.run(
        [sys.executable, "-m", "lit_ppo", "fit", "--config", "run.yaml"], capture_output=True, text=True, check=True
    )
    said = run.stdout + run.stderr
    assert "reward exact_match x 0.5" in said
    assert " MiB" in said
    for noise in ("Loading weights", "Tip:", "gemm_4bit", "LeafSpec", "is_gradient_checkpointing", "FLOPs"):
        assert noise not in said


# ----------------------------------------------------------------------------------------------------------- mistakes

BAD_KEYS = {
    "field": (
        "epochs: 2",
        "epohcs: 2",
        r"`model.ppo.epohcs` (run.yaml, line 9) is not an option. Did you mean `model.ppo.epochs`?",
    ),
    "section": (
        "trainer:",
        "trainerr:",
        "`trainerr.max_epochs` (run.yaml, line 17) is not an option. Did you mean `trainer.max_epochs`?",
    ),
    "argument": (
        "batch_size: 4",
        "batchsize: 4",
        "`data.batchsize` (run.yaml, line 16) is not an option. Did you mean `data.batch_size`?",
    ),
    "role": (
        "actor: ",
        "actor: {dtpye: float32}\n  critic: ",
        "`dtpye` (run.yaml, line 3) in `model.actor` is not an option of RoleConfig. Did you mean `dtype`?",
    ),
    "list": (
        "weight: 0.5",
        "wieght: 0.5",
        "`wieght` (run.yaml, line 6) in `model.reward` is not an option of RewardConfig. Did you mean `weight`?",
    ),
    "optional": (
        "optim:",
        "lora: {alhpa: 4}\n  optim:",
        "`alhpa` (run.yaml, line 11) in `model.lora` is not an option of LoRAConfig. Did you mean `alpha`?",
    ),
    "callback": (
        "max_epochs: 1",
        "callbacks: [{class_path: ModelCheckpoint, init_args: {save_lst: true}}]",
        "`save_lst` (run.yaml, line 18) in `trainer.callbacks` is not an option of ModelCheckpoint. "
        "Did you mean `save_last`?",
    ),
    "class": (
        "max_epochs: 1",
        "callbacks: [{class_path: GradientCheckpointin}]",
        "`trainer.callbacks`: no class `GradientCheckpointin` (run.yaml, line 18) is known. "
        "Did you mean `GradientCheckpointing`?",
    ),
    "type": ("epochs: 2", "epochs: two", "`model.ppo.epochs=two` (run.yaml, line 9) must be of type int."),
    "missing": (
        "actor: ",
        "critic: ",
        "`model.actor` is missing. Set it in the YAML (--config) or on the command line (--model.actor ...).",
    ),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_a_misspelt_option_names_the_nearest(case, capsys):
    old, new, expected = BAD_KEYS[case]
    text = Path("run.yaml").read_text()
    assert old in text
    Path("run.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "run.yaml"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-2:] == [
        f"error: {expected}",
        "`lit-ppo fit --help` lists all options.",
    ]


def test_a_misspelt_option_on_the_command_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["predict", "--config", "run.yaml", "--model.ppo.epohcs", "2"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "error: `model.ppo.epohcs` is not an option. Did you mean `model.ppo.epochs`?" in error
    assert "`lit-ppo predict --help`" in error
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "rum.yaml"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.search(r"error: `--config`: there is no file .*rum\.yaml\.", error)


def test_a_configuration_of_another_stage_is_told_apart(capsys):
    """Each stage's example, given to another."""
    examples = Path(__file__).parent.parent / "examples"
    for command, name, stage in (
        (["fit"], "sft", "sft"),
        (["ppo", "plan"], "reward_model", "reward"),
        (["sft", "fit"], "quickstart", "ppo"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*command, "--config", str(examples / f"{name}.yaml")])
        assert stop.value.code == 2
        assert f"This is a configuration for `lit-ppo {stage} fit`." in capsys.readouterr().err


BAD_VALUES = {
    "value": (["--model.ppo.epochs=0"], "`ppo.epochs=0` must be >= 1."),
    "combination": (["--model.ppo.minibatches=3"], "`ppo.minibatches=3` does not divide the 4 episodes"),
    "reward": (["--model.reward=lit_ppo.rewards.rules.length_penality"], "Did you mean `length_penalty`?"),
    "prompts": (["--data.train=nope.jsonl"], "`train='nope.jsonl'` is not a file"),
    "actor": (["--model.actor=./nope"], "`actor='./nope'` cannot be read"),
    "checkpoint": (["--ckpt_path=nope.ckpt"], "`ckpt_path='nope.ckpt'` does not exist."),
    "last": (["--ckpt_path=last"], "`ckpt_path: last`: there is no last*.ckpt under 'outputs'"),
    "trainer": (["--trainer.accelerator=cpus"], "accelerator"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_configuration_that_cannot_work_is_one_message_before_any_weight_is_loaded(case, capsys, monkeypatch):
    source = Path("no-weights")
    source.mkdir()
    for path in Path(tiny.folder()).iterdir():
        if path.suffix != ".safetensors":
            (source / path.name).write_bytes(path.read_bytes())
    options, expected = BAD_VALUES[case]
    argv = ["fit", "--config", "run.yaml", "--model.actor=no-weights", *options]
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert f"error: {error.rsplit('error: ', 1)[1]}" == error[error.index("error: ") :]  # one message, at the end
    assert expected in error
    assert "Traceback" not in error
    monkeypatch.setenv("LIT_PPO_DEBUG", "1")
    with pytest.raises(Exception, match=re.escape(expected)):
        main(argv)


def test_a_checkpoint_of_another_model(capsys):
    assert main(["fit", "--config", "run.yaml"]) == 0
    lora = ["--model.lora.r=2", "--ckpt_path=last", "--trainer.max_epochs=2"]
    assert main(["fit", "--config", "run.yaml", *lora]) == 1
    assert "This checkpoint's `actor` is a llama" in capsys.readouterr().err


def test_a_file_that_is_no_checkpoint_is_said_to_be_none(capsys):
    Path("junk.ckpt").write_text("junk")
    torch.save({"state_dict": {}}, "other.ckpt")
    torch.save(torch.zeros(3), "tensor.ckpt")
    for name in ("junk", "other", "tensor"):
        what = "cannot be read as a checkpoint: " if name == "junk" else "was not written by lit-ppo"
        for option, command in (
            ("ckpt_path", ["fit", "--config", "run.yaml", "--ckpt_path"]),
            ("ckpt_path", ["predict", "--config", "run.yaml", "--ckpt_path"]),
            ("ckpt", ["generate", "--prompt", "w1", "--ckpt"]),
            ("ckpt", ["export", "--to", "model", "--ckpt"]),
        ):
            assert main([*command, f"{name}.ckpt"]) == 1
            assert f"error: `{option}='{name}.ckpt'` {what}" in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_full_disk_says_what_is_left(capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert main(["fit", "--config", "run.yaml"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert "cannot be written: File too large after" in said
    assert "Stopped in iteration 2; the metrics are in outputs/version_0. No checkpoint was written yet." in said


def test_a_folder_that_cannot_be_written_names_its_option(capsys):
    Path("file").write_text("")
    assert main(["fit", "--config", "run.yaml", "--trainer.default_root_dir", "file/runs"]) == 1
    assert "error: `trainer.default_root_dir`, 'file/runs', cannot be written: Not a dir" in capsys.readouterr().err
    assert main(["predict", "--config", "run.yaml", "--output", "file/p.jsonl"]) == 1
    message = "cannot be written (File exists in 'file'). Choose another folder."
    assert f"error: `output='file/p.jsonl'` {message}" in capsys.readouterr().err
    assert main(["fit", "--config", "run.yaml"]) == 0
    assert main(["export", "--ckpt", "outputs", "--to", "file/model"]) == 1
    assert f"error: `to='file/model'` {message}" in capsys.readouterr().err


def test_an_error_while_training_keeps_its_traceback_and_says_how_to_go_on():
    Path("fails_later.py").write_text(
        "calls = []\n"
        "def reward(responses):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 3: raise ZeroDivisionError('my own mistake')\n"
        "    return [0.0] * len(responses)\n"
    )
    argv = ["fit", "--config", "run.yaml", "--model.reward=fails_later.reward", "--trainer.num_sanity_val_steps=0"]
    with pytest.raises(lit_ppo.rewards.RewardError, match="my own mistake") as raised:
        main([*argv, "--trainer.max_epochs=3"])
    [note] = raised.value.__notes__
    assert "Stopped in iteration 2" in note
    command = shlex.split(note.splitlines()[-1])
    assert command[:2] == ["lit-ppo", "fit"]
    assert Path(command[command.index("--ckpt_path") + 1]).is_file()
    assert main([*command[1:], "--model.reward=lit_ppo.rewards.rules.length_penalty"]) == 0


def test_ctrl_c_keeps_checkpoint_and_metrics_and_says_how_to_go_on():
    Path("slow_reward.py").write_text(
        "import time\ndef reward(responses):\n    time.sleep(0.2)\n    return [0.0] * len(responses)\n"
    )
    argv = ["fit", "--config", "run.yaml", "--model.reward=slow_reward.reward"]
    run = subprocess.Popen(
        [sys.executable, "-m", "lit_ppo", *argv, "--trainer.max_epochs=200"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        start = time.monotonic()
        last = Path("outputs/version_0/checkpoints/last.ckpt")
        while not last.exists():
            assert run.poll() is None, run.stderr.read()
            assert time.monotonic() - start < 200
            time.sleep(0.05)
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        error = run.communicate(timeout=180)[1]
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130
    assert "Traceback" not in error
    assert "the metrics are in outputs/version_0" in error
    assert metrics("outputs/version_0")
    command = shlex.split(error.strip().splitlines()[-1])
    done = torch.load(last, weights_only=True)["lit_ppo"]["iteration"]
    assert (
        main([*command[1:], "--model.reward=lit_ppo.rewards.rules.length_penalty", f"--trainer.max_epochs={done}"]) == 0
    )
    assert float(metrics("outputs/version_1")[0]["episode"]) == 4 * (done + 1)  # the next iteration


# --------------------------------------------------------------------------------------------------------------- help


def test_help_lists_every_option_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for group, config in {"sampling": SamplingConfig, "ppo": PPOConfig, "optim": OptimConfig}.items():
        for field in fields(config):
            assert f"--model.{group}.{field.name} " in text
    flat = " ".join(text.split())
    assert "Passes over each rollout batch. (type: int, default: 4)" in flat
    assert "The policy: a folder, a Hugging Face id" in flat
    assert "Prompts of one iteration, over all ranks." in flat
    model = text[text.rindex("  --model.actor ACTOR") : text.index("  --data.train TRAIN,")]
    assert "known subclasses" not in model  # of nn.Module, hundreds


def test_help_of_a_group_that_may_be_absent(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--model.lora.help"])
    assert "Rank of the update." in capsys.readouterr().out


def test_without_a_command(capsys):
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    assert main(["--version"]) == 0
    assert lit_ppo.__version__ in capsys.readouterr().out
    assert main(["exprot"]) == 2
    assert "`exprot` is not a command of lit-ppo. Did you mean `export`?" in capsys.readouterr().err


def test_help_costs_no_import_of_torch():
    code = "import sys; from lit_ppo.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT).returncode == 0


class WithBonus(PPOLightningModule):
    """A subclass.

    Args:
        bonus: Added to everything.
    """

    def __init__(self, actor: str, bonus: float = 0.5, **kwargs: Any) -> None:
        super().__init__(actor, **kwargs)
        self.bonus = bonus


def test_a_command_line_for_a_subclass(capsys):
    build: Any = for_command_line(WithBonus)
    names = list(build.__signature__.parameters)
    assert names[:3] == ["actor", "bonus", "reward"]
    assert build.__signature__.parameters["actor"].annotation is str
    assert main(["fit", "--config", "run.yaml", "--model.bonus=2"], module_class=WithBonus) == 0
    assert "bonus: 2" in Path("outputs/version_0/config.yaml").read_text()
    with pytest.raises(SystemExit):
        main(["fit", "--help"], module_class=WithBonus)
    assert "Added to everything." in capsys.readouterr().out
