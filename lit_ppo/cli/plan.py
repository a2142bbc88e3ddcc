"""`lit-ppo plan`: does it fit, before a GPU is touched?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

HELP = """usage: lit-ppo plan --config FILE [--gpus 4xA100-80G] [options]

Forecast the peak memory of a run by phase, say whether it fits, and rank what would save memory. No GPU is used and no
weights are read: only the configurations of the models. The stages before PPO are told by their configuration, or by
name: `lit-ppo sft plan`.

options:
  --config FILE          as for `lit-ppo fit`, whose other options work here, too (--model.ppo.micro_batch_size 2)
  --gpus N x CARD        4xA100-80G, RTX4090-24G, or a size: 24GB (default: the H100-80G)
  --strategy NAME        ddp or fsdp, for several GPUs (default: the trainer's)
  --model-config FILE    config.json of the actor and of every model whose own cannot be read (offline); several may be
                         given as ROLE=FILE, such as critic=small/config.json
  --no-levers            only the forecast"""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own options; the others are those of `fit`.

    Args:
        argv: The command and its options.
    """
    parser = argparse.ArgumentParser(prog="lit-ppo plan", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--gpus", default="H100-80G")
    parser.add_argument("--strategy", choices=["ddp", "fsdp"])
    parser.add_argument("--model-config", action="append", default=[])
    parser.add_argument("--no-levers", action="store_true")
    return parser.parse_known_args(argv[1:])


def run(
    argv: list[str],
    module_class: type[Any] | None = None,
    data_class: type[Any] | None = None,
    stage: str | None = None,
) -> None:
    """Print the forecast.

    Args:
        argv: The command and its options.
        module_class: As of `lit-ppo fit`.
        data_class: As of `lit-ppo fit`.
        stage: sft, reward or ppo; None: the one that the configuration is of.
    """
    args, rest = parse(argv)
    if args.help:
        print(HELP)
        return
    from lit_ppo.plan.cards import parse_gpus

    gpus = parse_gpus(args.gpus)
    from lit_ppo.cli import classes_of
    from lit_ppo.cli.errors import config_files, stages_of
    from lit_ppo.cli.trainer import parsed

    stage = stage or next(iter(stages_of(config_files(rest))), "ppo")
    module, data = classes_of(stage)
    config = parsed(["fit", *rest], module_class or module, data_class or data)
    from lit_ppo.plan.forecast import Forecast
    from lit_ppo.plan.levers import levers
    from lit_ppo.plan.report import report
    from lit_ppo.plan.setup import read_setup
    from lit_ppo.plan.stages import read_stage

    shapes = _Shapes(args.model_config)

    def read(changed: dict[str, Any]) -> Any:
        run = {"gpus": gpus.count, "strategy": args.strategy, "card": gpus.usable}
        return read_setup(changed, shapes, **run) if stage == "ppo" else read_stage(changed, stage, shapes, **run)

    forecast = Forecast(read(config))
    found = None if args.no_levers else levers(config, read, forecast)
    files = config_files(rest)
    print(report(forecast, gpus, found, Path(files[-1]).name if files else "This run"))


class _Shapes:
    """Reads configurations, each once; files given by hand come first."""

    def __init__(self, given: list[str]) -> None:
        self.files = {role: file for role, _, file in (e.rpartition("=") for e in given)}
        self.known: dict[Any, Any] = {}

    def __call__(self, role: str, source: Any) -> Any:
        from lit_ppo.cli.hub import unreachable
        from lit_ppo.plan.setup import config_file
        from lit_ppo.roles.sources import model_config

        file = self.files.get(role.split(" ")[0], self.files.get(""))
        key = file or (source.source, source.revision)
        if key not in self.known:
            why = "" if file or Path(source.source or ".").exists() else unreachable()
            try:
                self.known[key] = config_file(file) if file else model_config(role, source)
            except ValueError as error:
                if file:
                    raise
                asked = f" The hub was not asked: {why}." if why else ""
                raise ValueError(f"{error}{asked} Or give its configuration: --model-config config.json") from error
        return self.known[key]
