"""Triton kernels of the decode step. Each has a plain PyTorch twin that it is tested against, named in its docstring.

A decode step is bound by memory: every weight and every stored key and value is read once for one token a row. These
kernels keep what surrounds the matrix products from costing as much again. Importing them needs Triton.
"""

from lit_ppo.rollout.attention_kernels import decode_attention, fused_attention
from lit_ppo.rollout.sampling_kernels import advance, sample

__all__ = ["advance", "decode_attention", "fused_attention", "sample"]
