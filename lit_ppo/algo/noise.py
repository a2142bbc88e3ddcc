"""Counter-based sampling noise: what picks a token depends on where the token stands, not on when it is drawn.

It is a function of (seed, stream, iteration, sample index, t, vocabulary id) alone. So a retry, a split batch, another
number of ranks and a resumed run all draw the same noise, on any device: its integers are equal bit by bit, and the
two logarithms that follow differ at most by the rounding of the device.

The integer recipe, for a port to a kernel (all products and sums wrap around, ``>>`` shifts in zeros)::

    mix(z)       64 bit, the finaliser of splitmix64 (Steele, Lea and Flood 2014):
                 z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    absorb(z, x) mix(z + 0x9E3779B97F4A7C15 * (x + 1))
    base         absorb(absorb(absorb(0, seed), stream), iteration)                one number an iteration
    key          absorb(absorb(base, index), t)                                    one number a row
    k0, k1       low and high 32 bits of key
    hash(id)     32 bit, the multipliers and shifts of lowbias32 (Wellons 2018):
                 h = id * 0x9E3779B9 + k0
                 h ^= h >> 16;  h *= 0x7FEB352D;  h ^= h >> 15;  h += k1;  h *= 0x846CA68B;  h ^= h >> 16
    bits         h & 0x7FFFFFFF                                                    uniform in [0, 2^31)
    w            min((float32(bits) + 0.5) * 2^-31, 1 - 2^-24)                     float32
    gumbel       -log(-log1p(-w))

``-log1p(-w)`` is exponential, and the largest Gumbel values, which alone decide an argmax, come from the smallest `w`,
where float32 is finest.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN_64 = 0x9E3779B97F4A7C15


def _signed(x: int, bits: int = 64) -> int:
    """Read the low `bits` of `x` as a two's complement number: what a torch integer tensor can hold."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def _mix(z: Tensor) -> Tensor:
    z = z ^ ((z >> 30) & ((1 << 34) - 1))
    z = z * _signed(0xBF58476D1CE4E5B9)
    z = z ^ ((z >> 27) & ((1 << 37) - 1))
    z = z * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _absorb(z: Tensor, x: Tensor | int) -> Tensor:
    step = (x + 1) * _signed(_GOLDEN_64)
    return _mix(z + (step if isinstance(step, Tensor) else _signed(step)))


def base_key(seed: int, iteration: int, stream: int = 0) -> int:
    """Mix what is constant in an iteration into one number.

    Args:
        seed: Seed of the run.
        iteration: Number of the iteration.
        stream: Keeps draws for different purposes apart: training, validation, test.

    Returns:
        A signed 64-bit integer.
    """
    z = torch.zeros((), dtype=torch.int64)
    for x in (seed, stream, iteration):
        z = _absorb(z, x)
    return int(z)


def row_keys(base: Tensor | int, index: Tensor, t: Tensor | int) -> Tensor:
    """Mix the place of each token into its key.

    Args:
        base: `base_key`, an int or a 0-dim int64 tensor (which a captured CUDA graph can read anew).
        index: (B,) int64 global number of each sample.
        t: Position in the response: an int, or (B,) or 0-dim integers.

    Returns:
        (B,) int64.
    """
    return _absorb(_absorb(base + torch.zeros_like(index), index), t.long() if isinstance(t, Tensor) else t)


def random_bits(keys: Tensor, vocab_size: int) -> Tensor:
    """Hash every vocabulary id with the key of each row.

    Args:
        keys: (B,) int64 from `row_keys`.
        vocab_size: V.

    Returns:
        (B, V) int32, uniform in [0, 2^31). A longer vocabulary adds columns and changes none.
    """
    k0 = (keys << 32 >> 32).int()[:, None]
    k1 = (keys >> 32).int()[:, None]
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    h = ids * _signed(0x9E3779B9, 32) + k0
    shifted = torch.empty_like(h)
    _xor_shift(h, 16, shifted).mul_(0x7FEB352D)
    _xor_shift(h, 15, shifted).add_(k1).mul_(_signed(0x846CA68B, 32))
    return _xor_shift(h, 16, shifted).bitwise_and_(0x7FFFFFFF)


def _xor_shift(h: Tensor, by: int, scratch: Tensor) -> Tensor:
    """Do ``h ^= h >> by`` in place, shifting in zeros (torch shifts in the sign)."""
    torch.bitwise_right_shift(h, by, out=scratch)
    return h.bitwise_xor_(scratch.bitwise_and_((1 << (32 - by)) - 1))


def to_gumbel(bits: Tensor) -> Tensor:
    """Turn uniform integers into Gumbel noise, finite for each of them: from -2.8 to 22.2.

    Args:
        bits: int32 in [0, 2^31), any shape.

    Returns:
        float32, the same shape.
    """
    minus_w = bits.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=-(1 - 2.0**-24))
    return minus_w.log1p_().neg_().log_().neg_()


def gumbel(seed: int, iteration: int, index: Tensor, t: Tensor | int, vocab_size: int, *, stream: int = 0) -> Tensor:
    """Draw Gumbel noise: ``argmax(logits + gumbel)`` is a sample of ``softmax(logits)``.

    Args:
        seed: Seed of the run.
        iteration: Number of the iteration.
        index: (B,) int64 global number of each sample in its iteration; its device is where the noise is made.
        t: Position in the response: an int, or (B,) integers.
        vocab_size: V.
        stream: Keeps draws for different purposes apart: training, validation, test.

    Returns:
        (B, V) float32. A row does not depend on the other rows.
    """
    return to_gumbel(random_bits(row_keys(base_key(seed, iteration, stream), index, t), vocab_size))
