"""A Triton kernel to compile, in a process of its own: `python -m lit_ppo.doctor.probe_kernels`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _double(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + place, tl.load(x + place, mask=place < n) * 2, mask=place < n)


def main() -> None:
    """Compile and run it; raises if that or its result fails."""
    x = torch.arange(1000, device="cuda", dtype=torch.float32)
    _double[(8,)](x, 1000, BLOCK=128)
    if not torch.equal(x, torch.arange(1000, device="cuda") * 2.0):
        raise ValueError("a kernel that doubles numbers gives others")


if __name__ == "__main__":
    main()
