"""Rank 0 of 4 under FSDP2, on the CPU: python fsdp2_memory.py true|false prints what a phase takes, and its forecast.

A process of its own: the group of ranks that are not there is for good. The argument is `ppo.sequential_roles`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny
import torch
from lightning.pytorch import Callback
from transformers import LlamaConfig

from benchmarks.fake_ranks import FakeRanks
from lit_ppo import PPOLightningModule, PromptDataModule
from lit_ppo.callbacks import GradientCheckpointing
from lit_ppo.plan.forecast import Forecast
from lit_ppo.plan.setup import read_setup

SHAPE = LlamaConfig(
    **(tiny.SHAPE | {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4})
)
STRATEGY = {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}


class Profile(Callback):
    """Has torch's profiler note every allocation of the second iteration, and when its phases begin and end."""

    def __init__(self, file: Path) -> None:
        self.file, self.span = file, None
        cpu = torch.profiler.ProfilerActivity.CPU
        self.profile = torch.profiler.profile(activities=[cpu], profile_memory=True)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.phase_listeners.append(self.phase)

    def phase(self, name: str | None) -> None:
        if name is not None:
            self.span = torch.profiler.record_function(f"phase {name}")
            self.span.__enter__()
        else:
            self.span.__exit__(None, None, None)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.profile.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.profile.__exit__(None, None, None)
            self.profile.export_chrome_trace(str(self.file))

    def peaks(self) -> dict[str, int]:
        """Bytes over what was there when a phase began."""
        events = json.loads(self.file.read_text())["traceEvents"]
        memory = sorted((e["ts"], e["args"]["Total Allocated"]) for e in events if e.get("name") == "[memory]")
        found = {}
        for event in events:
            if str(event.get("name")).startswith("phase "):
                start, end = event["ts"], event["ts"] + event["dur"]
                before = [total for at, total in memory if at < start]
                inside = [total for at, total in memory if start <= at <= end]
                found[event["name"].split()[1]] = max(inside) - (before[-1] if before else 0)
        return found


def main(sequential: bool) -> None:
    """Run two iterations, and print bytes by phase: measured, and forecast."""
    model = {
        "reward": "lit_ppo.rewards.rules.length_penalty",
        "sampling": {"max_new_tokens": 8, "stop_tokens": []},
        "ppo": {"epochs": 1, "micro_batch_size": 2, "rollout_engine": "hf", "sequential_roles": sequential},
    }
    data = {"batch_size": 16, "max_prompt_length": 5}
    trainer = {"strategy": STRATEGY, "callbacks": ["GradientCheckpointing"]}
    config = {"model": {"actor": "here"} | model, "data": data, "trainer": trainer}
    forecast = Forecast(read_setup(config, lambda role, source: SHAPE, gpus=4))
    held = ("weights", "optimizer", "workspace")  # what is there all along
    expected = {
        name: sum(size for part, size in forecast.phases[name].parts.items() if not part.startswith(held))
        for name in ("rollout", "score", "update")
    }
    folder = Path(tempfile.mkdtemp())
    profile = Profile(folder / "trace.json")
    torch.manual_seed(0)
    actor = tiny.AutoModelForCausalLM.from_config(SHAPE)
    module = PPOLightningModule(actor=actor, tokenizer=tiny.tokenizer(), **model)
    run = tiny.trainer(
        folder, strategy=FakeRanks(4, 1), callbacks=[profile, GradientCheckpointing()], limit_train_batches=2
    )
    run.fit(module, PromptDataModule(tiny.rows(32), **data))
    print(json.dumps({"measured": profile.peaks(), "forecast": expected}))


if __name__ == "__main__":
    main(sys.argv[1] == "true")
