"""One rank that makes every mistake in turn: python mistakes.py FOLDER JSON writes what each one raised, and when."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import cases
import tiny
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lit_ppo import LoRAConfig, PromptDataModule
from lit_ppo.callbacks import QuantizeModules

torch.set_num_threads(1)


def attempts(models: dict[str, str], rank: int, folder: Path) -> dict[str, Any]:
    """A function for each mistake."""
    fsdp2 = lambda: cases.strategy("fsdp2", 2)  # noqa: E731
    odd = rank == 1

    def fit(module: Any, data: Any = None, **options: Any) -> None:
        settings = dict(strategy=DDPStrategy(process_group_backend="gloo"), devices=2)
        tiny.trainer(folder, **(settings | options)).fit(module, cases.data("full") if data is None else data)

    def module(**changes: Any) -> Any:
        return cases.module("full", **models, **changes)

    return {
        "another seed": lambda: fit(module(seed=rank)),
        "another batch size": lambda: fit(module(), PromptDataModule(tiny.rows(16), batch_size=4 if odd else 8)),
        "other prompts": lambda: fit(module(), PromptDataModule(tiny.rows(16)[rank:] + ["w1"] * rank, batch_size=8)),
        "no such folder on one rank": lambda: fit(module(reference="/nowhere" if odd else None)),
        "tensor parallel": lambda: fit(module(), strategy=ModelParallelStrategy(process_group_backend="gloo")),
        "flat parameters": lambda: fit(module(), strategy=cases.CPUFullyShardedStrategy(use_orig_params=False)),
        "four devices, two processes": lambda: fit(module(), devices=4),
        "16-mixed": lambda: fit(module(), strategy=fsdp2(), precision="16-mixed"),
        "a quantized trunk": lambda: fit(
            module(lora=LoRAConfig(r=4)), strategy=fsdp2(), callbacks=[QuantizeModules("actor")]
        ),
        "a damaged file": lambda: fit(module(reference=str(folder / "damaged"))),
        "two runs in one": lambda: fit(module(reference=models["reward"] if odd else None)),
    }


def main(folder: str, argument: str) -> None:
    """Make the mistakes."""
    rank, seen = int(os.environ["RANK"]), {}
    for name, attempt in attempts(json.loads(argument), rank, Path(folder)).items():
        began, text = time.monotonic(), "nothing"
        try:
            attempt()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        seen[name] = {"text": text, "seconds": time.monotonic() - began}
        print(name, seen[name], flush=True)
    torch.save(seen, Path(folder) / f"{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
