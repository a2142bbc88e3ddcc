"""Run the CPU demo with three seeds and write the table and the picture of docs/demo.md.

    python benchmarks/demo_seeds.py            about two minutes of CPU time a seed
    python benchmarks/demo_seeds.py --redraw   from the results that are in outputs/demo-seeds/

Each seed draws its own split of the reviews, trains its own language model, and runs PPO on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from _demo_report import plot  # noqa: E402

SEEDS = (0, 1, 2)
OUT = ROOT / "outputs" / "demo-seeds"
PAGE, PICTURE = ROOT / "docs" / "demo.md", ROOT / "docs" / "assets" / "demo_curves.png"
BEGIN, END = "<!-- benchmarks/demo_seeds.py writes from here -->\n", "<!-- to here -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--redraw", action="store_true", help="run nothing")
    if not parser.parse_args().redraw:
        for seed in SEEDS:
            run(seed)
    folders = [OUT / str(seed) for seed in SEEDS]
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    plot(folders, PICTURE, "PPO on a word-level Llama of 0.8 million parameters, trained on film reviews")
    table = tabulate([json.loads((folder / "result.json").read_text()) for folder in folders])
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1], encoding="utf-8")
    print(table)


def run(seed: int) -> None:
    """Run the demo from nothing: the language model is trained anew."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--seed", str(seed)]
        subprocess.run([*command, "--out", str(OUT / str(seed)), "--cache", cache], check=True)
    print(f"seed {seed}: {time.perf_counter() - started:.0f} s")


def tabulate(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each seed and one for all."""
    lines = [
        "| seed | reward before | after | positive | second judge before | after | KL | different | CPU s | GiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        b, a = r["before"], r["after"]
        lines.append(
            f"| {r['seed']} | {b['reward']:.3f} ± {b['reward_se']:.3f} | {a['reward']:.3f} ± {a['reward_se']:.3f} "
            f"| {b['positive']:.0%} → {a['positive']:.0%} | {b['second']:.3f} ± {b['second_se']:.3f} "
            f"| {a['second']:.3f} ± {a['second_se']:.3f} | {r['kl']:.1f} | {b['distinct']} → {a['distinct']} "
            f"| {r['cpu_seconds']:.0f} | {r['peak_gib']:.2f} |"
        )

    def over_seeds(pick: Any) -> str:
        values = [pick(r) for r in results]
        return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"

    lines.append(
        f"| mean ± sd over seeds | {over_seeds(lambda r: r['before']['reward'])} "
        f"| {over_seeds(lambda r: r['after']['reward'])} | | {over_seeds(lambda r: r['before']['second'])} "
        f"| {over_seeds(lambda r: r['after']['second'])} | | | | |"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
