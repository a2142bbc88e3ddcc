"""Learning side by side: lit-ppo and TRL's PPO on the same model, prompts, reward, options and episodes.

    python benchmarks/learning.py --side lit --seed 0      one run, a row of docs/benchmarks/learning.jsonl
    python benchmarks/learning.py --side trl --seed 0      the same with TRL 1.12, if it is installed
    python benchmarks/learning.py --report                 the table and the plot, of all rows

SmolLM2-135M-Instruct is asked for a sentence of a film review that starts with given words; the reward is VADER's
sentiment of what it writes. Both sides train in float32 (matrix products as `--matmul` says) with the same options and
the defaults of TRL's PPO where it has some; `_learning_trl.py` says what is done so that TRL learns as well as it can.
Curves are each side's own figures, over the samples that it trains on: the mean reward, the KL of a sequence to the
model at the start (its k1 estimate, summed), the tokens of a response. Each prompt is used once, unless there are more
episodes than prompts. Seconds count from the first iteration's start, captured graphs and warm-up included, loading
not. What is reported at the end is measured by neither: plain transformers samples held-out prompts and computes the
whole KL at every token.

A run that is in the file is not repeated; one that a time limit ended is written as such, and is repeated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import _learning_trl as trl_side  # noqa: E402
from _demo_models import smollm  # noqa: E402
from _demo_texts import beginnings, load_reviews, vader  # noqa: E402

OUT = ROOT / "docs" / "benchmarks"
REQUEST = "Write one sentence of a film review. It starts with: {}"
SIDES = {"lit": ("lit-ppo", "#1f6fb4"), "trl": ("TRL", "#d9731a")}


@dataclass
class Options:
    """What both sides are given."""

    batch_size: int = 128
    epochs: int = 4
    minibatches: int = 1
    new_tokens: int = 53
    temperature: float = 0.7
    lr: float = 2e-5
    eps: float = 1e-8
    kl_coef: float = 0.05
    clip: float = 0.2
    value_clip: float = 0.2
    vf_coef: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95


@dataclass
class Run:
    """One side, one seed."""

    side: str
    seed: int
    budget: int
    time_limit: float
    device: str
    matmul: str
    checkpointing: bool
    options: Options = field(default_factory=Options)

    @property
    def key(self) -> dict[str, Any]:
        """What makes two runs the same."""
        return {name: value for name, value in asdict(self).items() if name != "time_limit"}

    def say(self, point: dict[str, float]) -> None:
        print("  ".join(f"{name} {value:,.2f}" for name, value in point.items()), flush=True)


def judge(responses: list[str]) -> list[float]:
    """Return VADER's compound score of each response, in [-1, 1]: the reward of both sides."""
    return vader([""] * len(responses), responses, [[]] * len(responses))


def train_lit(
    model: str, prompts: list[dict[str, Any]], run: Run, engine: str
) -> tuple[Any, list[dict[str, float]], bool, str]:
    """Train with lit-ppo; return the policy, the curve, whether the budget was reached, and the rollout engine."""
    from lightning.pytorch import Callback, Trainer

    from lit_ppo import OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule, SamplingConfig
    from lit_ppo.callbacks import GradientCheckpointing
    from lit_ppo.config import RoleConfig

    o = run.options
    curve: list[dict[str, float]] = []

    class Record(Callback):
        started = 0.0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            now = {name: float(value) for name, value in trainer.callback_metrics.items()}
            seconds = time.perf_counter() - self.started
            point = {"episode": now["episode"], "seconds": seconds, "reward": now["objective/scores"]}
            curve.append(point | {"kl": now["objective/kl"], "length": now["rollout/length_mean"]})
            run.say(curve[-1])
            trainer.should_stop = seconds > run.time_limit

    def sentiment(responses: list[str]) -> list[float]:
        return judge(responses)

    module = PPOLightningModule(
        actor=RoleConfig(source=model, dtype="float32"),
        critic=RoleConfig(source=model, dtype="float32"),  # with a head of zeros
        reward=sentiment,
        sampling=SamplingConfig(max_new_tokens=o.new_tokens, temperature=o.temperature),
        ppo=PPOConfig(
            epochs=o.epochs,
            minibatches=o.minibatches,
            kl_coef=o.kl_coef,
            clip=o.clip,
            value_clip=o.value_clip,
            vf_coef=o.vf_coef,
            gamma=o.gamma,
            lam=o.lam,
            rollout_engine=engine,
        ),
        optim=OptimConfig(actor_lr=o.lr, eps=o.eps, schedule="linear"),
        seed=run.seed,
    )
    callbacks = [Record(), *([GradientCheckpointing()] if run.checkpointing else [])]
    trainer = Trainer(
        max_epochs=-1,
        max_steps=run.budget // o.batch_size * o.epochs * o.minibatches,
        accelerator="gpu" if run.device == "cuda" else "cpu",
        devices=1,
        precision="32-true",
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, PromptDataModule(prompts, batch_size=o.batch_size, drop_last=True, seed=run.seed))
    used = type(getattr(module.engine, "engine", None) or module.engine).__name__
    return module.actor.model, curve, bool(curve) and curve[-1]["episode"] >= run.budget, used


@torch.no_grad()
def evaluate(policy: Any, start: Any, prompts: Any, tokenizer: Any, run: Run) -> dict[str, float]:
    """Sample held-out prompts with plain transformers, and compare the policy with the model at the start.

    Args:
        policy: A causal language model.
        start: Another of the same vocabulary.
        prompts: B rows.
        tokenizer: Of both.
        run: Has the sampling options.
    """
    from transformers import GenerationConfig

    o, device = run.options, run.device
    models = [m.to(device).eval() for m in (policy, start)]
    config = GenerationConfig(
        do_sample=True, temperature=o.temperature, top_k=0, top_p=1.0, max_new_tokens=o.new_tokens,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    policy.generation_config = config
    texts, kls, lengths = [], [], []
    torch.manual_seed(0)
    for rows in torch.arange(len(prompts)).split(64):
        part = prompts.select(rows).to(device)
        width = part.ids.shape[1]
        ids = policy.generate(part.ids, attention_mask=part.mask.long(), generation_config=config)
        new = ids[:, width:]
        ended = (new == tokenizer.eos_token_id).int()
        mask = ended.cumsum(1) - ended == 0  # up to the EOS, which counts
        whole = torch.cat([part.mask, mask], 1).long()
        places = (whole.cumsum(1) - 1).clamp(min=0)
        ours, theirs = (
            (m(ids, attention_mask=whole, position_ids=places).logits[:, width - 1 : -1].float() / o.temperature)
            .log_softmax(-1) for m in models
        )  # fmt: skip
        kls += ((ours.exp() * (ours - theirs)).sum(-1) * mask).sum(1).tolist()
        lengths += mask.sum(1).tolist()
        texts += tokenizer.batch_decode(
            [t[m].tolist() for t, m in zip(new, mask, strict=True)], skip_special_tokens=True
        )
    scores = judge(texts)
    return {
        "reward": statistics.fmean(scores),
        "reward_se": statistics.stdev(scores) / len(scores) ** 0.5,
        "kl": statistics.fmean(kls),
        "length": statistics.fmean(lengths),
        "distinct": len(set(texts)) / len(texts),
    }


def measure(run: Run, model: str, engine: str, held_out: int) -> dict[str, Any]:
    """Do one run and return its row."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lit_ppo.data import encode

    torch.set_float32_matmul_precision(run.matmul)
    tokenizer = AutoTokenizer.from_pretrained(model)
    trl_side.separate_pad(tokenizer)
    reviews = load_reviews(0)
    seen = beginnings(reviews.train, 4)
    known = set(seen)
    unseen = [start for start in beginnings(reviews.held_out, 4) if start not in known]
    asked, test = (
        [{"prompt": [{"role": "user", "content": REQUEST.format(start)}]} for start in starts]
        for starts in (seen[: run.budget], unseen[:held_out])
    )
    held = encode(test, tokenizer)
    used = "transformers"
    if run.side == "lit":
        policy, curve, complete, used = train_lit(model, asked, run, engine)
    else:
        chat, bare = (
            tokenizer.apply_chat_template(asked[0]["prompt"], tokenize=False, add_generation_prompt=more)
            for more in (True, False)
        )
        opening = tokenizer(chat.removeprefix(bare), add_special_tokens=False).input_ids
        policy, curve, complete = trl_side.train(model, encode(asked, tokenizer), tokenizer, opening, judge, run)
    peak = torch.cuda.max_memory_allocated() / 2**30 if run.device == "cuda" else None
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {
        **run.key,
        "complete": complete,
        "before": evaluate(start, start, held, tokenizer, run),
        "after": evaluate(policy, start, held, tokenizer, run),
        "seconds": curve[-1]["seconds"],
        "peak_gib": peak,
        "engine": used,
        "hardware": torch.cuda.get_device_name() if run.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/learning.py {' '.join(sys.argv[1:])}",
        "curve": [{name: round(value, 4) for name, value in point.items()} for point in curve],
    }


def same(row: dict[str, Any], run: Run) -> bool:
    """Whether a row is of this run."""
    return all(row.get(name) == value for name, value in run.key.items())


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that may not be there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def report(folder: Path) -> None:
    """Write the table and the plot of the newest run of each side and seed."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in read(folder / "learning.jsonl"):
        kind = (row["hardware"], row["budget"], row["matmul"], row["checkpointing"], json.dumps(row["options"]))
        if row["complete"]:
            newest[kind, row["side"], row["seed"]] = row
    if not newest:
        raise SystemExit(f"{folder / 'learning.jsonl'} has no complete run.")
    kinds = {kind: [r for key, r in newest.items() if key[0] == kind] for kind in dict.fromkeys(k[0] for k in newest)}
    lines = ["# Learning, beside TRL", "", *(line.strip() for line in __doc__.split("\n\n")[2].splitlines()), ""]
    best = max(kinds, key=lambda kind: len(kinds[kind]))
    for kind, rows in kinds.items():
        lines += section(rows)
        if kind == best:
            plot(rows, folder / "learning.png")
            lines += ["![Reward, KL and length against episodes and time](learning.png)", ""]
    (folder / "learning.md").write_text("\n".join(lines))
    print("\n".join(lines))


def section(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of one kind of runs."""
    first = rows[0]
    lines = [
        f"## {first['budget']:,} episodes on {first['hardware']}"
        f"{', gradient checkpointing on' if first['checkpointing'] else ''}",
        "",
        f"float32, matrix products `{first['matmul']}`; "
        + ", ".join(f"{name} {value:g}" for name, value in first["options"].items())
        + ".",
        "",
        "| | seed | reward before | after | KL | tokens | different | seconds | s an iteration | peak, GiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    means: dict[str, dict[str, float]] = {}
    for side, (name, _) in SIDES.items():
        of_side = sorted((r for r in rows if r["side"] == side), key=lambda r: r["seed"])
        for r in of_side:
            a, each = r["after"], r["curve"][-1]["seconds"] - r["curve"][0]["seconds"]
            lines.append(
                f"| {name} | {r['seed']} | {r['before']['reward']:.3f} | {a['reward']:.3f} ± {a['reward_se']:.3f} "
                f"| {a['kl']:.2f} | {a['length']:.1f} | {a['distinct']:.0%} | {r['seconds']:.1f} "
                f"| {each / max(1, len(r['curve']) - 1):.2f} | {r['peak_gib'] or 0:.1f} |"
            )
        if of_side:
            means[side] = {
                "reward": statistics.fmean(r["after"]["reward"] for r in of_side),
                "kl": statistics.fmean(r["after"]["kl"] for r in of_side),
                "seconds": statistics.fmean(r["seconds"] for r in of_side),
            }
            m = means[side]
            lines.append(f"| **{name}** | mean | | {m['reward']:.3f} | {m['kl']:.2f} | | | {m['seconds']:.1f} | | |")
    if len(means) == 2:
        lines += ["", f"lit-ppo takes {means['lit']['seconds'] / means['trl']['seconds']:.2f} of TRL's time."]
    made = sorted({(r["torch"], r["transformers"], r["date"], r["command"], r["engine"]) for r in rows})
    return [*lines, "", *(f"- torch {t}, transformers {v}, {d}, rollouts by {e}: `{c}`" for t, v, d, c, e in made), ""]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw each seed's curves lightly and their mean over them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 5.6), layout="constrained")
        axes = figure.subplots(2, 3)
        for line, (x, label) in enumerate((("episode", "episodes"), ("seconds", "seconds"))):
            for ax, (y, title) in zip(
                axes[line],
                (("reward", "reward of the samples"), ("kl", "KL of a sequence, nats"), ("length", "tokens")),
                strict=True,
            ):
                for side, (name, color) in SIDES.items():
                    curves = [r["curve"] for r in rows if r["side"] == side]
                    if not curves:
                        continue
                    for curve in curves:
                        ax.plot([p[x] for p in curve], [p[y] for p in curve], color=color, alpha=0.25, linewidth=0.8)
                    steps = list(zip(*curves, strict=False))
                    mean = [[statistics.fmean(p[axis] for p in step) for step in steps] for axis in (x, y)]
                    ax.plot(*mean, color=color, linewidth=2, label=f"{name}, mean of {len(curves)} seeds")
                ax.set_title(title, fontsize=9, loc="left")
                ax.set_xlabel(label)
                ax.grid(alpha=0.25)
                ax.set_xlim(left=0)
        axes[0][0].legend(frameon=False, fontsize=8, loc="lower right")
        figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=SIDES, help="what to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=int, default=6144, help="episodes")
    parser.add_argument("--time-limit", type=float, default=900, help="seconds of training after which to stop")
    parser.add_argument("--model", help="a chat model's folder; default: SmolLM2-135M-Instruct, see docs/demo.md")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "demo", help="where that is kept")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", default="auto", help="lit-ppo's rollout engine")
    parser.add_argument("--matmul", choices=("highest", "high"), default="high", help="float32 products; high: TF32")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, on either side")
    parser.add_argument("--held-out", type=int, default=256, help="prompts of the evaluation")
    parser.add_argument("--output", type=Path, default=OUT, help="folder of learning.jsonl")
    parser.add_argument("--report", action="store_true", help="write learning.md and learning.png")
    for name, value in asdict(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args(argv)
    options = Options(**{name: getattr(args, name) for name in asdict(Options())})
    if args.side is not None:
        if args.budget % options.batch_size:
            parser.error(f"--budget {args.budget} is not a multiple of --batch-size {options.batch_size}.")
        run = Run(
            args.side, args.seed, args.budget, args.time_limit, args.device, args.matmul, args.checkpointing, options
        )
        path = args.output / "learning.jsonl"
        if any(row["complete"] and same(row, run) for row in read(path)):
            print(f"This run is in {path}.")
        else:
            row = measure(run, args.model or str(smollm(args.cache)), args.engine, args.held_out)
            args.output.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print({name: value for name, value in row.items() if name != "curve"})
    if args.report:
        report(args.output)
    elif args.side is None:
        parser.error("nothing to do: give --side or --report.")


if __name__ == "__main__":
    main()
