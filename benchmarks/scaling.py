"""One PPO iteration on 1, 2, 4 GPUs of a host, the work of each GPU the same: where the time goes, and what it takes.

    python benchmarks/scaling.py --shapes 1.5B 7B                  # all rows that this host has the GPUs for
    python benchmarks/scaling.py --shapes 1.5B --worlds 1 2 --methods lora --strategies ddp fsdp2
    python benchmarks/scaling.py --report                          # only write the table

Models have the true shape and random weights: one folder a shape, written once to `--scratch` and loaded as a user's
would be. Actor, critic and reference are trained or sharded as the strategy has it (`lora`: one shared trunk), the
reward model is whole on every GPU. Prompts of `--prompt` tokens, `--batch` of them a GPU, responses of full length; one
epoch of one minibatch, bfloat16, gradient checkpointing. One GPU runs without a strategy, and is what the efficiency
is of: tokens a second and GPU, over those of one GPU (of the fewest that it ran on, where one was not enough).

The first iteration warms up, and of the others the median one counts. `gather` is the part of the rollout that brings
the actor's weights to every GPU. Peaks are the highest of any rank, beside what `lit-ppo plan` forecasts. Each rank is
a process of its own; a row whose rank fails is written down with its error. Rows are appended to `scaling.jsonl`; those
that are there already are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from lightning.pytorch import Trainer

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.iteration import Clock, read  # noqa: E402
from benchmarks.memory import GIB, _config, about, folder, quietly, texts  # noqa: E402
from benchmarks.rollout import SHAPES  # noqa: E402

PHASES = ("rollout", "score", "update")
STRATEGIES: dict[str, Any] = {
    "one": "auto",
    "ddp": "ddp",
    "fsdp": "fsdp",
    "fsdp2": {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"},
}
"""As a YAML would have them; the sizes of FSDP2's mesh are filled in."""
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"layout": "shared", "lora": {"r": 16}}}
PATIENCE = 45.0
"""Seconds that the other ranks have to end by themselves when one has failed."""


# ---------------------------------------------------------------------------------------------------------- the rows


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is asked for, as plain data; the worlds that this host has no GPUs for are left out."""
    there = torch.cuda.device_count() if args.device == "cuda" else max(args.worlds)
    if missing := [n for n in args.worlds if n > there]:
        print(f"Left out, as this host has {there} GPUs: {', '.join(map(str, missing))}", flush=True)
    found = []
    for shape in args.shapes:
        for method in args.methods:
            for world in sorted(n for n in args.worlds if n <= there):
                for strategy in ["one"] if world == 1 else args.strategies:
                    if strategy == "fsdp" and args.device == "cpu":
                        print("fsdp: left out, as Lightning has FSDPStrategy on GPUs alone", flush=True)
                        continue
                    row = {"shape": shape, "method": method, "world": world, "strategy": strategy}
                    row |= {"prompt": args.prompt, "new": args.new, "batch": args.batch, "micro": args.micro}
                    found.append(row | {"iterations": args.iterations, "device": args.device})
    return found


def key_of(row: dict[str, Any]) -> str:
    """Return what makes two rows the same measurement."""
    names = ("shape", "method", "world", "strategy", "prompt", "new", "batch", "micro", "device")
    return json.dumps([row[n] for n in names])


def config_of(row: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Return the row's configuration as `lit-ppo fit` and `lit-ppo plan` would read it."""
    actor, reward = (str(scratch / f"{row['shape']}{end}") for end in ("", "-reward"))
    cuda = row["device"] == "cuda"
    return {
        "model": {
            "actor": {"source": actor},
            "reward": {"source": reward, "batch_size": row["micro"], "name": "reward"},
            "sampling": {"max_new_tokens": row["new"], "temperature": 1.0, "stop_tokens": []},
            "ppo": {
                "epochs": 1,
                "micro_batch_size": row["micro"],
                "rollout_engine": "graph" if cuda else "hf",
            },
            "optim": {"actor_lr": 1e-6, "schedule": "constant"},
            **METHODS[row["method"]],
        },
        "data": {"batch_size": row["batch"] * row["world"], "max_prompt_length": row["prompt"]},
        "trainer": {
            "precision": "bf16-true" if cuda else "32-true",
            "strategy": STRATEGIES[row["strategy"]],
            "callbacks": [{"class_path": "lit_ppo.callbacks.GradientCheckpointing"}],
        },
    }


def run(args: argparse.Namespace) -> None:
    """Measure each row in processes of its own."""
    path = args.output / "scaling.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    there = {key_of(r) for r in read(path)} if not args.again else set()
    start = time.perf_counter()
    for row in rows_of(args):
        if key_of(row) in there:
            continue
        if args.minutes and time.perf_counter() - start > 60 * args.minutes:
            print("The time is up; the same command goes on from here.", flush=True)
            break
        for classifier in (False, True):
            folder(row["shape"], args.scratch, args.device, classifier=classifier)
        row["forecast"] = forecast(row, args.scratch)
        began = time.perf_counter()
        row |= in_processes(row, args)
        row |= about(args) | {"wall_s": round(time.perf_counter() - began, 1)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = row.get("error")
        if said is None:
            m = row["measured"]
            said = f"{m['seconds']} s, {m['tokens_per_s']:,} tokens/s a GPU, {m['peak_gib']} GiB"
        name = f"{row['shape']} {row['method']} {row['world']} {row['strategy']}"
        print(f"{name}: {said} (in {row['wall_s']} s)", flush=True)


def forecast(row: dict[str, Any], scratch: Path) -> dict[str, float]:
    """Return the peak of each phase in GiB, as `lit-ppo plan` says before anything has run."""
    from lit_ppo.plan.forecast import Forecast
    from lit_ppo.plan.setup import read_setup

    card = torch.cuda.get_device_properties(0).total_memory if row["device"] == "cuda" else 80 * GIB
    setup = read_setup(
        config_of(row, scratch), lambda role, source: _config(row["shape"]), gpus=row["world"], card=card
    )
    phases = Forecast(setup).phases
    return {name: round(phases[name].total / GIB, 2) for name in PHASES}


def in_processes(row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks of a row; return what they measured, or the first error, and leave no rank behind."""
    with socket.socket() as free_one:
        free_one.bind(("127.0.0.1", 0))
        port = str(free_one.getsockname()[1])
    with tempfile.TemporaryDirectory() as there:
        ranks, world = [], row["world"]
        for rank in range(world):
            extra = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            extra |= {
                "GROUP_RANK": 0,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "scaling",
            }
            command = [sys.executable, __file__, "--rank", json.dumps(row), "--output", there]
            command += ["--scratch", str(args.scratch)] + ["--verbose"] * args.verbose
            environment = {**os.environ, **({k: str(v) for k, v in extra.items()} if world > 1 else {})}
            options: dict[str, Any] = (
                {} if args.verbose else {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            )
            ranks.append(subprocess.Popen(command, env=environment, start_new_session=True, **options))
        try:
            late = wait(ranks, args.timeout)
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        results = [Path(there) / f"{rank}.json" for rank in range(world)]
        found = [json.loads(path.read_text()) if path.exists() else {} for path in results]
        errors = sorted((f["at"], f"rank {i}: {f['error']}") for i, f in enumerate(found) if "error" in f)
        if errors:
            return {"error": errors[0][1][:300]}
        if late or any("measured" not in f for f in found):
            said = f"not done after {args.timeout} s" if late else f"ended with {[p.returncode for p in ranks]}"
            return {"error": said}
        return {"measured": together([f["measured"] for f in found])}


def wait(ranks: list[subprocess.Popen[bytes]], limit: float) -> bool:
    """Wait until all have ended, or a while after one has failed; return whether the time is up."""
    end = time.monotonic() + limit
    failed: float | None = None
    while any(process.poll() is None for process in ranks):
        now = time.monotonic()
        if failed is None and any(process.poll() not in (None, 0) for process in ranks):
            failed = now
        if now > end:
            return True
        if failed is not None and now > failed + PATIENCE:
            return False
        time.sleep(0.1)
    return False


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rank 0's times, and the highest peaks of any rank."""
    highest = {name: max(f["phase_gib"][name] for f in found) for name in found[0]["phase_gib"]}
    slowest = max(f["gather_s"] for f in found)
    return found[0] | {"phase_gib": highest, "peak_gib": max(f["peak_gib"] for f in found), "gather_s": slowest}


# ------------------------------------------------------------------------------------------------------- in each rank


def rank_main(row: dict[str, Any], output: Path, scratch: Path, verbose: bool) -> int:
    """Run one rank of a row, and write what it measured, or its error."""
    rank = int(os.environ.get("RANK", 0))
    about_it: dict[str, Any] = {}
    try:
        with quietly(verbose):
            about_it["measured"] = measure(row, scratch)
    except Exception as error:
        if verbose:
            raise
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        about_it |= {"error": text[:300], "at": time.time()}
    (output / f"{rank}.json").write_text(json.dumps(about_it))
    return int("error" in about_it)


class GatherClock(Clock):
    """Times the gathering of the actor's weights beside everything else."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.gathers: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        gathered = pl_module.sharding.gathered

        def settled() -> float:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

        @contextlib.contextmanager
        def timed(store: Any) -> Iterator[None]:
            before = settled()
            with gathered(store):
                self.gathers.append(settled() - before)
                yield

        pl_module.sharding.gathered = timed


def measure(row: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Run the iterations on this rank."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lit_ppo import PPOLightningModule, PromptDataModule
    from lit_ppo.callbacks import GradientCheckpointing

    config, world = config_of(row, scratch), row["world"]
    strategy = STRATEGIES[row["strategy"]]
    if row["strategy"] == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    clock = GatherClock(row["device"])
    trainer = Trainer(
        accelerator="gpu" if row["device"] == "cuda" else "cpu", devices=world, strategy=strategy, max_epochs=1,
        precision=config["trainer"]["precision"], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[GradientCheckpointing(), clock],
    )  # fmt: skip
    module = PPOLightningModule(**config["model"])
    prompts = texts(config["data"]["batch_size"] * row["iterations"], row["prompt"])
    trainer.fit(module, PromptDataModule(prompts, **config["data"]))
    found = clock.found()
    found["tokens_per_s"] = round(found["response_tokens"] / found["seconds"])
    found["gather_s"] = round(min(clock.gathers[1:] or clock.gathers), 4)
    return found


# ------------------------------------------------------------------------------------------------------- the table


def report(output: Path) -> None:
    """Write the table of everything measured, the newest row of each."""
    rows = list({key_of(r): r for r in read(output / "scaling.jsonl")}.values())
    if not rows:
        return
    lines = [
        "# Several GPUs",
        "",
        "One PPO iteration, the work of each GPU the same. `python benchmarks/scaling.py` says in its first lines what",
        "is measured, and how. Efficiency is tokens a second and GPU over those of the fewest GPUs in the table.",
    ]
    names = ["GPUs", "strategy", "s", *PHASES[:1], "gather", *PHASES[1:], "tokens/s/GPU", "efficiency", "peak GiB"]
    names += ["forecast", "off"]
    for shape, method, prompt, new, batch, micro in dict.fromkeys(map(_work, rows)):
        of_it = sorted((r for r in rows if _work(r) == (shape, method, prompt, new, batch, micro)), key=_order)
        lines += ["", f"## {shape}, {method}: {batch} x ({prompt} + {new}) tokens a GPU, micro-batches of {micro}", ""]
        lines += ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
        base = next((r["measured"]["tokens_per_s"] for r in of_it if "measured" in r), None)
        lines += [line_of(r, base) for r in of_it]
    made = {(r["hardware"], r["torch"], r["transformers"], r["date"]) for r in rows}
    lines += ["", *(f"- {h}, torch {t}, transformers {v}, {d}" for h, t, v, d in sorted(made))]
    (output / "scaling.md").write_text("\n".join(lines) + "\n")


def _work(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[n] for n in ("shape", "method", "prompt", "new", "batch", "micro"))


def _order(row: dict[str, Any]) -> tuple[int, int]:
    return row["world"], list(STRATEGIES).index(row["strategy"])


def line_of(row: dict[str, Any], base: float | None) -> str:
    """Return a row of the table."""
    expected = max(row["forecast"].values())
    if "measured" not in row:
        short = "out of memory" if "out of memory" in row["error"].lower() else row["error"].replace("|", "/")
        return f"| {row['world']} | {row['strategy']} | {short} |" + " |" * 7 + f" {expected:.1f} | |"
    m = row["measured"]
    cells = [str(row["world"]), row["strategy"]]
    cells += [f"{m[name]:.2f}" for name in ("seconds", "rollout_s", "gather_s", "score_s", "update_s")]
    cells += [f"{m['tokens_per_s']:,}", f"{m['tokens_per_s'] / base:.0%}" if base else ""]
    cells += [f"{m['peak_gib']:.1f}", f"{expected:.1f}"]
    cells += [f"{expected / m['peak_gib'] - 1:+.0%}" if m["peak_gib"] else ""]
    return "| " + " | ".join(cells) + " |"


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.5B"], choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--strategies", nargs="+", default=["fsdp", "fsdp2"], choices=list(STRATEGIES)[1:])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4], help="numbers of GPUs")
    parser.add_argument("--batch", type=int, default=64, help="prompts of an iteration, of each GPU")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256, help="tokens of a response")
    parser.add_argument("--micro", type=int, default=8, help="sequences in one forward and backward")
    parser.add_argument("--iterations", type=int, default=3, help="the warm-up included")
    parser.add_argument("--minutes", type=float, help="start no row after this")
    parser.add_argument("--timeout", type=float, default=400, help="seconds of a row")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "lit-ppo-scaling")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--report", action="store_true", help="only write the table")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure what is asked for, and write the table."""
    args = parser().parse_args(argv)
    args.output, args.scratch = args.output.resolve(), args.scratch.resolve()
    if args.rank:
        if rank_main(args.rank, args.output, args.scratch, args.verbose):
            os._exit(1)  # not by way of a communicator that waits for the other ranks
        return 0
    if not args.report:
        run(args)
    report(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
