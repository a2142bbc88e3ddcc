"""The update alone: forward and backward of a policy, packed and padded, lengths equal and varying by 1:8.

    python benchmarks/update.py --shapes 1.5B 8B --out docs/benchmarks/update.md
    python benchmarks/update.py --shapes 1.5B --profile         # which kernels take the time
    python benchmarks/update.py --layers plain fused liger      # what fused layers give; Liger's if it is installed

1.5B is trained whole, 8B by LoRA (rank 16, all linear layers) on a frozen trunk, all in bfloat16 as under
`precision="bf16-true"`; random weights of the true shapes. Half of each sequence is response. `--tokens` real tokens
are cut into micro-batches of `--micro` tokens; padded forwards run the same micro-batches. The loss is a weighted sum
of log-probs, with entropies computed as in PPO; no optimizer step. Tokens are real ones. MFU is of 989 TFLOP/s and
counts 6 (LoRA: 4) operations a token and weight of the matrices, the head for response tokens alone, the embedding and
recomputation not.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rollout import SHAPES, build

from lit_ppo.algo.cut import by_tokens
from lit_ppo.config import LoRAConfig
from lit_ppo.experience import Prompts, Rollout
from lit_ppo.roles.adapters import POLICY, add_adapters
from lit_ppo.roles.fused_layers import fuse, unfuse
from lit_ppo.roles.model import RoleModel, RoleView
from lit_ppo.speed import Work

PEAK = 989e12


def store_of(shape: str, device: str) -> tuple[RoleModel, str | None, float]:
    """Return a policy, its adapter, and the operations that a token costs, half of the tokens being predicted."""
    model = build(shape, device)
    head = model.get_output_embeddings().weight.numel()
    work = Work.of(model, model.config).matrices - head / 2
    if shape in ("1.5B", "135M", "tiny"):
        return RoleModel(model.requires_grad_(True)), None, 6.0 * work
    adapted = add_adapters(model, LoRAConfig(r=16), [POLICY], seed=0)
    return RoleModel(adapted).to(device, model.dtype), POLICY, 4.0 * work


def batch_of(lengths: list[int], vocab: int, device: str) -> Rollout:
    """Make sequences of these lengths, half prompt and half response."""
    p = torch.tensor([n // 2 for n in lengths])
    r = torch.tensor(lengths) - p
    rows, generator = len(lengths), torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab, (rows, int(p.max() + r.max())), generator=generator)
    texts: dict[str, Any] = {"text": [""] * rows, "messages": [None] * rows, "columns": [{}] * rows}
    prompts = Prompts(ids[:, : int(p.max())], p, torch.arange(rows), **texts)
    zeros = torch.zeros(rows, int(r.max()))
    return Rollout(prompts, ids[:, int(p.max()) :], r, r > 0, zeros).measured().to(device)


def lengths_of(kind: str, tokens: int, mean: int) -> list[int]:
    """Return lengths that sum to about `tokens`: equal, or spread evenly from the shortest to 8 times that."""
    count = tokens // mean
    if kind == "equal":
        return [mean] * count
    low = 2 * mean / 9
    return [round(low * (1 + 7 * i / max(1, count - 1))) for i in range(count)]


def with_layers(how: str, model: Any) -> None:
    """Compute norms, SwiGLU and rotary embeddings as transformers does, by our kernels, or by Liger's."""
    unfuse(model)
    if how == "fused":
        print(f"fused: {fuse(model)}", flush=True)
    if how == "liger":
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def step(view: RoleView, parts: list[Rollout]) -> None:
    """Forward and backward of every micro-batch."""
    for part in parts:
        logprobs, _ = view(part, entropy=True)
        (logprobs * part.logprobs.add(1e-4)).sum().backward()
    for parameter in view.store.parameters():
        parameter.grad = None


def measure(view: RoleView, parts: list[Rollout], device: str, repeats: int) -> tuple[float, float]:
    """Return the median seconds of a step and its peak memory in GiB."""
    step(view, parts)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step(view, parts)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
    return sorted(times)[len(times) // 2], peak


def profile(view: RoleView, parts: list[Rollout]) -> None:
    """Print the kernels that take the most time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    step(view, parts)
    with recording(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        step(view, parts)
        torch.cuda.synchronize()
    print(record.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["1.5B", "8B"], choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--micro", type=int, default=16_384)
    parser.add_argument("--mean", type=int, default=512, help="mean length of a sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", nargs="*", default=["fused"], choices=["plain", "fused", "liger"])
    parser.add_argument("--lengths", nargs="*", default=["equal", "varying"], choices=["equal", "varying"])
    parser.add_argument("--forwards", nargs="*", default=["packed", "padded"], choices=["packed", "padded"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, float32"
    lines = [
        "# The update",
        "",
        f"{where}, torch {torch.__version__}; `benchmarks/update.py` says what is counted. {args.tokens:,} tokens in",
        f"sequences of {args.mean} in the mean, micro-batches of {args.micro:,}; `varying` lengths go from 1 to 8.",
        "",
        "| model | lengths | forwards | layers | tokens/s | MFU | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    layers = sorted(args.layers, key="liger".__eq__)  # last, as it changes transformers for good
    for how, shape in product(layers, args.shapes):
        store, adapter, cost = store_of(shape, device)
        with_layers(how, store.base)
        view = RoleView(store.train(), "logprobs", adapter)
        name = f"{shape}{' LoRA' * (adapter is not None)}"
        for kind, forwards in product(args.lengths, args.forwards):
            whole = batch_of(lengths_of(kind, args.tokens, args.mean), SHAPES[shape][1]["vocab_size"], device)
            sizes = [sum(size) for size in whole.on_host()]
            if forwards == "packed" and (reason := store.pack()) is not None:
                raise SystemExit(f"{shape} cannot run packed: {reason}")
            if forwards == "padded":
                store.pad()
            parts = [whole.part(torch.tensor(rows)) for rows in by_tokens(sizes, args.micro)]
            if args.profile:
                print(f"{shape}, {kind}, {forwards}, {how} layers")
                profile(view, parts[:1])
                continue
            try:
                seconds, peak = measure(view, parts, device, args.repeats)
                rate = sum(sizes) / seconds
                row = f"{rate:,.0f} | {rate * cost / PEAK:.1%} | {peak:.1f} |"
            except torch.OutOfMemoryError:
                row = "out of memory | | |"
            lines.append(f"| {name} | {kind} | {forwards} | {how} | {row}")
            print(lines[-1], flush=True)
        del store, view
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
