# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Programmatic dependent launch: a kernel gets going while the one before it, whose results it waits for, ends.

A decode step is hundreds of kernels of some microseconds each, so what a launch costs counts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda  # what `tl.extra.cuda` needs
from torch import Tensor

ENABLED = True
"""Whether kernels are launched so where the device can (compute capability 9 and later)."""


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Come first in a kernel, before it reads what another wrote or writes what another may still read."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def _can(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(triton.language.extra.cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(x: Tensor) -> dict[str, Any]:
    """Return the options to launch a kernel with that begins with `wait_for_inputs`.

    Args:
        x: One of its inputs.
    """
    if ENABLED and _can(x.device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
