"""Rollout engines side by side: the same prompts, the same sampling, one process, one GPU.

    python benchmarks/rollout.py --shapes 1.5B --batch 64 256 --engines graph dynamic static

Models have the true shapes and random weights, which is right for speed and says nothing of learning. Every engine
samples the whole vocabulary; `graph` and `hf` also return log-probs, which transformers' own paths (`dynamic`,
`static`, `continuous`) are spared. `equal` responses all have `--new` tokens; `varying` ones end at a stop token, with
the vocabulary's share of stop tokens chosen so that their mean is about a third of `--new`, with 16 prompts a row;
`third` has as many prompts, all with a third of `--new`: what `varying` would cost without its variation.

The floor of a decode step: its matrix products, the larger of their bytes over the copy bandwidth and their operations
over the matrix rate, and then every stored key and value over the bandwidth. Both rates are measured here first.
Rows are appended to `rollout.jsonl`; `--report` writes the page and the plot from the latest row of each kind, with
the kernels of rows that were measured with `--profile`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lit_ppo.experience import Prompts
from lit_ppo.roles.model import RoleModel, RoleView
from lit_ppo.rollout.base import Draw, Sampling
from lit_ppo.rollout.graph import GraphEngine
from lit_ppo.rollout.hf import HFEngine
from lit_ppo.speed import Peak, Work, decode_floor

ENGINES = ("graph", "hf", "dynamic", "static", "continuous")
LENGTHS = ("equal", "third", "varying")
GOALS = {("1.5B", 64): 35_000, ("1.5B", 256): 100_000, ("8B", 256): 25_000, ("135M", 256): 120_000}
"""Tokens a second that were aimed at, with equal lengths on one H200."""
VARYING_GOAL = 0.85
"""And what varying lengths should keep of them."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "LlamaConfig",
        dict(
            vocab_size=1536, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512,
        ),
    ),
    "135M": (
        "LlamaConfig",
        dict(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
        ),
    ),
    "1.5B": (
        "Qwen2Config",
        dict(
            vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
            num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        ),
    ),
    "7B": (
        "Qwen2Config",
        dict(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, max_position_embeddings=8192,
        ),
    ),
    "8B": (
        "LlamaConfig",
        dict(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=8192,
        ),
    ),
}  # fmt: skip


def build(shape: str, device: str, quantize: bool = False) -> Any:
    """Make a model of that shape with random weights, with `quantize` in NF4."""
    import transformers

    kind, fields = SHAPES[shape]
    config = getattr(transformers, kind)(**fields, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if quantize:
        from lit_ppo.callbacks._bitsandbytes import linear_layers, quantize_

        model.requires_grad_(False)
        options: dict[str, Any] = dict(double_quant=True, compute_dtype=dtype, device=None, probe=False)
        quantize_(model, linear_layers(model, ["lm_head"]), mode="nf4", **options)
    return model


def ceilings(device: str) -> tuple[float, float]:
    """Measure bytes per second of a large copy, reads and writes counted, and FLOP per second of a matrix product."""
    big = torch.randn(2**29 if device == "cuda" else 2**22, device=device)
    other = torch.empty_like(big)
    n = 8192 if device == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy = min(_timed(lambda: other.copy_(big), device) for _ in range(5))
    product = min(_timed(lambda: a @ b, device) for _ in range(5))
    return 2 * big.numel() * 4 / copy, 2 * n**3 / product


def floor_seconds(model: Any, batch: int, context: float, rates: tuple[float, float]) -> float:
    """Return the least time of a decode step, at a mean context of so many tokens."""
    work, peak = Work.of(model, model.config), Peak(bandwidth=rates[0], flops=rates[1])
    return decode_floor(work, tokens=batch, steps=1, contexts=context * batch, peak=peak)


def prompts_of(batch: int, width: int, vocab: int, device: str) -> Prompts:
    """Make random prompts of one length."""
    generator = torch.Generator().manual_seed(0)
    return Prompts(
        ids=torch.randint(3, vocab, (batch, width), generator=generator).to(device),
        lengths=torch.full((batch,), width, device=device),
        index=torch.arange(batch, device=device),
        text=[""] * batch,
        messages=[None] * batch,
        columns=[{} for _ in range(batch)],
    )


def sampling_of(new: int, vocab: int, lengths: str) -> Sampling:
    """Return options whose responses all have `new` tokens, or a third of that: in the mean or all of them."""
    count = round(vocab * 2.85 / new) if lengths == "varying" else 0  # geometric, cut at `new`: mean new / 3
    stop = torch.linspace(3, vocab - 1, count).long() if count else torch.tensor([], dtype=torch.long)
    new = new // 3 if lengths == "third" else new
    return Sampling(new, 1.0, 0, 1.0, 0.0, 1, torch.tensor([], dtype=torch.long), stop, 0)


def engine_of(name: str, model: Any, rows: int) -> Any:
    """Return a function of prompts, options and a number that samples and returns how many tokens."""
    view = RoleView(RoleModel(model), "logprobs")
    if name in ("graph", "hf"):
        engine: Any = GraphEngine(view, max_rows=rows) if name == "graph" else HFEngine(view)

        def ours(prompts: Prompts, sampling: Sampling, number: int) -> tuple[int, dict[str, float]]:
            tokens = 0
            pieces = (
                [prompts] if name == "graph" else [prompts.select(r) for r in torch.arange(len(prompts)).split(rows)]
            )
            for piece in pieces:
                tokens += int(engine.generate(piece, sampling, Draw(0, number)).lengths.sum())
            return tokens, getattr(engine, "stats", {})

        return ours
    return lambda prompts, sampling, number: _transformers(name, model, rows, prompts, sampling)


def _transformers(
    name: str, model: Any, rows: int, prompts: Prompts, sampling: Sampling
) -> tuple[int, dict[str, float]]:
    from transformers import GenerationConfig

    stop = sampling.stop.tolist()
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0,
        eos_token_id=stop or None, **({"cache_implementation": "static"} if name == "static" else {}),
    )  # fmt: skip
    tokens = 0
    if name == "continuous":
        config.eos_token_id = stop or -1
        output = model.generate_batch(prompts.ids.tolist(), generation_config=config, progress_bar=False)
        return sum(len(o.generated_tokens) for o in output.values()), {}
    for part in torch.arange(len(prompts)).split(rows):
        ids = prompts.ids[part.to(prompts.ids.device)]
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        out = out[:, ids.shape[1] :]
        ended = torch.isin(out, sampling.stop.to(out.device))
        first = torch.where(ended.any(1), ended.int().argmax(1) + 1, out.shape[1])
        tokens += int(first.sum())
    return tokens, {}


def measure(args: argparse.Namespace, shape: str, batch: int, name: str, lengths: str, rates: Any) -> dict[str, Any]:
    """Time one engine on one workload, after a warm-up of the same."""
    model = build(shape, args.device, args.nf4)
    config = model.config
    requests = batch if lengths == "equal" else args.requests * batch
    prompts = prompts_of(requests, args.prompt, config.vocab_size, args.device)
    sampling = sampling_of(args.new, config.vocab_size, lengths)
    run = engine_of(name, model, batch)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for number in range(args.repeats + 1):
        start = time.perf_counter()
        tokens, stats = run(prompts, sampling, number)
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    best = min(seconds[1:])
    row: dict[str, Any] = {
        "shape": shape + " NF4" * args.nf4, "batch": batch, "engine": name, "lengths": lengths, "requests": requests,
        "prompt": args.prompt, "new": args.new, "tokens": tokens, "seconds": round(best, 4),
        "first_seconds": round(seconds[0], 2), "tokens_per_s": round(tokens / best),
    }  # fmt: skip
    if stats:
        decode = stats["seconds"] - stats["prefill_seconds"]
        row["decode_tokens_per_s"] = round(tokens / decode)
        row["step_ms"] = round(decode / stats["steps"] * 1e3, 3)
        floor = floor_seconds(model, batch, args.prompt + args.new / 2, rates)
        row["floor_ms"] = round(floor * 1e3, 3)
        if lengths == "equal":
            row["share_of_floor"] = round(floor / decode * stats["steps"], 3)
    if args.profile and stats:
        row["profile"] = profile(lambda: run(prompts, sampling, args.repeats + 1)[1])
    if args.device == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return row


def profile(work: Any) -> dict[str, Any]:
    """Measure the kernels of a rollout from its first decode step on, and how long the device did nothing between them.

    Args:
        work: Samples, and returns the engine's stats.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        stats = work()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in events]
    return in_steps(spans, stats["prefill_seconds"] * 1e6, int(stats["steps"]))


def in_steps(spans: list[tuple[str, float, float]], skip: float, steps: int, most: int = 16) -> dict[str, Any]:
    """Add up kernels by name.

    Args:
        spans: Name, start and end in microseconds of each kernel.
        skip: Leave out what starts within so many microseconds of the first.
        steps: Decode steps.
        most: So many kernels are named.

    Returns:
        Microseconds of a step, idle ones among them, and the calls a step and microseconds a call of each kernel.
    """
    first = min(start for _, start, _ in spans) + skip
    spans = sorted((span for span in spans if span[1] >= first), key=lambda span: span[1])
    total: dict[str, list[float]] = {}
    idle, until = 0.0, spans[0][1]
    for name, start, end in spans:
        total.setdefault(name, []).append(end - start)
        idle, until = idle + max(0.0, start - until), max(until, end)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:most]
    return {
        "step_us": round((until - spans[0][1]) / steps, 1),
        "idle_us": round(idle / steps, 1),
        "kernels": [[name, round(len(us) / steps, 2), round(sum(us) / len(us), 2)] for name, us in ranked],
    }


def short(name: str) -> str:
    """Cut the arguments and templates off a kernel's name."""
    return name.removeprefix("void ").split("(")[0].split("<")[0][:72]


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page of everything measured: the latest row of each kind."""
    latest = {(r["shape"], r["batch"], r["lengths"], r["engine"]): r for r in rows}
    lines = [
        "# Rollout engines",
        "",
        "Tokens a second, prefill included; for `graph` also of the decode steps alone (refills, which varying lengths",
        "need, are among them), and the floor of a step over its time. Goals are of decode steps: so was the prototype",
        "measured that they go out from. `varying` is compared with `third`, as much work without variation: its goal",
        f"is {VARYING_GOAL:.0%} of that. Rows of one commit (`code`) may be compared.",
        "",
        "| model | batch | lengths | engine | tok/s | of `third` | decode only | goal | step, ms | floor, ms "
        "| of floor | peak, GiB | code |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (shape, batch, lengths, engine), r in sorted(latest.items(), key=lambda x: (x[0][0], x[0][1], x[0][2:])):
        goal = GOALS.get((shape, batch)) if (engine, lengths) == ("graph", "equal") else None
        third = latest.get((shape, batch, "third", engine)) if lengths == "varying" else None
        if third is not None and third.get("requests") != r.get("requests"):
            third = None  # not as much work
        columns = [
            shape, batch, lengths, engine, f"{r['tokens_per_s']:,}",
            "" if third is None else f"{r['tokens_per_s'] / third['tokens_per_s']:.0%}",
            f"{r['decode_tokens_per_s']:,}" if "decode_tokens_per_s" in r else "",
            "" if goal is None else f"{goal:,}", r.get("step_ms", ""), r.get("floor_ms", ""),
            f"{r['share_of_floor']:.0%}" if "share_of_floor" in r else "", r.get("peak_gib", ""), r.get("code", ""),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    made = sorted({(r["hardware"], r["torch"], r["transformers"], r["date"], r["command"]) for r in latest.values()})
    lines += ["", "![Tokens a second](rollout.png)"]
    lines += ["", *(f"- {h}, torch {t}, transformers {v}, {d}: `{c}`" for h, t, v, d, c in made)]
    profiled = [(key, r) for key, r in sorted(latest.items(), key=lambda x: x[0][:2]) if "profile" in r]
    if profiled:
        lines += ["", "## Where the time of a decode step goes", "", "Prefill of the first prompts is left out."]
    for (shape, batch, lengths, _), r in profiled:
        found = r["profile"]
        lines += [
            "",
            f"**{shape}, batch {batch}, {lengths} lengths**: {found['step_us']:,} us a step, in {found['idle_us']} of "
            "which no kernel runs.",
            "",
            "| kernel | calls a step | us a call | us a step |",
            "|---|---|---|---|",
            *(f"| `{short(n)}` | {calls:g} | {us:g} | {calls * us:.1f} |" for n, calls, us in found["kernels"]),
        ]
    return "\n".join([*lines, ""])


def report(folder: Path) -> None:
    """Write the page and the plot of everything measured."""
    rows = [json.loads(line) for line in (folder / "rollout.jsonl").read_text().splitlines()]
    latest = {(r["shape"], r["batch"], r["lengths"], r["engine"]): r for r in rows}
    (folder / "rollout.md").write_text(page(rows))
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = sorted({key[:3] for key in latest})
    engines = [e for e in ENGINES if any(key[3] == e for key in latest)]
    figure, axes = plt.subplots(figsize=(1.6 * len(cases) + 3, 4))
    width = 0.8 / len(engines)
    for i, engine in enumerate(engines):
        heights = [latest.get((*case, engine), {}).get("tokens_per_s", 0) for case in cases]
        axes.bar([x + i * width for x in range(len(cases))], heights, width, label=engine)
    axes.set_xticks([x + 0.4 for x in range(len(cases))], [f"{s}\nbatch {b}\n{n}" for s, b, n in cases], fontsize=8)
    axes.set_ylabel("tokens a second, prefill included")
    axes.legend()
    figure.tight_layout()
    figure.savefig(folder / "rollout.png", dpi=120)


def code() -> str:
    """Return the commit that runs, with a + where files differ from it; empty outside of a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return commit.stdout.strip() + "+" * bool(changed.stdout.strip())


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for, a row at a time; a row that fails is reported and the rest goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.5B"], choices=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--engines", nargs="+", default=["graph", "hf", "static"], choices=ENGINES)
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--requests", type=int, default=16, help="for each row, where lengths vary")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--nf4", action="store_true", help="4-bit weights (bitsandbytes)")
    parser.add_argument("--profile", action="store_true", help="measure which kernel of `graph` takes what")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--report", action="store_true", help="only write the table and the plot")
    parser.add_argument("--date", default=str(datetime.date.today()))
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.profile and args.device != "cuda":
        parser.error(f"--profile reads CUDA kernels, and --device is {args.device}: leave it out.")
    args.output.mkdir(parents=True, exist_ok=True)
    if not args.report:
        import transformers

        rates = ceilings(args.device)
        about = {
            "hardware": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": args.date,
            "code": code(),
            "command": " ".join(["python", "benchmarks/rollout.py", *_without(argv, "--output", "--date")]),
            "copy_tb_s": round(rates[0] / 1e12, 2),
            "matrix_tflop_s": round(rates[1] / 1e12),
        }
        for shape in args.shapes:
            for batch in args.batch:
                for lengths in args.lengths:
                    for name in args.engines:
                        try:
                            row = measure(args, shape, batch, name, lengths, rates) | about
                        except Exception as error:
                            print(f"{shape} {batch} {lengths} {name}: {type(error).__name__}: {error}", flush=True)
                        else:
                            print(row, flush=True)
                            with (args.output / "rollout.jsonl").open("a") as file:
                                file.write(json.dumps(row) + "\n")
                        gc.collect()
                        if args.device == "cuda":
                            torch.cuda.empty_cache()
    if (args.output / "rollout.jsonl").exists():
        report(args.output)


def _without(words: list[str], *options: str) -> list[str]:
    """Drop options and their values from a command line."""
    return [w for before, w in zip(["", *words], words, strict=False) if w not in options and before not in options]


def _timed(work: Any, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
