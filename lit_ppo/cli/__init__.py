"""The command line: `lit-ppo fit --config run.yaml`, and the other commands that `lit-ppo --help` lists."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

COMMANDS = {
    "fit": ("lit_ppo.cli.trainer", "Train a policy with PPO; resume with --ckpt_path last or a file."),
    "validate": ("lit_ppo.cli.trainer", "Sample and score the validation prompts; print the metrics."),
    "test": ("lit_ppo.cli.trainer", "Sample and score the test prompts; print the metrics."),
    "predict": ("lit_ppo.cli.trainer", "Sample responses and write them to a JSONL file."),
    "plan": ("lit_ppo.cli.plan", "Forecast the memory of a fit, without a GPU; say what would save some."),
    "generate": ("lit_ppo.cli.generate", "Sample responses to prompts given on the command line."),
    "doctor": ("lit_ppo.cli.doctor", "Say what works here, or with --config what is wrong."),
    "export": ("lit_ppo.cli.export", "Turn a checkpoint into a folder for plain transformers or PEFT."),
}
"""Each command's module, which has a `run`, and its one line of help."""

STAGES = {
    "sft": ("SFTModule", "SFTDataModule", "Supervised fine-tuning: answers to learn."),
    "reward": ("RewardModule", "PreferenceDataModule", "A reward model: pairs of answers."),
    "ppo": ("PPOLightningModule", "PromptDataModule", "PPO, which is what the commands mean without a stage."),
}
"""What may stand before a command: its module, its data module, and its one line of help."""

OF_EVERY_STAGE = ("fit", "validate", "test", "plan", "doctor")
"""The commands of SFT and of the reward model; `generate` and `export` know what a checkpoint is of."""

TOLD_BY_THE_FILE = ("plan", "doctor")
"""Without a stage, these take the one that a configuration is of."""

USAGE = f"""usage: lit-ppo [STAGE] COMMAND [options]

PPO for language models on PyTorch Lightning, and the two stages before it.

commands:
{chr(10).join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())}

stages (`lit-ppo sft fit --config sft.yaml`):
{chr(10).join(f"  {name:<10} {text}" for name, (_, _, text) in STAGES.items())}

`plan` and `doctor` see by the configuration which stage it is of. `lit-ppo COMMAND --help` lists a command's options.
LIT_PPO_DEBUG=1 shows tracebacks of configuration errors."""


def main(
    argv: Sequence[str] | None = None, module_class: type[Any] | None = None, data_class: type[Any] | None = None
) -> int:
    """Run a command; the entry point of `lit-ppo`.

    Args:
        argv: Stage, command and options. None: those of the process.
        module_class: A subclass of the stage's module, for a command line of your own.
        data_class: A LightningDataModule to use in place of the stage's.

    Returns:
        The exit code: 0, or 1 where the configuration (for `doctor` perhaps the machine) cannot work. Options that
        cannot be parsed exit with 2.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] in ("-V", "--version"):
        from lit_ppo import __version__

        print(f"lit-ppo {__version__}")
        return 0
    named = argv[0] in STAGES
    stage = argv.pop(0) if named else "ppo"
    known = list(COMMANDS) if stage == "ppo" else list(OF_EVERY_STAGE)
    if not argv or argv[0] not in known:
        command, where = argv[0] if argv else "", "lit-ppo" if stage == "ppo" else f"lit-ppo {stage}"
        if command in ("-h", "--help"):
            print(USAGE)
            return 0
        near = difflib.get_close_matches(command, known, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else f" The commands are: {', '.join(known)}."
        print(f"error: `{command}` is not a command of {where}.{hint}", file=sys.stderr)
        return 2
    command = argv[0]
    cwd = os.getcwd()
    if cwd not in sys.path and "" not in sys.path:
        sys.path.insert(0, cwd)  # as `python -m` does: reward functions and callbacks of the user's own project
    from lit_ppo.cli.errors import is_configuration_error, message_of
    from lit_ppo.cli.noise import hush

    hush()
    try:
        run, options = import_module(COMMANDS[command][0]).run, dict[str, Any]()
        if command in TOLD_BY_THE_FILE and not named and module_class is None and data_class is None:
            options["stage"] = None
        else:
            module, data = classes_of(stage)
            options = {"module_class": module_class or module, "data_class": data_class or data, "stage": stage}
        code = run(argv, **options)
    except Exception as error:
        if os.environ.get("LIT_PPO_DEBUG") or not is_configuration_error(error):
            raise
        print("\n".join([f"error: {message_of(error)}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 1
    return int(code or 0)


def classes_of(stage: str) -> tuple[type[Any], type[Any]]:
    """Return the module and the data module of a stage."""
    package = import_module("lit_ppo")
    module, data, _ = STAGES[stage]
    return getattr(package, module), getattr(package, data)
