"""Memory and time of each callback on one CUDA device, with and without it in the same run.

    python benchmarks/callbacks.py [--size 0.5B|1.5B] [--out docs/benchmarks/callbacks.md]

Random weights of the true shape: right for memory and speed, they say nothing of learning.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from lit_ppo import OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule, RoleConfig, SamplingConfig
from lit_ppo.callbacks import FreezeParameters, GradientCheckpointing, OOMGuard, QuantizeModules

GIB = 2**30
SHAPES = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
}


def config(size: str, **changes: Any) -> Qwen2Config:
    """Return a Qwen2 shape."""
    return Qwen2Config(vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True, **(SHAPES[size] | changes))


class Classifier(LightningModule):
    """An ordinary LightningModule that knows nothing of lit-ppo: automatic optimization, a frozen teacher."""

    def __init__(self, size: str, teacher: bool = False, fp32: bool = False) -> None:
        super().__init__()
        dtype = torch.float32 if fp32 else torch.bfloat16
        with torch.device("cuda"):
            self.student = AutoModelForSequenceClassification.from_config(
                config(size, num_labels=2, pad_token_id=0), dtype=dtype
            )
            self.teacher = None
            if teacher:
                self.teacher = AutoModelForSequenceClassification.from_config(
                    config(size, num_labels=1, pad_token_id=0), dtype=dtype
                )
                self.teacher.eval().requires_grad_(False)
        self.student.train()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.student(input_ids=batch).logits.float()
        if self.teacher is not None:
            with torch.no_grad():
                target = (self.teacher(input_ids=batch).logits[:, 0] > 0).long()
        else:
            target = batch[:, 0] % 2
        return torch.nn.functional.cross_entropy(logits, target)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.student.parameters() if p.requires_grad], lr=1e-5)


class Meter(Callback):
    """Peak memory and the median time of a step, after the first two."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        if batch_idx == 0:
            torch.cuda.reset_peak_memory_stats()
            self.times: list[float] = []
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.synchronize()
        self.times.append(time.perf_counter() - self.start)

    def result(self) -> tuple[float, float]:
        times = sorted(self.times[2:])
        return torch.cuda.max_memory_allocated() / GIB, times[len(times) // 2]


def run(
    module: LightningModule, callbacks: list[Callback], batch: int, length: int, steps: int = 8
) -> tuple[float, float]:
    """Train some steps and return (peak GiB, seconds a step)."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(3, 150_000, (batch * steps, length), generator=generator)
    meter = Meter()
    trainer(callbacks=[meter, *callbacks]).fit(module, DataLoader(data, batch_size=batch))
    return meter.result()


def trainer(**options: Any) -> Trainer:
    """Return a quiet trainer."""
    return Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        **options,
    )


def free() -> None:
    """Give everything back before the next case."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def compare(name: str, without: Callable[[], tuple[float, float]], with_: Callable[[], tuple[float, float]]) -> str:
    """Run both and return a table row."""
    free()
    before = without()
    free()
    after = with_()
    row = f"| {name} | {before[0]:.2f} | {after[0]:.2f} | {before[1] * 1e3:.0f} | {after[1] * 1e3:.0f} |"
    print(row, flush=True)
    return row


def weights_after(guard: list[Callback], fraction: float | None, size: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Train a float32 classifier three steps, under a memory cap if given; return its weights and the guard."""
    free()
    torch.manual_seed(0)
    module = Classifier(size, fp32=True)
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        peak = run(module, guard, 32, 512, 3 + 2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {k: v.cpu() for k, v in module.student.state_dict().items()}, peak


def oom_rows(size: str) -> list[str]:
    """A batch that does not fit under a hard cap, with and without the dry run, against the run without the cap."""
    free_run, (peak, _) = weights_after([], None, size)
    cap = peak * 0.75
    lines = [
        f"A float32 classifier of {size}, five steps on batches of 32 x 512 tokens, needs {peak:.1f} GiB. Under a hard",
        f"cap of {cap:.1f} GiB (`torch.cuda.set_per_process_memory_fraction`):",
        "",
        "| | peak GiB | out-of-memory errors | micro-batch | largest difference of a weight |",
        "|---|---|---|---|---|",
    ]
    for dry_run in (True, False):
        guard = OOMGuard(dry_run=dry_run)
        fraction = cap * GIB / torch.cuda.get_device_properties(0).total_memory
        capped_run, (capped, _) = weights_after([guard], fraction, size)
        difference = max(float((capped_run[k] - free_run[k]).abs().max()) for k in free_run)
        state = guard.policy.state_dict()
        lines.append(
            f"| `OOMGuard(dry_run={dry_run})` | {capped:.1f} | {sum(state['events'].values())} | "
            f"{min(state['sizes'].values(), default=32)} | {difference:.1e} |"
        )
    return lines


def ppo(size: str, callbacks: list[Callback], folder: Path) -> tuple[float, float]:
    """Run PPO iterations with four models of this size and return (peak GiB, seconds an iteration)."""
    role = RoleConfig(source=str(folder), dtype="bfloat16")

    def reward(responses: list[str]) -> list[float]:
        return [float(len(r)) for r in responses]

    module = PPOLightningModule(
        role,
        reward=reward,
        critic=role,
        reference=role,
        tokenizer=words(),
        sampling=SamplingConfig(max_new_tokens=128, temperature=1.0),
        ppo=PPOConfig(epochs=1, minibatches=1, micro_batch_size=16),
        optim=OptimConfig(actor_lr=1e-6, schedule="constant"),
    )
    rows = [" ".join(f"t{3 + (i * 97 + j) % 1000}" for j in range(128)) for i in range(64 * 4)]
    meter = Meter()
    trainer(callbacks=[meter, *callbacks]).fit(module, PromptDataModule(rows, batch_size=64))
    return meter.result()


def words() -> Any:
    """Return a word-level tokenizer as wide as the model's vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2} | {f"t{i}": i for i in range(3, 150_000)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def main() -> None:
    """Run every case and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=list(SHAPES), default="0.5B")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    size = options.size
    rows = [
        "| case | peak GiB without | with | ms a step without | with |",
        "|---|---|---|---|---|",
        compare(
            f"`GradientCheckpointing()`, classifier of {size}, bf16, 16 x 1,024 tokens",
            lambda: run(Classifier(size), [], 16, 1024),
            lambda: run(Classifier(size), [GradientCheckpointing()], 16, 1024),
        ),
        *[
            compare(
                f'`QuantizeModules("teacher", mode="{mode}")`, a frozen teacher of {size} beside it, 4 x 256 tokens',
                lambda: run(Classifier(size, teacher=True), [], 4, 256),
                lambda mode=mode: run(Classifier(size, teacher=True), [QuantizeModules("teacher", mode=mode)], 4, 256),  # type: ignore[misc]
            )
            for mode in ("nf4", "int8")
        ],
        compare(
            f'`FreezeParameters("all-but-head")`, classifier of {size}, 16 x 256 tokens',
            lambda: run(Classifier(size), [], 16, 256),
            lambda: run(Classifier(size), [FreezeParameters("all-but-head")], 16, 256),
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(config(size, eos_token_id=1, pad_token_id=0), dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        rows.append(
            compare(
                f"`GradientCheckpointing()`, PPO, three models of {size}, 64 x (128 + 128) tokens, micro-batches of 16",
                lambda: ppo(size, [], Path(folder)),
                lambda: ppo(size, [GradientCheckpointing()], Path(folder)),
            )
        )
    text = [
        "# Callbacks: memory and time",
        "",
        f"One {torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}.",
        f"Command: `python {shlex.join(sys.argv)}`.",
        "",
        *rows,
        "",
        *oom_rows(size),
        "",
    ]
    print("\n".join(text))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(text))


if __name__ == "__main__":
    main()
