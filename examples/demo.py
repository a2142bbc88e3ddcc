"""Train a language model with PPO to write friendlier film reviews, on two CPU cores, in under three minutes.

    python examples/demo.py                  a word-level Llama, trained on the spot on real reviews (kept in .cache/)
    python examples/demo.py --model smollm   SmolLM2-135M-Instruct, on a GPU: see docs/demo.md

Prompts are the first words of reviews; the reward is VADER's sentiment of the text that the model makes of them. A
second judge, TextBlob, has weight 0: it is charted beside the reward and never trained on. Prompts for evaluation are
from reviews that neither the language model nor PPO has seen. It ends with status 1 if the reward has not risen.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _demo_models import Pretraining, review_model, smollm
from _demo_report import plot, show, write_samples
from _demo_texts import beginnings, load_reviews, textblob, vader
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger

from lit_ppo import OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule, SamplingConfig
from lit_ppo.export import export
from lit_ppo.rewards import FunctionReward

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Settings:
    """What differs between the two models."""

    title: str
    """Over the picture."""
    iterations: int
    batch_size: int
    prompt_words: int
    """Words of a review that make a prompt."""
    request: str | None
    """What a chat model is asked; None: the model goes on with the beginning itself."""
    sampling: SamplingConfig
    ppo: PPOConfig
    optim: OptimConfig
    accelerator: str = "cpu"
    precision: Any = "32-true"
    pretraining: Pretraining = field(default_factory=Pretraining)
    held_out: int = 256
    """Prompts for evaluation."""


SETTINGS = {
    "reviews": Settings(
        title="PPO on a word-level Llama of 0.8 million parameters, trained on film reviews",
        iterations=60,
        batch_size=64,
        prompt_words=3,
        request=None,
        # What is no word is never sampled, and is left out of every log-prob alike.
        sampling=SamplingConfig(max_new_tokens=16, temperature=1.0, suppress_tokens=["<pad>", "<bos>", "<unk>"]),
        # Packing saves work where there is much padding; short texts of a tiny model on a CPU are faster padded.
        ppo=PPOConfig(epochs=2, minibatches=2, kl_coef=0.05, value_clip=None, packing=False),
        optim=OptimConfig(actor_lr=6e-4, critic_lr=3e-3, schedule="constant"),
    ),
    "smollm": Settings(
        title="PPO on SmolLM2-135M-Instruct, asked for sentences of film reviews",
        iterations=100,
        batch_size=128,
        prompt_words=4,
        request="Write one sentence of a film review. It starts with: {}",
        sampling=SamplingConfig(max_new_tokens=40, temperature=0.7),
        ppo=PPOConfig(epochs=2, minibatches=2, kl_coef=0.05, value_clip=None),
        optim=OptimConfig(actor_lr=2e-5, critic_lr=5e-5, schedule="linear", warmup_iterations=5),
        accelerator="auto",
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
    ),
}


class Progress(Callback):
    """Print a line at each validation."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say where reward, second judge and KL are."""
        now = {name: float(value) for name, value in trainer.callback_metrics.items()}
        print(
            f"iteration {pl_module.iteration:3d}   reward: training {now['reward/vader']:+.3f}, "
            f"held out {now['val/reward_vader']:+.3f}   second judge: held out {now['val/reward_textblob']:+.3f}   "
            f"KL {now['objective/kl']:.2f}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the status of the process."""
    options = parse(argv)
    quiet()
    settings = SETTINGS[options.model]
    if options.fast:
        settings = shorten(settings)
    iterations = options.iterations or settings.iterations
    if settings.accelerator == "cpu":
        torch.set_num_threads(1)  # with a model this small a second thread costs more than it brings
    seed_everything(options.seed, verbose=False)
    options.out.mkdir(parents=True, exist_ok=True)

    reviews = load_reviews(options.seed)
    if options.model == "reviews":
        actor = review_model(reviews.train, settings.pretraining, options.seed, options.cache)
    else:
        actor = options.model_path or smollm(options.cache)
    module = PPOLightningModule(
        actor=str(actor),
        reward=[FunctionReward(vader), FunctionReward(textblob, weight=0)],
        sampling=settings.sampling,
        eval_sampling=settings.sampling,
        ppo=settings.ppo,
        optim=settings.optim,
        seed=options.seed,
    )
    train, held_out = make_prompts(reviews.train, reviews.held_out, settings, module.tokenizer)
    print(f"{len(train):,} prompts to train on, {len(held_out):,} held out, such as {held_out[0]['start']!r}.")
    data = PromptDataModule(
        train=train, val=held_out, batch_size=settings.batch_size, val_batch_size=settings.held_out, seed=options.seed
    )
    trainer = Trainer(
        max_epochs=-1,
        max_steps=iterations * settings.ppo.epochs * settings.ppo.minibatches,  # optimizer steps
        val_check_interval=min(10, iterations),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        accelerator=settings.accelerator,
        devices=1,
        precision=settings.precision,
        logger=CSVLogger(options.out, name="", version=""),
        log_every_n_steps=1,
        callbacks=[Progress()],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    before = sample(trainer, module, data)
    trainer.fit(module, data)
    after = sample(trainer, module, data)

    rows = compare(before, after, chat=settings.request is not None)
    result = {
        "model": options.model,
        "seed": options.seed,
        "iterations": iterations,
        "before": measure(rows, "before"),
        "after": measure(rows, "after"),
        "kl": last_kl(options.out / "metrics.csv"),
        "cpu_seconds": round(time.process_time(), 1),
        "peak_gib": peak_gib(),
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    write_samples(options.out / "samples.md", rows)
    plot([options.out], options.out / "curves.png", f"{settings.title} (seed {options.seed})")
    folder = export(module, options.out / "export", overwrite=True)
    show(result, rows)
    print(f"\nThe exported model in plain transformers: {generate_plainly(folder, held_out[0]['prompt'])!r}")
    print(f"Written to {options.out}: curves.png, samples.md, metrics.csv, result.json, export/")
    print(f"{result['cpu_seconds']:.0f} s of CPU time, at most {result['peak_gib']} GiB of memory")
    return 0 if options.fast or risen(result) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a language model with PPO to write friendlier film reviews.")
    parser.add_argument("--model", choices=SETTINGS, default="reviews", help="a small one made here, or SmolLM2-135M")
    parser.add_argument("--model-path", metavar="FOLDER", help="with --model smollm: another chat model, folder or id")
    parser.add_argument("--seed", type=int, default=0, help="of everything: the split, the language model, PPO")
    parser.add_argument("--iterations", type=int, help="of PPO")
    parser.add_argument("--out", type=Path, help="default: outputs/demo, or outputs/demo-smollm")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "demo", help="where language models are kept")
    parser.add_argument("--fast", action="store_true", help="a few seconds to see that it runs; nothing is learned")
    options = parser.parse_args(argv)
    if options.model_path is not None and options.model != "smollm":
        parser.error("--model-path has no effect on --model reviews, which makes its own. Add --model smollm.")
    if options.iterations is not None and options.iterations < 1:
        parser.error(f"--iterations {options.iterations} must be at least 1.")
    if options.out is None:
        options.out = ROOT / "outputs" / ("demo" if options.model == "reviews" else f"demo-{options.model}")
    return options


def quiet() -> None:
    """Keep the output to what the demo is about."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "Experiment logs directory .* exists")  # a second run replaces the first
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")  # Lightning's, not ours


def shorten(settings: Settings) -> Settings:
    """Cut everything down to seconds."""
    return replace(
        settings,
        iterations=2,
        batch_size=8,
        sampling=replace(settings.sampling, max_new_tokens=8),
        pretraining=Pretraining(steps=40, batch=4, vocabulary=1000, hidden=32),
        held_out=16,
    )


def make_prompts(
    train: list[str], held_out: list[str], settings: Settings, tokenizer: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Make prompts of the beginnings of reviews; none of those held out is also trained on."""
    known = set(tokenizer.get_vocab()) if settings.request is None else None  # its tokens are words
    starts = beginnings(train, settings.prompt_words, known)
    seen = set(starts)
    others = [start for start in beginnings(held_out, settings.prompt_words, known) if start not in seen]

    def prompt(start: str) -> dict[str, Any]:
        if settings.request is None:
            return {"prompt": start, "start": start}
        return {"prompt": [{"role": "user", "content": settings.request.format(start)}], "start": start}

    return [prompt(start) for start in starts], [prompt(start) for start in others[: settings.held_out]]


def sample(trainer: Trainer, module: PPOLightningModule, data: PromptDataModule) -> list[dict[str, Any]]:
    """Return a completion of each held-out prompt, with the same noise each time."""
    batches: Any = trainer.predict(module, data)
    return [row for batch in batches for row in batch]


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]], *, chat: bool) -> list[dict[str, Any]]:
    """Return a dict a prompt, with both completions and what both judges say of them."""
    starts = [row["start"] for row in before]
    columns: dict[str, list[Any]] = {"start": starts}
    for when, completions in (("before", before), ("after", after)):
        texts = [row["response"] for row in completions]
        messages: list[Any] = [[] if chat else None] * len(texts)
        columns[when] = texts
        columns[f"{when}_reward"] = vader(starts, texts, messages)
        columns[f"{when}_second"] = textblob(starts, texts, messages)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def measure(rows: list[dict[str, Any]], when: str) -> dict[str, float]:
    """Sum up the completions before or after PPO."""
    result: dict[str, float] = {"prompts": len(rows), "distinct": len({row[when] for row in rows})}
    for judge in ("reward", "second"):
        scores = [row[f"{when}_{judge}"] for row in rows]
        result[judge] = statistics.fmean(scores)
        result[f"{judge}_se"] = statistics.stdev(scores) / len(scores) ** 0.5
    result["positive"] = statistics.fmean(row[f"{when}_reward"] > 0.05 for row in rows)  # VADER's own threshold
    return result


def last_kl(metrics: Path) -> float:
    """Return the KL of a sequence, averaged over the last five iterations."""
    import pandas as pd

    return float(pd.read_csv(metrics)["objective/kl"].dropna().tail(5).mean())


def peak_gib() -> float:
    """Return the most memory that this process has held."""
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 2)


def generate_plainly(folder: Path, prompt: str | list[dict[str, str]]) -> str:
    """Load the export as anybody would, without lit-ppo, and let it go on with a text or answer a chat."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = prompt
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=32)
    start = 0 if text is prompt else inputs.input_ids.shape[1]
    return str(tokenizer.decode(output[0, start:], skip_special_tokens=True))


def risen(result: dict[str, Any]) -> bool:
    """Say whether the reward on held-out prompts is higher than before by more than chance would explain."""
    before, after = result["before"], result["after"]
    rise, noise = after["reward"] - before["reward"], (before["reward_se"] ** 2 + after["reward_se"] ** 2) ** 0.5
    if rise > 3 * noise:
        return True
    print(f"The reward has not risen: {rise:+.3f}, with a standard error of {noise:.3f}.", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
