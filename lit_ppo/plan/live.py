"""The forecast of a run that is about to start, and what was measured when it has ended: a line each."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lit_ppo.config import RoleConfig
from lit_ppo.plan.cards import GIB
from lit_ppo.plan.forecast import Forecast
from lit_ppo.plan.setup import Setup, read_setup
from lit_ppo.plan.stages import SECTIONS, read_stage
from lit_ppo.roles.sources import first_line

if TYPE_CHECKING:
    from lit_ppo.base import Harness

TOLD = ("every_n", "modules", "mode", "roles", "optimizer", "min_mib")
"""Options of callbacks that a forecast looks at."""


def setup_of(module: Any, card: int) -> Setup:
    """Return what decides the memory of a run, from its module.

    Args:
        module: A `Harness` with its models, attached to its trainer and its data.
        card: Bytes that this process can have of the device.

    Raises:
        ValueError: The data does not say how long its rows are, or a strategy is not known to the forecast.
    """
    trainer: Any = module.trainer
    data, ppo = trainer.datamodule, module.stage == "ppo"
    longest, batch = getattr(data, "longest", None), getattr(data, "batch_size", None)
    if not isinstance(longest, int) or not isinstance(batch, int):
        raise ValueError("the data does not say how many rows a batch has and how long they get.")
    first = "actor" if ppo else module.role
    shapes = {role: view.store.base.config for role, view in module.views.all().items()}
    options: Any = module.ppo if ppo else module.options
    model = {role: _source(source) for role, source in module.sources.items()}
    model |= {"lora": module.lora, SECTIONS[module.stage]: replace(options, packing=_packs(module))}
    model |= {"optim": module.optim if ppo else vars(module.optim)}
    given = {
        "model": model,
        "data": {"batch_size": batch, "max_prompt_length" if ppo else "max_length": max(1, longest)},
        "trainer": {
            "precision": trainer.precision,
            "callbacks": [
                {"class_path": type(c).__name__, "init_args": {n: getattr(c, n) for n in TOLD if hasattr(c, n)}}
                for c in trainer.callbacks
            ],
        },
    }
    run = {"gpus": trainer.world_size, "strategy": type(trainer.strategy).__name__, "card": card}
    if not ppo:
        model[SECTIONS[module.stage]] = vars(model[SECTIONS[module.stage]])
        return read_stage(given, module.stage, lambda role, source: shapes[first], **run)
    rewards = [] if module.rewards is None else module.rewards.rewards
    models = [r for r in rewards if r.model is not None or r in module.trunk_rewards]
    model["reward"] = [
        vars(r.config) | {"name": r.name, "source": r.config.source or "./made-in-python"} for r in models
    ]
    shapes |= {f"reward {r.name}": r.model.config for r in models if r.model is not None}
    model |= {"layout": module.layout, "sampling": module.sampling_config}
    return read_setup(given, lambda role, source: shapes[role], **run)


def announce(module: Harness) -> None:
    """Say how much memory each phase will take at its peak, beside what there is. It never fails.

    Args:
        module: About to be trained.
    """
    trainer: Any = module.trainer
    module.peaks = {}
    if module.device.type != "cuda" or trainer.fast_dev_run or not trainer.is_global_zero:
        return
    free, total = torch.cuda.mem_get_info(module.device)
    share = torch.cuda.get_per_process_memory_fraction(module.device)
    mine = int(min(free + torch.cuda.memory_reserved(module.device), share * total))
    rank_zero_info(said(module, mine))


def said(module: Harness, card: int) -> str:
    """Return the forecast as a line, or why there is none; the module keeps the numbers.

    Args:
        module: About to be trained.
        card: Bytes that this process can have of the device.
    """
    try:
        with warnings.catch_warnings(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            forecast = Forecast(setup_of(module, card))
            peaks = {name: phase.total / GIB for name, phase in forecast.phases.items()}
    except Exception as error:  # of no weight beside the run itself
        return f"No forecast of memory: {first_line(error)}"
    module.cache["forecast"] = peaks
    worst = max(peaks.values())
    short = "" if worst <= card / GIB else ": too little. `lit-ppo plan` says what would save memory"
    return f"Forecast of peak memory, GiB: {_listed(peaks)}; there are {card / GIB:.2f} on this device{short}."


def compare(module: Harness) -> None:
    """Say what the peaks were, beside the forecast.

    Args:
        module: Trained.
    """
    peaks, forecast = module.peaks, module.cache.pop("forecast", None)
    if forecast is not None and peaks:
        found = {name: peak for name, peak in peaks.items() if name in forecast}
        rank_zero_info(
            f"Measured peak memory, GiB: {_listed(found)} (forecast: {_listed({n: forecast[n] for n in found})})."
        )


def _listed(peaks: dict[str, float]) -> str:
    return ", ".join(f"{name} {peak:.2f}" for name, peak in peaks.items())


def _packs(module: Harness) -> bool:
    return all(view.store.packs for view in module.views.all().values())


def _source(source: Any) -> Any:
    """Return what a role is made of as a configuration says it."""
    if isinstance(source, RoleConfig):
        return vars(source)
    if isinstance(source, nn.Module):
        return {"source": "./made-in-python", "dtype": str(next(source.parameters()).dtype).removeprefix("torch.")}
    return source
