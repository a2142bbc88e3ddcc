"""Log-probs and entropies from hidden states: naive, checkpointed chunks, the fused head, and Liger's.

    python benchmarks/fused_head.py --out docs/benchmarks/fused_head.md

All get hidden states (N, H) in bfloat16, the weight (V, H) of a head, and targets (N,). `naive`, `chunks` and `fused`
return log-prob and entropy of every token, and their backward gets a random gradient of the log-probs. Liger's
`LigerFusedLinearCrossEntropyLoss` returns a mean cross-entropy, without entropy or a gradient per token: it can compute
its gradients in its forward, which a loss that comes after the log-probs (PPO's ratio) cannot. It is the nearest loss
that it has, and is shown for scale. Time is the median of several runs; memory is the peak above what was there before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_ppo.roles import logprobs

SHAPES = {"16k x 1536 x 151936": (16_384, 1_536, 151_936), "8k x 4096 x 128256": (8_192, 4_096, 128_256)}
CHUNK = 2**26
"""Logits in a chunk of the checkpointed path: 256 MiB of float32."""

Path_ = Callable[[Tensor, nn.Linear, Tensor], Tensor]
"""(hidden, head, targets) -> something to differentiate: (N,) log-probs, or a mean loss."""


def from_logits(hidden: Tensor, head: nn.Linear, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, by autograd alone."""
    logits = head(hidden).float()
    total = logits.logsumexp(-1)
    entropy = total - (logits.sub(total[:, None]).exp() * logits).sum(-1)
    return logits.gather(-1, targets[:, None])[:, 0] - total, entropy


def naive(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return from_logits(hidden, head, targets)[0]


def chunks(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    rows = max(1, CHUNK // head.out_features)
    parts = [
        checkpoint(from_logits, h, head, t, use_reentrant=False)[0]
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(parts)


def fused(elements: int) -> Path_:
    def run(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        return logprobs.token_logprobs(hidden, targets, head, entropy=True, chunk_elements=elements)[0]

    return run


def liger() -> Path_ | None:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    loss = LigerFusedLinearCrossEntropyLoss()

    def run(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        out: Tensor = loss(head.weight, hidden, targets)
        return out

    return run


def measure(work: Callable[[], object], device: str, repeats: int) -> tuple[float, float]:
    """Return the median time in milliseconds and the peak memory in GiB above what was there."""
    work()
    if device != "cuda":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3, float("nan")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2], (torch.cuda.max_memory_allocated() - before) / 2**30


def rows_of(name: str, shape: tuple[int, int, int], paths: dict[str, Path_], device: str, repeats: int) -> list[str]:
    """Measure every path at one shape, with a frozen and a trained head."""
    tokens, width, vocab = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    head = nn.Linear(width, vocab, bias=False, device=device, dtype=dtype)
    targets = torch.randint(0, vocab, (tokens,), device=device)
    weights = torch.randn(tokens, device=device) / tokens
    floor = 2 * tokens * width * vocab / 790e12 * 1e3  # of one product, at the matrix rate that was measured
    lines = []
    for path, run in paths.items():
        for trained in (False, True):
            head.requires_grad_(trained)

            def forward(run: Path_ = run) -> None:
                with torch.no_grad():
                    run(hidden, head, targets)

            def both(run: Path_ = run) -> None:
                hidden.grad = head.weight.grad = None
                out = run(hidden, head, targets)
                (out if out.dim() == 0 else (out * weights).sum()).backward()

            cells: list[Any] = []
            for work in (forward, both):
                try:
                    ms, gib = measure(work, device, repeats)
                    cells += [f"{ms:.1f}", f"{gib:.2f}"]
                except torch.OutOfMemoryError:
                    cells += ["out of memory", ""]
                hidden.grad = head.weight.grad = None
                if device == "cuda":
                    torch.cuda.empty_cache()
            kind = "trained" if trained else "frozen"
            products = floor * (3 + trained)
            lines.append(f"| {name} | {path} | {kind} | {' | '.join(cells)} | {products:.1f} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=[*SHAPES, "tiny"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--chunk-mib", type=int, nargs="*", default=[256], help="logits held by the fused head, in MiB")
    parser.add_argument("--skip-naive", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    paths: dict[str, Path_] = {} if args.skip_naive else {"naive": naive}
    paths["checkpointed chunks"] = chunks
    for mib in args.chunk_mib:
        paths[f"fused ({mib} MiB)"] = fused(mib * 2**20 // (2 if device == "cuda" else 4))
    if device == "cuda" and (theirs := liger()) is not None:
        paths["Liger (mean cross-entropy)"] = theirs
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, float32"
    lines = [
        "# The fused head",
        "",
        f"{where}, torch {torch.__version__}; the docstring of `benchmarks/fused_head.py` says what is compared.",
        "The last column is the time that the matrix products of forward and backward need at 790 TFLOP/s, the logits",
        "computed twice (the naive path computes them once).",
        "",
        "| tokens x hidden x vocabulary | path | head | forward, ms | GiB | with backward, ms | GiB | products, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in args.shapes:
        lines += rows_of(name, SHAPES.get(name, (64, 32, 500)), paths, device, args.repeats)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
