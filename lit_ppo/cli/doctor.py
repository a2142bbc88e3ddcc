"""`lit-ppo doctor`: what works on this machine, and with `--config` which known mistakes a configuration makes."""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lit_ppo.cli import classes_of
from lit_ppo.cli.errors import config_files, message_of, place, stages_of
from lit_ppo.cli.hub import BY_CHOICE, unreachable
from lit_ppo.cli.trainer import Parsing, prepare
from lit_ppo.doctor import STATUSES, Line
from lit_ppo.doctor.config import Here, Run, examine, option_in, quiet
from lit_ppo.doctor.machine import examine as examine_machine

WIDTH = max(map(len, STATUSES)) + 2


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options; what is not known here is for the configuration, as `lit-ppo fit` would take it.

    Args:
        argv: The command and its options.
    """
    parser = argparse.ArgumentParser(
        prog="lit-ppo doctor",
        description="Without --config: what is installed and works on this machine. With it: known mistakes of a "
        "configuration of any stage, each with the line to change; no weights are loaded. Further options "
        "(--model.actor NAME, --trainer.devices 2, ...) are set in each configuration. Exits with 1 if something "
        "cannot work.",
        allow_abbrev=False,
    )
    parser.add_argument("-c", "--config", nargs="+", metavar="YAML", help="Each is looked at by itself.")
    parser.add_argument(
        "--output", default="outputs", metavar="DIR", help="Whose disk is looked at, without --config (%(default)s)."
    )
    args, rest = parser.parse_known_args(argv[1:])
    if rest and not args.config:
        parser.error(f"unrecognized arguments: {' '.join(rest)} (options of a configuration need --config)")
    return args, rest


def run(
    argv: list[str],
    module_class: type[Any] | None = None,
    data_class: type[Any] | None = None,
    stage: str | None = None,
) -> int:
    """Examine and print.

    Args:
        argv: The command and its options.
        module_class: None: that of the stage.
        data_class: None: that of the stage.
        stage: sft, reward or ppo; None: the one that each configuration is of.

    Returns:
        0, or 1 if there is an error among the lines.
    """
    args, rest = parse(argv)
    if not args.config:
        return _print(examine_machine(args.output), [])
    worst = 0
    if (why := unreachable()) and why != BY_CHOICE:
        print(f"info   the model hub is not asked ({why}): only what its cache or a folder holds is found")
    for path in args.config:
        command = ["fit", "--config", path, *rest]
        lines = diagnose(command, module_class, data_class, stage)
        print(f"{path}:")
        worst |= _print(lines or [Line("ok", "no known mistakes")], command)
    return worst


def diagnose(
    argv: list[str],
    module_class: type[Any] | None = None,
    data_class: type[Any] | None = None,
    stage: str | None = None,
) -> list[Line]:
    """Read a configuration as `fit` does and look for mistakes.

    Args:
        argv: `fit` and its options.
        module_class: None: that of the stage.
        data_class: None: that of the stage.
        stage: sft, reward or ppo; None: the one that the configuration is of.
    """
    module, data = classes_of(stage or next(iter(stages_of(config_files(argv))), "ppo"))
    prepare(argv)
    said: list[str] = []
    for i, arg in enumerate(argv):
        if arg == "--config" and not Path(argv[i + 1]).is_file():
            return [Line("error", f"there is no file {argv[i + 1]!r}")]
    shown = io.StringIO()
    try:
        with quiet(said), contextlib.redirect_stderr(shown):
            cli = _Reader(argv, module_class or module, data_class or data)
    except SystemExit:  # the parser's message is made for people already
        text = shown.getvalue().split("\n`lit-ppo ")[0].strip().removeprefix("error: ")
        return [Line("error", text or "the configuration cannot be read", option=option_in(text))]
    except Exception as error:  # of an option's value, or of a file that it names
        text = message_of(error)
        return [Line("error", text, option=option_in(text))]
    options = dict(vars(cli._get(cli.config_init, "trainer")))
    return examine(Run(cli.model, cli.datamodule, options, Here.now()), said)


class _Reader(Parsing):
    """Makes the module and the prompts, too."""

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate_classes(self.config)
        self.datamodule = self._get(self.config_init, "data")
        self.model: LightningModule = self._get(self.config_init, "model")


def _print(lines: list[Line], argv: list[str]) -> int:
    for line in lines:
        where = place(line.option.rsplit(".", 1)[-1], argv) if line.option and argv else ""
        what = " ".join(line.what.split())
        print(f"{line.status:<{WIDTH}}{what}{'' if where in what else where}")
        if line.fix:
            print(f"{'':<{WIDTH}}-> {line.fix}")
    counts = {status: sum(line.status == status for line in lines) for status in STATUSES}
    found = [f"{n} {status}" for status, n in counts.items() if n and status in ("warn", "error")]
    if found:
        print(", ".join(found))
    return int(counts["error"] > 0)
