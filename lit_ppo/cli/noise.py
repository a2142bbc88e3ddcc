"""What other packages say on every run and nobody who runs `lit-ppo` can act on. Python users keep all of it."""

from __future__ import annotations

import logging
import warnings

LINES = {
    "lightning.pytorch.utilities.rank_zero": "💡 Tip",  # advertises litlogger and litmodels
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",  # an optional kernel, quantized or not
}
"""How lines begin that are dropped, by logger."""

WARNINGS = (
    r".isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 on torch 2.13
    r".*is_gradient_checkpointing. is deprecated",  # PEFT on transformers 5
)
"""Deprecations between other packages, as patterns."""


def hush() -> None:
    """Drop those lines and warnings, for the rest of the process."""
    for name in LINES:
        logging.getLogger(name).addFilter(_worth_saying)
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message, FutureWarning)


def _worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LINES[record.name])
