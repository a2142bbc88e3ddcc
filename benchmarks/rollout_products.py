"""Our matrix products of the decode step against PyTorch's, each with what follows it, for many ways to cut them.

    python benchmarks/rollout_products.py --shapes 1.5B 8B --rows 64 256

`gated`: gate and up, then SwiGLU; `out` and `down`: the projection, then the addition and the norm; `qkv`: alone.
Prints PyTorch's time and the best few cuts. `--warm i/n` only compiles every n-th cut, so that n processes can share
the work beforehand.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from rollout import SHAPES
from rollout_kernels import CALLS, microseconds

from lit_ppo.rollout import layer_kernels, matmul_kernels
from lit_ppo.rollout.matmul_kernels import Tiles


def cuts(rows: int, kind: str) -> Iterator[Tiles]:
    """List ways to cut a product of so many rows."""
    tall = (16,) if rows <= 16 else (32, 64) if rows <= 32 else (64,) if rows <= 64 else (64, 128)
    for tile, columns, inner, warps, stages in itertools.product(tall, (32, 64, 128), (64, 128), (4, 8), (3, 4)):
        if (warps == 8 and tile * columns < 64 * 128) or (warps == 4 and tile * columns > 128 * 64):
            continue
        if (tile + columns * (1 + (kind == "gated"))) * inner * 2 * stages > 220_000:  # shared memory
            continue
        for splits in (1,) if kind in ("gated", "qkv") else (2, 4, 6, 8):
            yield Tiles(tile, columns, inner, splits, warps, stages)


def cases(shape: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """List the products of a layer: kind, outputs, inputs."""
    hidden, middle, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    yield "qkv", hidden + 2 * shape["num_key_value_heads"] * hidden // heads, hidden
    yield "out", hidden, hidden
    yield "gated", 2 * middle, hidden
    yield "down", hidden, middle


def run(kind: str, tiles: Tiles | None, x: torch.Tensor, w: torch.Tensor, residual: Any, norm: Any) -> None:
    """Do one product and what follows it."""
    if kind == "gated":
        if tiles is None:
            layer_kernels.swiglu(torch.nn.functional.linear(x, w))
        else:
            matmul_kernels.gated_product(x, w, tiles)
    elif kind == "qkv":
        if tiles is None:
            torch.nn.functional.linear(x, w)
        else:
            matmul_kernels._launch(x, w, x.new_empty(len(x), len(w)), len(w), tiles, False)
    elif tiles is None:
        layer_kernels.add_norm(torch.nn.functional.linear(x, w), residual, norm, 1e-6)
    else:
        matmul_kernels.add_parts_norm(matmul_kernels.product_parts(x, w, tiles), residual, norm, 1e-6)


def timed(kind: str, tiles: Tiles | None, x: torch.Tensor, weights: Any, residual: Any, norm: Any) -> float:
    """Return microseconds of one product and what follows it."""
    return microseconds(lambda i: run(kind, tiles, x, weights[i % len(weights)], residual, norm), x.device.type)


def main() -> None:
    """Time what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.5B"], choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu: interpreted")
    parser.add_argument("--warm", help="i/n")
    parser.add_argument("--best", type=int, default=4)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    number = 0
    for name, rows in itertools.product(args.shapes, args.rows):
        for kind, outputs, inputs in cases(SHAPES[name][1]):
            copies = 1 if args.warm else max(2, min(CALLS, int(4e8 / (outputs * inputs * 2))))
            weights = [torch.randn(outputs, inputs, device=args.device, dtype=dtype) for _ in range(copies)]
            x = torch.randn(rows, inputs, device=args.device, dtype=dtype)
            residual, norm = (torch.randn(n, outputs, device=args.device, dtype=dtype) for n in (rows, 1))
            found = []
            for tiles in [None, *cuts(rows, kind)]:
                number += 1
                if args.warm:
                    i, n = map(int, args.warm.split("/"))
                    if number % n == i:
                        run(kind, tiles, x, weights[0], residual, norm[0])
                    continue

                try:
                    found.append((timed(kind, tiles, x, weights, residual, norm[0]), tiles))
                except Exception as error:
                    print(f"{name} {rows} {kind} {tiles}: {type(error).__name__}: {str(error)[:200]}")
            if not args.warm:
                print(f"{name} {rows} x {outputs} x {inputs} {kind}: PyTorch {found[0][0]:.1f} us", flush=True)
                for us, tiles in sorted(found[1:], key=lambda f: f[0])[: args.best]:
                    print(f"    {us:6.1f} us {tuple(tiles)}", flush=True)


if __name__ == "__main__":
    main()
