"""Each kernel of the decode step alone, against the time its bytes need: attention, sampling, and the matrix products.

    python benchmarks/rollout_kernels.py --shapes 1.5B 8B --batch 64 256

Inputs rotate among copies that together exceed the cache, and calls are timed inside a CUDA graph, as in the engine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from rollout import SHAPES, ceilings

from lit_ppo.roles.attention import AttentionSpec
from lit_ppo.rollout import attention_kernels, kernels, sampling_kernels

CALLS = 8
"""Calls in one captured graph."""


def microseconds(work: Callable[[int], Any], device: str) -> float:
    """Return the time of one call; `work` gets its number, so that it can use other inputs each time."""
    for i in range(CALLS if device == "cuda" else 1):
        work(i)
    if device != "cuda":
        start = time.perf_counter()
        work(0)
        return (time.perf_counter() - start) * 1e6
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            work(i)
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e3)
    return sorted(times)[len(times) // 2]


def show(name: str, us: float, moved: float, rate: float) -> None:
    """Print a line: time, floor, and the share that the floor is of it."""
    floor = moved / rate * 1e6
    print(f"{name:72s} {us:8.1f} us  floor {floor:7.1f}  {floor / us:5.0%}", flush=True)


def attention(shape: dict[str, Any], batch: int, context: int, device: str, rate: float) -> None:
    """Time the fused attention with several block sizes and splits."""
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim, width = shape["hidden_size"] // heads, context + 128
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = batch * kv_heads * width * dim * dtype.itemsize
    copies = max(2, int(2e8 / size)) if device == "cuda" else 1
    stored = [torch.randn(2, batch + 1, kv_heads, width, dim, device=device, dtype=dtype) for _ in range(copies)]
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    table = tuple(torch.randn(width, dim, device=device, dtype=dtype) for _ in range(2))
    slots, lengths = torch.arange(batch, device=device), torch.full((batch,), context, device=device)
    spec = AttentionSpec(dim**-0.5)
    for block, warps, stages in ((32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 3), (128, 4, 2)):
        attention_kernels.FEW = attention_kernels.MANY = block, warps, stages
        for splits in (1, 2):

            def work(i: int, splits: int = splits) -> None:
                k, v = stored[i % copies]
                kernels.fused_attention(qkv, k, v, slots, lengths, spec, heads, (table[0], table[1]), None, splits)

            name = f"attention {batch} x {heads}/{kv_heads} x {dim}, block {block} warps {warps} stages {stages}"
            moved = 2 * batch * context * kv_heads * dim * dtype.itemsize
            show(f"{name} splits {splits}", microseconds(work, device), moved, rate)


def sampling(vocab: int, batch: int, device: str, rate: float) -> None:
    """Time the sampler, with and without noise, and with entropies."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    logits = [torch.randn(batch, vocab, device=device, dtype=dtype) for _ in range(4)]
    base, index = torch.zeros((), dtype=torch.int64, device=device), torch.arange(batch, device=device)
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        sampling_kernels.SAMPLE_BLOCK, sampling_kernels.SAMPLE_WARPS = block, warps
        for temperature, entropy in ((1.0, False), (0.0, False), (1.0, True)):

            def work(i: int, temperature: float = temperature, entropy: bool = entropy) -> None:
                kernels.sample(logits[i % 4], temperature, None, base, index, index, entropy)

            name = f"sampling {batch} x {vocab}, block {block} warps {warps}, temperature {temperature:g}"
            name += ", entropy" * entropy
            show(name, microseconds(work, device), batch * vocab * dtype.itemsize, rate)


def products(shape: dict[str, Any], batch: int, device: str, rate: float, flops: float) -> None:
    """Time the matrix products; their floor is the larger of bytes and operations."""
    hidden, middle, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    joined = hidden + 2 * shape["num_key_value_heads"] * hidden // heads
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for name, rows, columns in (
        ("query, key, value", joined, hidden),
        ("output", hidden, hidden),
        ("gate", middle, hidden),
        ("gate and up", 2 * middle, hidden),
        ("down", hidden, middle),
        ("head", shape["vocab_size"], hidden),
    ):
        copies = max(2, min(CALLS, int(4e8 / (rows * columns * 2))))
        weights = [torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(copies)]
        x = torch.randn(batch, columns, device=device, dtype=dtype)

        def work(i: int, weights: list[Any] = weights, x: Any = x) -> None:
            torch.nn.functional.linear(x, weights[i % len(weights)])

        moved = max(rows * columns * dtype.itemsize, 2 * batch * rows * columns / flops * rate)
        show(f"{name}, {batch} x {rows} x {columns}", microseconds(work, device), moved, rate)


def main() -> None:
    """Time what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.5B"], choices=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu: interpreted")
    args = parser.parse_args()
    rate, flops = ceilings(args.device)
    print(f"copy {rate / 1e12:.2f} TB/s, matrix products {flops / 1e12:.0f} TFLOP/s")
    for name in args.shapes:
        shape = SHAPES[name][1]
        for batch in args.batch:
            print(f"-- {name}, batch {batch}, context {args.context}")
            attention(shape, batch, args.context, args.device, rate)
            sampling(shape["vocab_size"], batch, args.device, rate)
            products(shape, batch, args.device, rate, flops)


if __name__ == "__main__":
    main()
