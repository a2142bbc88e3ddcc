"""What people see of the demo: tables, pictures and the files in the output folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

BLUE, ORANGE, GREY = "#1f6fb4", "#d9731a", "#666666"
SMOOTHING = 5
"""Iterations over which the training curves are averaged."""


def show(result: dict[str, Any], rows: list[dict[str, Any]], shown: int = 6) -> None:
    """Print what PPO did to the held-out prompts: the numbers, and the first completions as they come.

    Args:
        result: As `demo.py` writes it to result.json.
        rows: A dict a prompt: `start`, and `before` and `after` with their scores.
        shown: Completions to print.
    """
    before, after = result["before"], result["after"]
    numbers = Table(title=f"\n{before['prompts']} held-out prompts, sampled", title_justify="left")
    for column in ("", "before PPO", "after PPO"):
        numbers.add_column(column, justify="left" if not column else "right")
    for label, text in (
        ("reward (VADER), mean ± standard error", lambda x: f"{x['reward']:+.3f} ± {x['reward_se']:.3f}"),
        ("share of positive texts", lambda x: f"{x['positive']:.0%}"),
        ("second judge (TextBlob), never trained on", lambda x: f"{x['second']:+.3f} ± {x['second_se']:.3f}"),
        ("different completions", lambda x: f"{x['distinct']} of {x['prompts']}"),
    ):
        numbers.add_row(label, text(before), text(after))
    numbers.add_row("KL to the model before PPO, nats a text (in training)", "0", f"{result['kl']:.1f}")
    samples = Table(
        title=f"\nThe first {min(shown, len(rows))} of them, not chosen", title_justify="left", show_lines=True
    )
    for column in ("prompt", "before PPO", "after PPO"):
        samples.add_column(column, ratio=1 if column == "prompt" else 2)
    for row in rows[:shown]:
        cells = [f"{escape(row[when].strip())} [dim]{row[when + '_reward']:+.2f}[/dim]" for when in ("before", "after")]
        samples.add_row(escape(row["start"]), *cells)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(numbers)
    console.print(samples)


def write_samples(path: Path, rows: list[dict[str, Any]], shown: int = 32) -> None:
    """Write completions as a Markdown table, in the order of the prompts."""

    def cell(text: str) -> str:
        return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")

    lines = ["| prompt | before PPO | VADER | after PPO | VADER |", "|---|---|---:|---|---:|"]
    for row in rows[:shown]:
        lines.append(
            f"| {cell(row['start'])} | {cell(row['before'])} | {row['before_reward']:+.2f} "
            f"| {cell(row['after'])} | {row['after_reward']:+.2f} |"
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def plot(folders: list[Path], path: Path, title: str) -> None:
    """Draw the curves of one run, or of several as light lines with their mean.

    Args:
        folders: Output folders of `demo.py`, with metrics.csv and result.json, of the same number of iterations.
        path: The picture.
        title: Over it.
    """
    import matplotlib as mpl
    import pandas as pd
    from matplotlib.figure import Figure

    runs = [(pd.read_csv(f / "metrics.csv"), json.loads((f / "result.json").read_text())) for f in folders]

    def training(metric: str) -> pd.DataFrame:
        """Iterations x runs, smoothed."""
        curves = [table.set_index("step")[metric].dropna() for table, _ in runs]
        together = pd.concat(curves, axis=1).rolling(SMOOTHING, min_periods=1, center=True).mean()
        return together.set_axis(together.index + 1)

    def held_out(metric: str, name: str) -> pd.DataFrame:
        """Evaluations x runs; the first is of the model before PPO."""
        curves = []
        for table, result in runs:
            curve = table.set_index("step")[metric].dropna()
            curves.append(pd.concat([pd.Series({0: result["before"][name]}), curve.set_axis(curve.index + 1)]))
        return pd.concat(curves, axis=1)

    def draw(ax: Any, curves: pd.DataFrame, color: str, label: str, **style: Any) -> None:
        if len(runs) > 1:
            ax.plot(curves, color=color, alpha=0.35, linewidth=1)
        ax.plot(curves.mean(axis=1), color=color, label=label, **{"linewidth": 1.5, **style})

    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        reward, second, kl = figure.subplots(1, 3)
        mean = f" (mean of {len(runs)} seeds)" if len(runs) > 1 else ""
        for ax, judge, name, what in (
            (reward, "vader", "reward", "Reward: VADER sentiment"),
            (second, "textblob", "second", "Second judge, not trained on: TextBlob"),
        ):
            draw(ax, training(f"reward/{judge}"), GREY, f"training, average of {SMOOTHING} iterations{mean}")
            color = BLUE if judge == "vader" else ORANGE
            draw(ax, held_out(f"val/reward_{judge}", name), color, f"held-out prompts{mean}", linewidth=2.5, marker="o")
            ax.set_title(what, fontsize=10, loc="left")
            ax.legend(frameon=False, fontsize=8, loc="lower right")
        draw(kl, training("objective/kl"), GREY, "")
        kl.set_title("KL to the model before PPO, nats a text", fontsize=10, loc="left")
        for ax in (reward, second, kl):
            ax.set_xlabel("PPO iteration")
            ax.grid(alpha=0.25)
            ax.set_ylim(bottom=min(0, *(line.get_ydata().min() for line in ax.lines)))
            ax.set_xlim(left=0)
        figure.suptitle(title, fontsize=11, x=0.005, ha="left")
        figure.savefig(path, dpi=130)
