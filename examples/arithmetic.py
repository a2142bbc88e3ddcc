"""Teach SmolLM2-135M two-digit addition with PPO: a reward that can be checked, and problems that it never saw.

    python examples/arithmetic.py                   minutes on one GPU; the model as in docs/demo.md
    python examples/arithmetic.py --model FOLDER    another causal language model

A prompt is three solved problems and an open one, `41 + 38 =`. An answer is right if its line is the sum and nothing
else: reward 1, and .1 for any line that is an integer. Accuracy is that of greedy answers to 512 sums which are not
trained on, in either order of their terms. Subtraction, which is never trained, shows what carries over.
It writes result.json, curves.png and samples.md, and ends with status 1 below `--target`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _demo_models import smollm
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoTokenizer

from lit_ppo import OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule, SamplingConfig
from lit_ppo.rewards import FunctionReward
from lit_ppo.rewards.rules import RegexFormat, exact_match

ROOT = Path(__file__).resolve().parent.parent
SHOTS = "3 + 5 = 8\n27 - 4 = 23\n6 * 7 = 42\n"
HELD_OUT = 512


class Record(Callback):
    """Keep the accuracy on held-out problems, by iteration and by seconds of training."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []
        self.started = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where it stands."""
        accuracy = float(trainer.callback_metrics["val/reward_exact_match"])
        trained = trainer.training or bool(self.points)
        seconds = time.perf_counter() - self.started if trained else 0.0
        self.points.append({"iteration": pl_module.iteration, "seconds": seconds, "accuracy": accuracy})
        print(f"iteration {pl_module.iteration:4d}   {seconds:4.0f} s   held-out accuracy {accuracy:.1%}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Train and measure; return the status of the process."""
    options = parse(argv)
    seed_everything(options.seed, verbose=False)
    options.out.mkdir(parents=True, exist_ok=True)
    train, held_out, subtractions = problems(options.seed)
    model = options.model or str(smollm(options.cache))
    tokenizer = AutoTokenizer.from_pretrained(model)
    line_end = tokenizer("\n", add_special_tokens=False).input_ids[-1]
    sampling = SamplingConfig(max_new_tokens=6, temperature=1.0, stop_tokens=[line_end, tokenizer.eos_token_id])
    module = PPOLightningModule(
        actor=model,
        tokenizer=tokenizer,
        reward=[
            FunctionReward(exact_match),
            FunctionReward(RegexFormat(r"\A *-?\d+\n?\Z"), weight=0.1, name="integer"),
        ],
        sampling=sampling,
        eval_sampling=replace(sampling, temperature=0.0),  # greedy
        ppo=PPOConfig(epochs=2, minibatches=2, kl_coef=0.005, value_clip=None),
        optim=OptimConfig(
            actor_lr=options.lr,
            critic_lr=2.5 * options.lr,
            schedule="constant",
            warmup_iterations=min(5, options.iterations - 1),
        ),
        seed=options.seed,
    )
    record = Record()
    data = PromptDataModule(
        train,
        val=held_out,
        test=subtractions,
        batch_size=options.batch_size,
        val_batch_size=HELD_OUT,
        seed=options.seed,
    )
    cuda = torch.cuda.is_available()
    trainer = Trainer(
        max_epochs=-1,
        max_steps=options.iterations * module.ppo.epochs * module.ppo.minibatches,
        max_time={"seconds": options.time_limit},
        val_check_interval=min(10, options.iterations),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accelerator="auto",
        devices=1,
        precision="bf16-mixed" if cuda else "32-true",
        logger=CSVLogger(options.out, name="", version=""),
        callbacks=[record],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.validate(module, data, verbose=False)
    before = float(trainer.test(module, data, verbose=False)[0]["test/reward_exact_match"])
    trainer.fit(module, data)
    seconds = time.perf_counter() - record.started
    trainer.validate(module, data, verbose=False)
    after = float(trainer.test(module, data, verbose=False)[0]["test/reward_exact_match"])
    answers: Any = trainer.predict(module, data)

    first, last = record.points[0]["accuracy"], record.points[-1]["accuracy"]
    result = {
        "accuracy": {"before": first, "after": last},
        "subtraction, never trained": {"before": before, "after": after},
        "iterations": module.iteration,
        "episodes": module.episodes,
        "seconds": round(seconds, 1),
        "hardware": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "seed": options.seed,
        "curve": record.points,
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    write_samples(options.out / "samples.md", [row for batch in answers for row in batch])
    plot(options.out)
    print(f"{HELD_OUT} held-out sums, greedy: {first:.1%} -> {last:.1%} in {seconds:.0f} s of training")
    print(f"{HELD_OUT} differences, never trained: {before:.1%} -> {after:.1%}")
    print(f"Written to {options.out}: result.json, curves.png, samples.md, metrics.csv")
    return 0 if last >= options.target else 1


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Teach a language model two-digit addition with PPO.")
    parser.add_argument("--model", metavar="FOLDER", help="folder or id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=150, help="of PPO, at most")
    parser.add_argument("--time-limit", type=int, default=420, help="seconds of training, at most")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--target", type=float, default=0.8, help="accuracy below which it ends with status 1")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "arithmetic")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "demo", help="where the model is kept")
    return parser.parse_args(argv)


def problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]], list[dict[str, str]]]:
    """Return sums to train on, sums that are held out in either order of their terms, and differences."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    draw = random.Random(seed)
    draw.shuffle(pairs)

    def either(pair: tuple[int, int]) -> tuple[int, int]:
        return pair if draw.random() < 0.5 else (pair[1], pair[0])

    held_out = [either(pair) for pair in pairs[:HELD_OUT]]
    train = [p for a, b in pairs[HELD_OUT:] for p in {(a, b), (b, a)}]
    differences = [(max(pair), min(pair)) for pair in pairs[HELD_OUT : 2 * HELD_OUT]]
    return (
        [problem(a, "+", b, a + b) for a, b in sorted(train)],
        [problem(a, "+", b, a + b) for a, b in held_out],
        [problem(a, "-", b, a - b) for a, b in differences],
    )


def problem(a: int, sign: str, b: int, answer: int) -> dict[str, str]:
    """Return a row of the prompt set."""
    return {"prompt": f"{SHOTS}{a} {sign} {b} =", "answer": str(answer)}


def write_samples(path: Path, rows: list[dict[str, Any]], shown: int = 24) -> None:
    """Write the first held-out problems with what the trained model answers."""
    lines = ["| problem | answer | |", "|---|---|---|"]
    for row in rows[:shown]:
        said = " ".join(row["response"].split()).replace("|", "\\|")
        right = exact_match([row["response"]], [row["answer"]])[0]
        lines.append(f"| {row['prompt'].splitlines()[-1]} | {said} | {'right' if right else row['answer']} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def plot(folder: Path) -> None:
    """Draw accuracy against seconds, and what was sampled in training."""
    import matplotlib as mpl
    import pandas as pd
    from matplotlib.figure import Figure

    table = pd.read_csv(folder / "metrics.csv")
    points = json.loads((folder / "result.json").read_text())["curve"]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        accuracy, training, kl = figure.subplots(1, 3)
        accuracy.plot([p["seconds"] for p in points], [p["accuracy"] for p in points], marker="o", markersize=3)
        accuracy.set_title("held-out sums answered right, greedy", fontsize=9, loc="left")
        accuracy.set_xlabel("seconds of training")
        for ax, metric, title in (
            (training, "reward/exact_match", "training samples answered right"),
            (kl, "objective/kl", "KL of an answer to the model at the start, nats"),
        ):
            curve = table.set_index("step")[metric].dropna()
            ax.plot(curve.index + 1, curve)
            ax.set_title(title, fontsize=9, loc="left")
            ax.set_xlabel("PPO iteration")
        for ax in (accuracy, training):
            ax.set_ylim(0, 1)
        for ax in (accuracy, training, kl):
            ax.grid(alpha=0.25)
        figure.savefig(folder / "curves.png", dpi=130)


if __name__ == "__main__":
    sys.exit(main())
