"""The whole road on one machine: supervised fine-tuning, a reward model from human labels, PPO; and whether it helped.

    python examples/three_stages.py                  a word-level Llama of 0.8 million parameters, minutes on a CPU core
    python examples/three_stages.py --model smollm   SmolLM2-135M-Instruct, on a GPU: see docs/three_stages.md

1. SFT: the model learns to go on with film reviews, and is exported.
2. The reward model starts from it and learns, from pairs of a positive and a negative review (people's own labels),
   which of the two is positive. It is exported with scores of mean 0 and standard deviation 1 over ordinary reviews.
3. PPO raises that reward: the *proxy*. Two *gold* judges, VADER and TextBlob, score the same texts; no training has
   ever seen them. PPO runs twice, with a KL that is held and with hardly any, which shows what over-optimisation is.

Everything is measured on reviews that no stage has seen. It ends with status 1 if the gold judges did not rise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _demo_models import Pretraining, keep, new_llama, smollm, word_tokenizer
from _demo_texts import Reviews, load_labels, load_reviews, textblob, vader
from _three_stages_report import plot, show, write_samples
from demo import last_kl, make_prompts, peak_gib, quiet
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger

from lit_ppo import (
    OptimConfig,
    PPOConfig,
    PPOLightningModule,
    PreferenceDataModule,
    PromptDataModule,
    RankingConfig,
    RewardConfig,
    RewardModule,
    SamplingConfig,
    SFTConfig,
    SFTDataModule,
    SFTModule,
    StageOptimConfig,
)
from lit_ppo.export import export
from lit_ppo.rewards import FunctionReward

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Settings:
    """What differs between the two models."""

    request: str | None
    """What a chat model is asked; None: the model goes on with the beginning itself."""
    prompt_words: int
    """Words of a review that make a prompt."""
    sft_epochs: int
    sft_batch: int
    sft: SFTConfig
    sft_optim: StageOptimConfig
    pairs: int
    """Of reviews that the reward model is trained on, once each."""
    words: tuple[int, int]
    """Both reviews of a pair are cut to as many words, drawn between these: completions are short as well."""
    pairs_batch: int
    ranking: RankingConfig
    ranking_optim: StageOptimConfig
    iterations: int
    batch_size: int
    sampling: SamplingConfig
    optim: OptimConfig
    runs: dict[str, PPOConfig]
    """The runs of PPO by name; the first is the one that counts."""
    accelerator: str = "cpu"
    precision: Any = "32-true"
    pretraining: Pretraining = field(default_factory=Pretraining)
    held_out: int = 256
    """Prompts for evaluation, and pairs."""


SETTINGS = {
    "reviews": Settings(
        request=None,
        prompt_words=3,
        sft_epochs=5,
        sft_batch=48,
        sft=SFTConfig(micro_batch_size=16, packing=False),  # on a CPU padding costs less than one call a sequence
        sft_optim=StageOptimConfig(
            lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1, schedule="cosine", warmup_iterations=30
        ),
        pairs=16_000,
        words=(8, 32),
        pairs_batch=32,
        ranking=RankingConfig(normalize="mean_std", packing=False),
        ranking_optim=StageOptimConfig(lr=1e-3, weight_decay=0.1, warmup_iterations=10),
        iterations=60,
        batch_size=64,
        sampling=SamplingConfig(max_new_tokens=16, temperature=1.0, suppress_tokens=["<pad>", "<bos>", "<unk>"]),
        optim=OptimConfig(actor_lr=6e-4, critic_lr=3e-3, schedule="constant"),
        runs={
            "KL held": PPOConfig(
                epochs=2, minibatches=2, value_clip=None, packing=False, kl_coef=0.1, kl_target=5.0, kl_horizon=2000
            ),
            "hardly any KL penalty": PPOConfig(epochs=2, minibatches=2, value_clip=None, packing=False, kl_coef=0.005),
        },
    ),
    "smollm": Settings(
        request="Write one sentence of a film review. It starts with: {}",
        prompt_words=4,
        sft_epochs=1,
        sft_batch=32,
        sft=SFTConfig(micro_batch_tokens=8192),
        sft_optim=StageOptimConfig(lr=2e-5, schedule="cosine", warmup_iterations=20),
        pairs=16_000,
        words=(8, 32),
        pairs_batch=64,
        ranking=RankingConfig(normalize="mean_std", micro_batch_tokens=16384),
        ranking_optim=StageOptimConfig(lr=2e-5, warmup_iterations=20),
        iterations=120,
        batch_size=128,
        sampling=SamplingConfig(max_new_tokens=40, temperature=1.0),
        optim=OptimConfig(actor_lr=1e-5, critic_lr=3e-5, schedule="constant"),
        runs={
            "KL held": PPOConfig(
                epochs=2, minibatches=2, value_clip=None, kl_coef=0.05, kl_target=10.0, kl_horizon=4000
            ),
            "hardly any KL penalty": PPOConfig(epochs=2, minibatches=2, value_clip=None, kl_coef=0.002),
        },
        accelerator="auto",
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
    ),
}


class Road:
    """The three stages, one after the other; each is what anybody would write, and leaves a folder for the next.

    Args:
        settings: Of the model.
        options: The command line.
    """

    def __init__(self, settings: Settings, options: argparse.Namespace) -> None:
        self.settings, self.seed, self.out = settings, options.seed, options.out
        self.reviews: Reviews = load_reviews(options.seed)
        if options.fast:
            self.reviews = Reviews(self.reviews.train[:400], self.reviews.held_out[:200])
        self.labels = load_labels()
        self.result: dict[str, Any] = {"seconds": {}}

    def trainer(self, name: str, **options: Any) -> Trainer:
        """Return a Trainer that logs to a folder of the stage."""
        return Trainer(
            accelerator=self.settings.accelerator,
            devices=1,
            precision=self.settings.precision,
            logger=CSVLogger(self.out / name, name="", version=""),
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=sys.stdout.isatty(),
            **options,
        )

    def timed(self, name: str, start: float) -> None:
        """Keep how much CPU time a stage took."""
        self.result["seconds"][name] = round(time.process_time() - start, 1)

    # -- 1

    def sft(self, base: Path) -> Path:
        """Fine-tune on reviews: given how one begins, how it goes on."""
        start, s = time.process_time(), self.settings
        data = SFTDataModule(
            train=[self.example(text) for text in self.reviews.train if len(text.split()) > s.prompt_words],
            val=[self.example(text) for text in self.reviews.held_out if len(text.split()) > s.prompt_words],
            batch_size=s.sft_batch,
            max_length=128,
            seed=self.seed,
        )
        module = SFTModule(str(base), sft=s.sft, optim=s.sft_optim, seed=self.seed)
        trainer = self.trainer("sft", max_epochs=s.sft_epochs, val_check_interval=0.5)
        before = trainer.validate(module, data, verbose=False)[0]
        trainer.fit(module, data)
        loss = float(trainer.callback_metrics["val/loss"])
        self.result["sft"] = {"before": before["val/loss"], "after": loss}
        print(f"1. SFT: held-out loss a word {before['val/loss']:.2f} -> {loss:.2f}", flush=True)
        self.timed("sft", start)
        return export(module, self.out / "policy-sft", overwrite=True)

    def example(self, text: str) -> dict[str, Any]:
        """Return a review as a prompt and its answer."""
        words, n = text.split(), self.settings.prompt_words
        if self.settings.request is None:
            return {"prompt": " ".join(words[:n]), "answer": " " + " ".join(words[n:])}
        return {"messages": self.chat(text)}

    def chat(self, text: str) -> list[dict[str, str]]:
        """Return the chat in which a review is the answer."""
        begin = " ".join(text.split()[: self.settings.prompt_words])
        asked = {"role": "user", "content": str(self.settings.request).format(begin)}
        return [asked, {"role": "assistant", "content": text}]

    # -- 2

    def reward_model(self, policy: Path) -> Path:
        """Learn from people's labels which of two reviews is positive."""
        start, s = time.process_time(), self.settings
        data = PreferenceDataModule(
            train=self.pairs(self.reviews.train, s.pairs),
            val=self.pairs(self.reviews.held_out, 4 * s.held_out),
            reference=[self.judged(text, s.prompt_words + s.sampling.max_new_tokens) for text in self.reviews.train],
            batch_size=s.pairs_batch,
            val_batch_size=256,
            seed=self.seed,
        )
        module = RewardModule(str(policy), ranking=s.ranking, optim=s.ranking_optim, seed=self.seed)
        trainer = self.trainer("reward", max_epochs=1, val_check_interval=0.1)
        trainer.fit(module, data)
        accuracy = float(trainer.callback_metrics["val/accuracy"])
        self.result["reward"] = {"accuracy": accuracy, "pairs": 4 * s.held_out}
        print(f"2. Reward model: {accuracy:.1%} of {4 * s.held_out:,} held-out pairs in the right order", flush=True)
        self.timed("reward", start)
        return export(module, self.out / "reward-model", overwrite=True)

    def pairs(self, texts: list[str], count: int) -> list[dict[str, Any]]:
        """Return pairs of a positive and a negative review, cut to the same number of words."""
        draw = random.Random(f"{self.seed} {count}")
        good, bad = ([text for text in texts if self.labels[text] == label] for label in (1, 0))
        found = []
        for _ in range(count):
            words = draw.randint(*self.settings.words)
            chosen, rejected = (self.judged(draw.choice(side), words) for side in (good, bad))
            if self.settings.request is None:
                found.append({"prompt": "", "chosen": chosen, "rejected": rejected})
            else:
                found.append({"chosen": chosen["messages"], "rejected": rejected["messages"]})
        return found

    def judged(self, text: str, words: int) -> Any:
        """Return a review as the reward model reads it: a text of so many words, or the answer of a chat."""
        cut = " ".join(text.split()[:words])
        return cut if self.settings.request is None else {"messages": self.chat(cut)}

    # -- 3

    def ppo(self, policy: Path, scorer: Path, name: str) -> PPOLightningModule:
        """Raise the reward model's score; chart the gold judges, which have weight 0."""
        start, s = time.process_time(), self.settings
        module = PPOLightningModule(
            actor=str(policy),
            reward=[
                RewardConfig(source=str(scorer), name="proxy"),
                FunctionReward(vader, weight=0, name="vader"),
                FunctionReward(textblob, weight=0, name="textblob"),
            ],
            sampling=s.sampling,
            eval_sampling=s.sampling,
            ppo=s.runs[name],
            optim=s.optim,
            seed=self.seed,
        )
        train, held_out = make_prompts(self.reviews.train, self.reviews.held_out, s, module.tokenizer)  # type: ignore[arg-type]
        data = PromptDataModule(
            train=train, val=held_out, batch_size=s.batch_size, val_batch_size=s.held_out, seed=self.seed
        )
        trainer = self.trainer(
            name.replace(" ", "-"),
            max_epochs=-1,
            max_steps=s.iterations * s.runs[name].epochs * s.runs[name].minibatches,
            val_check_interval=min(5, s.iterations),
            check_val_every_n_epoch=None,
        )
        before, texts_before = self.evaluate(trainer, module, data)
        trainer.fit(module, data)
        after, texts_after = self.evaluate(trainer, module, data)
        self.result.setdefault("ppo", {})[name] = {
            "before": before,
            "after": after,
            "kl": last_kl(self.out / name.replace(" ", "-") / "metrics.csv"),
            "kl_coef": module.kl.value,
        }
        self.rows = [dict(start=a["start"], before=a["response"], after=b["response"])
                     for a, b in zip(texts_before, texts_after, strict=True)]  # fmt: skip
        print(
            f"3. PPO, {name}: proxy {before['proxy']:+.2f} -> {after['proxy']:+.2f}, gold VADER {before['vader']:+.3f} "
            f"-> {after['vader']:+.3f}, TextBlob {before['textblob']:+.3f} -> {after['textblob']:+.3f}, "
            f"KL {self.result['ppo'][name]['kl']:.1f}",
            flush=True,
        )
        self.timed(f"ppo, {name}", start)
        return module

    def evaluate(
        self, trainer: Trainer, module: PPOLightningModule, data: PromptDataModule
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return what all judges say of completions of the held-out prompts, and the completions."""
        scores: Any = trainer.validate(module, data, verbose=False)[0]
        batches: Any = trainer.predict(module, data)
        rows = [row for batch in batches for row in batch]
        chat = self.settings.request is not None
        found = {name: float(scores[f"val/reward_{name}"]) for name in ("proxy", "vader", "textblob")}
        for name, judge in (("vader", vader), ("textblob", textblob)):
            each = judge([r["start"] for r in rows], [r["response"] for r in rows], [[] if chat else None] * len(rows))
            found[f"{name}_se"] = statistics.stdev(each) / len(each) ** 0.5
        found["length"] = float(scores["val/length_mean"])
        found["distinct"] = len({row["response"] for row in rows})
        return found, rows


def main(argv: list[str] | None = None) -> int:
    """Run the three stages; return the status of the process."""
    options = parse(argv)
    quiet()
    settings = SETTINGS[options.model]
    if options.fast:
        settings = shorten(settings)
    if settings.accelerator == "cpu":
        torch.set_num_threads(1)  # with a model this small a second thread costs more than it brings
    seed_everything(options.seed, verbose=False)
    options.out.mkdir(parents=True, exist_ok=True)

    road = Road(settings, options)
    if options.model == "reviews":  # to begin with a model that knows nothing
        tokenizer = word_tokenizer(road.reviews.train, settings.pretraining.vocabulary)
        base = keep(options.out / "base", new_llama(tokenizer, settings.pretraining, options.seed), tokenizer)
    else:
        base = Path(options.model_path) if options.model_path else smollm(options.cache)
    policy = road.sft(base)
    scorer = road.reward_model(policy)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(settings.runs):
        module = road.ppo(policy, scorer, name)
        if number == 0:
            export(module, options.out / "policy-ppo", overwrite=True)
            rows = road.rows
    result = {
        "model": options.model,
        "seed": options.seed,
        "prompts": len(rows),
        **road.result,
        "cpu_seconds": round(time.process_time(), 1),
        "peak_gib": peak_gib(),
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    write_samples(options.out / "samples.md", rows)
    plot(options.out, list(settings.runs), options.out / "curves.png")
    show(result, rows)
    print(f"\nWritten to {options.out}: curves.png, samples.md, result.json, metrics of each stage, and the models")
    print("policy-sft/, reward-model/ and policy-ppo/, which plain transformers loads.")
    print(f"{result['cpu_seconds']:.0f} s of CPU time, at most {result['peak_gib']} GiB of memory")
    return 0 if options.fast or risen(result["ppo"][next(iter(settings.runs))]) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="SFT, a reward model and PPO, one after the other.")
    parser.add_argument("--model", choices=SETTINGS, default="reviews", help="a small one made here, or SmolLM2-135M")
    parser.add_argument("--model-path", metavar="FOLDER", help="with --model smollm: another chat model, folder or id")
    parser.add_argument("--seed", type=int, default=0, help="of everything: the split, the models, PPO")
    parser.add_argument("--out", type=Path, help="default: outputs/three_stages, or outputs/three_stages-smollm")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "demo", help="where SmolLM2 is kept")
    parser.add_argument("--fast", action="store_true", help="a few seconds to see that it runs; nothing is learned")
    options = parser.parse_args(argv)
    if options.model_path is not None and options.model != "smollm":
        parser.error("--model-path has no effect on --model reviews, which makes its own. Add --model smollm.")
    if options.out is None:
        options.out = ROOT / "outputs" / ("three_stages" if options.model == "reviews" else "three_stages-smollm")
    return options


def shorten(settings: Settings) -> Settings:
    """Cut everything down to seconds."""
    return replace(
        settings,
        sft_epochs=1,
        sft_batch=32,
        sft=replace(settings.sft, micro_batch_size=None, micro_batch_tokens=None),
        pairs=64,
        iterations=2,
        batch_size=8,
        sft_optim=replace(settings.sft_optim, warmup_iterations=0),
        ranking_optim=replace(settings.ranking_optim, warmup_iterations=0),
        ranking=replace(settings.ranking, references=16),
        sampling=replace(settings.sampling, max_new_tokens=8),
        pretraining=Pretraining(vocabulary=1000, hidden=32),
        held_out=16,
    )


def risen(run: dict[str, Any]) -> bool:
    """Say whether the gold judges like the held-out completions better than before, by more than chance explains."""
    up = {}
    for judge in ("vader", "textblob"):
        noise = (run["before"][f"{judge}_se"] ** 2 + run["after"][f"{judge}_se"] ** 2) ** 0.5
        up[judge] = (run["after"][judge] - run["before"][judge]) / noise
    if min(up.values()) > 3:
        return True
    print(f"The gold judges have not risen by 3 standard errors: {up}", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
