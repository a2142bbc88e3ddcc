"""Adam's moments in 8 bits, stochastic rounding, and the noise of both: what the kernel does, in plain PyTorch.

A moment is stored by blocks of 256 neighbours in a row, each relative to the block's largest: the first as a signed
fourth root (127 steps a side), the second as an eighth root (255 steps), so that steps are 1.6 to 3 % of a value near
the top of a block and still 20 % of one that is 10,000 times smaller. Block-wise scales are those of "8-bit optimizers
via block-wise quantization" (https://arxiv.org/abs/2110.02861); its table of values is replaced by roots, which are
computed. Between two codes the choice is by chance, in proportion: the expectation of a stored moment is the moment
itself. Rounding to the nearest would hold a second moment still that moves by 0.1 % a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam's state calls its first and second moment."""
BLOCK = 256
"""Neighbours in a row that share a scale."""
FIRST, SECOND = 127, 255
"""The largest code of a first (signed) and of a second moment."""

_MASK_32 = 0xFFFFFFFF


def scale_shape(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor: its rows, cut into blocks."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def decode_first(codes: Tensor, scales: Tensor) -> Tensor:
    """Return first moments.

    Args:
        codes: (..., C) int8.
        scales: (..., ceil(C / 256)) float32.

    Returns:
        (..., C) float32.
    """
    root = codes.float().div_(FIRST)
    return root.square().square_().mul_(_spread(scales, codes)).mul_(root.sign_())


def decode_second(codes: Tensor, scales: Tensor) -> Tensor:
    """Return second moments.

    Args:
        codes: (..., C) uint8.
        scales: (..., ceil(C / 256)) float32.

    Returns:
        (..., C) float32.
    """
    return codes.float().div_(SECOND).square_().square_().square_().mul_(_spread(scales, codes))


def encode_first(values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Store first moments.

    Args:
        values: (..., C) float32.
        noise: (..., C) float32 in [0, 1).

    Returns:
        Codes (..., C) int8 and scales (..., ceil(C / 256)) float32.
    """
    scales = _largest(values)
    ratio = _relative(values.abs(), scales)
    low = ratio.sqrt().sqrt_().mul_(FIRST).floor_().clamp_(max=FIRST - 1)
    below = low.div(FIRST).square_().square_()
    above = (low + 1).div_(FIRST).square_().square_()
    up = noise * (above - below) < ratio - below
    return (low + up).mul_(values.sign()).to(torch.int8), scales


def encode_second(values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Store second moments.

    Args:
        values: (..., C) float32, none negative.
        noise: (..., C) float32 in [0, 1).

    Returns:
        Codes (..., C) uint8 and scales (..., ceil(C / 256)) float32.
    """
    scales = _largest(values)
    ratio = _relative(values, scales)
    low = ratio.sqrt().sqrt_().sqrt_().mul_(SECOND).floor_().clamp_(max=SECOND - 1)
    below = low.div(SECOND).square_().square_().square_()
    above = (low + 1).div_(SECOND).square_().square_().square_()
    up = noise * (above - below) < ratio - below
    return (low + up).to(torch.uint8), scales


def decoded(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return both moments in float32 from a state of either kind."""
    first, second = (local(state[name]) for name in MOMENTS)
    if "exp_avg_scale" not in state:
        return {"exp_avg": first.float(), "exp_avg_sq": second.float()}
    return {
        "exp_avg": decode_first(first, local(state["exp_avg_scale"])),
        "exp_avg_sq": decode_second(second, local(state["exp_avg_sq_scale"])),
    }


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round to one of the two neighbouring bfloat16, in proportion: the expectation is the value itself.

    Args:
        values: float32, finite.
        bits: Integers of the same shape, of which the low 16 bits are used, uniform.

    Returns:
        bfloat16 of the same shape.
    """
    raised = values.contiguous().view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (raised & ~0xFFFF).view(torch.float32).bfloat16()


def noise_key(seed: int, step: int, number: int) -> tuple[int, int]:
    """Mix what is constant over a weight in a step into two numbers of 31 bits.

    Args:
        seed: Of the run.
        step: Of the optimizer.
        number: Of the weight.
    """
    z = 0
    for x in (seed, step, number):  # the finaliser of splitmix64, as in lit_ppo.algo.noise
        z = (z + 0x9E3779B97F4A7C15 * (x + 1)) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
    return z & 0x7FFFFFFF, z >> 33


def noise_bits(key: tuple[int, int], start: int, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw 64 bits for each element: a function of the key and of the element's place alone.

    Args:
        key: From `noise_key`.
        start: Place of the first element in its weight.
        shape: Of what is drawn for.
        device: Where.

    Returns:
        Two int64 tensors of the shape, each uniform in [0, 2^32).
    """
    n = torch.Size(shape).numel()
    place = torch.arange(start, start + n, dtype=torch.int64, device=device).bitwise_and_(_MASK_32)
    first = _hash(place, *key)
    return first.view(shape), _hash(first ^ place, key[1], key[0]).view(shape)


def _hash(x: Tensor, k0: int, k1: int) -> Tensor:
    """lowbias32 (Wellons 2018) with a key, in 64-bit integers that hold 32 bits."""
    h = (x * 0x9E3779B9 + k0) & _MASK_32
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK_32
    h = ((h ^ (h >> 15)) + k1) & _MASK_32
    h = (h * 0x846CA68B) & _MASK_32
    return h ^ (h >> 16)


def _spread(scales: Tensor, like: Tensor) -> Tensor:
    return scales.repeat_interleave(BLOCK, dim=-1)[..., : like.shape[-1]]


def _largest(values: Tensor) -> Tensor:
    short = -values.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(values, (0, short)) if short else values
    return padded.abs().unflatten(-1, (-1, BLOCK)).amax(dim=-1)


def _relative(values: Tensor, scales: Tensor) -> Tensor:
    return (values / _spread(scales.clamp(min=1e-38), values)).clamp_(max=1.0)
