"""fit, validate, test and predict: LightningCLI, with a help that lists every option and errors that say what to do."""

from __future__ import annotations

import inspect
import shlex
import sys
import types
import typing
import warnings
from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import docstring_parser
import jsonargparse
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

import lit_ppo.callbacks
from lit_ppo.cli.errors import explain
from lit_ppo.cli.predictions import PredictionWriter
from lit_ppo.config import OptimConfig, PPOConfig, SamplingConfig
from lit_ppo.export import last_checkpoint, read_checkpoint
from lit_ppo.output import check_writable
from lit_ppo.stages.config import RankingConfig, SFTConfig, StageOptimConfig

SPELLED_OUT: dict[str, list[Any]] = {
    "sampling": [SamplingConfig],
    "ppo": [PPOConfig],
    "optim": [OptimConfig, StageOptimConfig],
    "sft": [SFTConfig],
    "ranking": [RankingConfig],
}
"""Groups of options whose fields the help lists one by one. The others (`lora`, say) mean something when absent."""

CKPT_HELP = {
    "fit": "Resume from this checkpoint; `last` is the newest one under `trainer.default_root_dir`.",
    "validate": "Weights to evaluate; `last` is the newest checkpoint under `trainer.default_root_dir`.",
}


def run(
    argv: list[str],
    module_class: type[Any] | None = None,
    data_class: type[Any] | None = None,
    stage: str = "ppo",
) -> None:
    """Run one of the Trainer's commands.

    Args:
        argv: The command and its options.
        module_class: None: PPOLightningModule.
        data_class: None: PromptDataModule.
        stage: What the command line begins with.
    """
    from lit_ppo import PPOLightningModule, PromptDataModule

    prepare(argv)
    PPOCLI.program = Parser.program = "lit-ppo" if stage == "ppo" else f"lit-ppo {stage}"
    PPOCLI(argv, module_class or PPOLightningModule, data_class or PromptDataModule)


def prepare(argv: list[str]) -> None:
    """Have the parser read docstrings if they will be shown, and know our callbacks by name.

    Args:
        argv: The command and its options.
    """
    jsonargparse.set_parsing_settings(
        docstring_parse_style=docstring_parser.DocstringStyle.GOOGLE,
        docstring_parse_attribute_docstrings=any("help" in arg or arg == "-h" for arg in argv),  # slow
    )
    for name in lit_ppo.callbacks.__all__:  # known by name once imported
        getattr(lit_ppo.callbacks, name)


def parsed(
    argv: list[str], module_class: type[Any] | None = None, data_class: type[Any] | None = None
) -> dict[str, Any]:
    """Return the configuration of a command as plain data, with every default; nothing is made or run.

    Args:
        argv: The command and its options.
        module_class: None: PPOLightningModule.
        data_class: None: PromptDataModule.
    """
    prepare(argv)
    from lit_ppo import PPOLightningModule, PromptDataModule

    cli = Parsing(argv, module_class or PPOLightningModule, data_class or PromptDataModule)
    found: dict[str, Any] = cli.config[argv[0]].as_dict()
    return found


class Parser(LightningArgumentParser):
    """The parser of LightningCLI with short errors."""

    argv: ClassVar[list[str]] = []
    program: ClassVar[str] = "lit-ppo"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and where, without pages of usage, and exit with 2."""
        if not self.exit_on_error:  # one of the parsers that jsonargparse tries the members of a union with
            super().error(message, ex)
        parser: Any = getattr(ex, "subcommand_parser", None) or self
        sys.stderr.write(f"error: {explain(message, [action.dest for action in parser._actions], self.argv)}\n")
        sys.stderr.write(f"`{self.program} {self.argv[0]} --help` lists all options.\n")
        self.exit(2)


class PPOCLI(LightningCLI):
    """LightningCLI for one command.

    Args:
        argv: The command and its options.
        module_class: The LightningModule.
        data_class: The LightningDataModule.
    """

    def __init__(self, argv: list[str], module_class: type[LightningModule], data_class: type[Any]) -> None:
        self.argv = argv
        type(self).command = argv[0]
        Parser.argv = argv
        super().__init__(
            for_command_line(module_class),  # type: ignore[arg-type]  # mypy: a class has no hash
            data_class,
            args=argv,
            save_config_callback=SaveConfigCallback if argv[0] == "fit" else None,
            save_config_kwargs={"overwrite": True},  # a run without a logger has no folder of its own
            trainer_defaults={"default_root_dir": "outputs", "log_every_n_steps": 1, "enable_model_summary": False},
            seed_everything_default=0,
            parser_kwargs={"prog": self.program},
            parser_class=Parser,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # the module stores its own arguments, as plain data
        )

    command: str = "fit"
    program: ClassVar[str] = "lit-ppo"

    @classmethod
    def subcommands(cls) -> dict[str, set[str]]:
        """Return the one command that is run: parsers for the others would only cost time."""
        skip = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}
        return {cls.command: skip | {"ckpt_path", "weights_only", "verbose", "return_predictions"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the command itself."""
        text = CKPT_HELP["fit" if self.command == "fit" else "validate"]
        parser.add_argument("--ckpt_path", type=typing.Optional[str], default=None, help=text)  # noqa: UP045
        if self.command == "predict":
            parser.add_argument(
                "--output",
                type=typing.Optional[str],  # noqa: UP045
                default=None,
                help="JSONL file to write; by default predictions.jsonl in `trainer.default_root_dir`.",
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments that were given, which need not be the process's."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone: Lightning would overwrite what the user sets with the checkpoint's values."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer; where the configuration has no logger or checkpoints of its own, CSV and the last ones."""
        config = self._get(self.config_init, "trainer")
        callbacks = config.callbacks if isinstance(config.callbacks, list) else [config.callbacks]
        callbacks = [callback for callback in callbacks if callback is not None]
        if self.command != "fit":
            kwargs["logger"] = config.logger if config.logger is not None else False
        elif config.logger is None or config.logger is True:
            kwargs["logger"] = CSVLogger(config.default_root_dir, name="", flush_logs_every_n_steps=1)
        wanted = self.command == "fit" and config.enable_checkpointing is not False and not config.fast_dev_run
        if wanted and not any(isinstance(callback, Checkpoint) for callback in callbacks):
            callbacks.append(ModelCheckpoint(save_last="link"))
        elif self.command != "fit" and config.enable_checkpointing is None:
            kwargs["enable_checkpointing"] = any(isinstance(callback, Checkpoint) for callback in callbacks)
        if self.command == "predict":
            output = self._get(self.config, "output") or Path(config.default_root_dir) / "predictions.jsonl"
            callbacks.append(PredictionWriter(output))
        kwargs["callbacks"] = callbacks
        return super().instantiate_trainer(**kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the command, and say where a fit that was stopped goes on."""
        path = self._get(self.config, "ckpt_path")
        if path == "last":
            path = str(last_checkpoint(self.trainer.default_root_dir, "ckpt_path: last"))
            rank_zero_info(f"`ckpt_path: last` is {path}")
        elif path is not None and not Path(path).exists() and "://" not in path:
            raise FileNotFoundError(f"`ckpt_path={path!r}` does not exist{_nearby_checkpoints(self.trainer)}.")
        if path is not None and Path(path).is_file():
            read_checkpoint(path, "ckpt_path")
        if subcommand == "fit":
            check_writable("trainer.default_root_dir", self.trainer.default_root_dir)  # before the logger finds out
        kwargs: dict[str, Any] = {"return_predictions": False} if subcommand == "predict" else {}
        if subcommand in ("validate", "test"):
            kwargs["verbose"] = False  # Lightning's table has 16 digits
        work: Callable[..., Any] = getattr(self.trainer, subcommand)
        try:
            with warnings.catch_warnings():
                if subcommand != "fit":  # a trainer that only evaluates needs no ModelCheckpoint
                    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")
                results = work(self.model, datamodule=self.datamodule, ckpt_path=path, weights_only=True, **kwargs)
            if subcommand in ("validate", "test") and self.trainer.is_global_zero:
                print("\n".join(f"{name:<24} {value:.4g}" for metrics in results for name, value in metrics.items()))
        except SystemExit:  # Lightning's answer to Ctrl-C, after everything was closed
            if subcommand == "fit" and self.trainer.interrupted and self.trainer.is_global_zero:
                sys.stderr.write(self.how_to_resume() + "\n")
            raise SystemExit(130 if self.trainer.interrupted else 1) from None
        except Exception as error:
            if subcommand == "fit" and self.iteration > 0:
                error.add_note(self.how_to_resume())
            raise

    @property
    def iteration(self) -> int:
        """How far the module is."""
        done: int = getattr(self.model, "iteration", 0)
        return done

    def how_to_resume(self) -> str:
        """Return what is kept of a fit that ends early, and the command that goes on with it."""
        kept = ""
        for callback in self.trainer.checkpoint_callbacks:
            # Lightning sets them before it writes
            paths = [getattr(callback, name, "") for name in ("last_model_path", "best_model_path")]
            kept = next((path for path in paths if path and ("://" in path or Path(path).exists())), kept)
        stopped = f"Stopped in iteration {self.iteration}; the metrics are in {self.trainer.log_dir}."
        if not kept:
            return f"{stopped} No checkpoint was written yet."
        argv = [*self.argv]
        for i, arg in enumerate(argv):
            if arg == "--ckpt_path":
                del argv[i : i + 2]
                break
            if arg.startswith("--ckpt_path="):
                del argv[i]
                break
        command = shlex.join([*self.program.split(), *argv, "--ckpt_path", kept])
        return f"{stopped} To go on from the last checkpoint:\n  {command}"


class Parsing(PPOCLI):
    """Stops when everything is parsed."""

    def _set_seed(self) -> None:
        """Draw nothing."""

    def instantiate_classes(self) -> None:
        """Make nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


@cache  # jsonargparse knows the function again
def for_command_line(module_class: type[LightningModule]) -> Callable[..., LightningModule]:
    """Return a function that makes the module and whose signature suits a command line.

    Modules and callables, which no YAML can hold, are left out of the types; a list comes before a string, which would
    swallow it; and groups of options that have defaults are spelled out, so that the help lists them.
    """

    def build(**kwargs: Any) -> LightningModule:
        return module_class(**kwargs)

    found: dict[str, inspect.Parameter] = {}
    docs: dict[str, str] = {}
    for owner in module_class.__mro__:
        init: Any = owner.__dict__.get("__init__")
        if init is None:
            continue
        hints = typing.get_type_hints(init)
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for p in parameters:
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in found:
                kind, default = _for_yaml(p.name, hints.get(p.name, Any), p.default)
                found[p.name] = p.replace(annotation=kind, default=default, kind=p.KEYWORD_ONLY)
        parsed = docstring_parser.google.parse(owner.__doc__ or "")
        docs = {p.arg_name: " ".join((p.description or "").split()) for p in parsed.params} | docs
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    summary = (inspect.getdoc(module_class) or module_class.__name__).split("\n")[0]
    arguments = [f"    {name}: {docs[name]}" for name in found if name in docs]
    build.__doc__ = "\n".join([summary, "", "Args:", *arguments])
    build.__name__ = build.__qualname__ = f"{module_class.__module__}.{module_class.__qualname__}".replace(".", "_")
    build.__signature__ = inspect.Signature([*found.values()], return_annotation=module_class)  # type: ignore[attr-defined]
    return build


def _for_yaml(name: str, kind: Any, default: Any) -> tuple[Any, Any]:
    """Return the type and default that an argument has on the command line."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    members = [m for m in (typing.get_args(kind) if union else (kind,)) if not _only_python(m)]
    for group in SPELLED_OUT.get(name, ()):
        if group in members and default is None:
            return group, group()
    lists = [member for member in members if typing.get_origin(member) in (list,)]
    return reduce(or_, lists + [member for member in members if member not in lists]), default


def _only_python(kind: Any) -> bool:
    return typing.get_origin(kind) is Callable or (isinstance(kind, type) and issubclass(kind, nn.Module))


def _nearby_checkpoints(trainer: Trainer) -> str:
    there = sorted(str(path) for path in Path(trainer.default_root_dir).rglob("*.ckpt"))
    return f"; there are {', '.join(there[-3:])}" if there else ""
