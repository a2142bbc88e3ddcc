"""What people see of the three stages: tables, the picture, samples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from _demo_report import BLUE, GREY, ORANGE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLORS = (BLUE, ORANGE)


def show(result: dict[str, Any], rows: list[dict[str, Any]], shown: int = 5) -> None:
    """Print the numbers of each run of PPO, and the first completions as they come.

    Args:
        result: As `three_stages.py` writes it to result.json.
        rows: Completions of the first run.
        shown: Completions to print.
    """
    numbers = Table(title=f"\n{result['prompts']} held-out prompts, sampled", title_justify="left")
    for column in ("", "before PPO", *(f"after PPO, {name}" for name in result["ppo"])):
        numbers.add_column(column, justify="left" if not column else "right")
    runs = list(result["ppo"].values())
    for label, text in (
        ("proxy: the reward model, in its standard deviations", lambda x: f"{x['proxy']:+.2f}"),
        ("gold: VADER, mean ± standard error", lambda x: f"{x['vader']:+.3f} ± {x['vader_se']:.3f}"),
        ("gold: TextBlob", lambda x: f"{x['textblob']:+.3f} ± {x['textblob_se']:.3f}"),
        ("words a completion", lambda x: f"{x['length']:.1f}"),
        ("different completions", lambda x: f"{x['distinct']}"),
    ):
        numbers.add_row(label, text(runs[0]["before"]), *(text(run["after"]) for run in runs))
    numbers.add_row("KL to the policy of SFT, nats a text", "0", *(f"{run['kl']:.1f}" for run in runs))
    samples = Table(title=f"\nThe first {min(shown, len(rows))}, not chosen", title_justify="left", show_lines=True)
    for column in ("prompt", "after SFT", "after PPO"):
        samples.add_column(column, ratio=1 if column == "prompt" else 2)
    for row in rows[:shown]:
        samples.add_row(*(escape(row[key].strip()) for key in ("start", "before", "after")))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(numbers)
    console.print(samples)


def write_samples(path: Path, rows: list[dict[str, Any]], shown: int = 32) -> None:
    """Write completions as a Markdown table, in the order of the prompts."""

    def cell(text: str) -> str:
        return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")

    lines = ["| prompt | after SFT | after PPO |", "|---|---|---|"]
    lines += [f"| {cell(row['start'])} | {cell(row['before'])} | {cell(row['after'])} |" for row in rows[:shown]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def plot(folder: Path, runs: list[str], path: Path) -> None:
    """Draw the stages, and what the judges say over the KL.

    Args:
        folder: Output of `three_stages.py`: a folder of metrics for each stage.
        runs: Of PPO.
        path: The picture.
    """
    import matplotlib as mpl
    import pandas as pd
    from matplotlib.figure import Figure

    def read(name: str) -> pd.DataFrame:
        return pd.read_csv(folder / name.replace(" ", "-") / "metrics.csv")

    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 3.4), layout="constrained")
        loss, accuracy, proxy, gold = figure.subplots(1, 4)
        table = read("sft")
        loss.plot(table.set_index("step")["train/loss"].dropna().rolling(10, min_periods=1).mean(), color=GREY)
        loss.plot(table.set_index("step")["val/loss"].dropna(), color=BLUE, marker="o", label="held out")
        loss.set_title("1. SFT: loss a token", fontsize=9, loc="left")
        table = read("reward")
        accuracy.plot(table.set_index("step")["train/accuracy"].dropna().rolling(25, min_periods=1).mean(), color=GREY)
        accuracy.plot(table.set_index("step")["val/accuracy"].dropna(), color=BLUE, marker="o", label="held out")
        accuracy.axhline(0.5, color=GREY, linewidth=0.5, linestyle=":")
        accuracy.set_title("2. Reward model: pairs in the right order", fontsize=9, loc="left")
        for ax in (loss, accuracy):
            ax.set_xlabel("optimizer step")
            ax.legend(frameon=False, fontsize=8)
        for name, color in zip(runs, COLORS, strict=False):
            table = read(name)
            kl = table.set_index("step")["objective/kl"].dropna().rolling(5, min_periods=1).mean()
            scores = table.set_index("step")[[f"val/reward_{x}" for x in ("proxy", "vader", "textblob")]].dropna()
            scores = scores[scores.index.isin(kl.index)]
            at = kl[scores.index]
            for ax, judge in ((proxy, "val/reward_proxy"), (gold, "val/reward_vader")):
                ax.plot(at, scores[judge], color=color, marker="o", markersize=3, label=name)
            gold.plot(at, scores["val/reward_textblob"], color=color, linestyle="--", linewidth=1)
        proxy.set_title("3. Proxy (reward model, sd) over KL", fontsize=9, loc="left")
        gold.set_title("3. Gold (VADER; dashed: TextBlob) over KL", fontsize=9, loc="left")
        for ax in (proxy, gold):
            ax.set_xlabel("KL to the policy of SFT, nats a text")
        proxy.legend(frameon=False, fontsize=8, loc="lower right")
        for ax in (loss, accuracy, proxy, gold):
            ax.grid(alpha=0.25)
        figure.savefig(path, dpi=130)
