"""Callbacks for any LightningModule: less memory, frozen parameters, and runs that outlive an out-of-memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_ppo.callbacks.activations import OffloadActivations
    from lit_ppo.callbacks.checkpointing import GradientCheckpointing
    from lit_ppo.callbacks.export_hf import ExportHF
    from lit_ppo.callbacks.freeze import FreezeParameters
    from lit_ppo.callbacks.memory_report import MemoryReport
    from lit_ppo.callbacks.offload import OffloadRoles
    from lit_ppo.callbacks.oom import OOMGuard
    from lit_ppo.callbacks.progress import RolloutProgress
    from lit_ppo.callbacks.quantize import QuantizeModules, QuantizeRewardModel
    from lit_ppo.callbacks.sample_table import SampleTable

_HOMES = {
    "ExportHF": "export_hf",
    "FreezeParameters": "freeze",
    "GradientCheckpointing": "checkpointing",
    "MemoryReport": "memory_report",
    "OOMGuard": "oom",
    "OffloadActivations": "activations",
    "OffloadRoles": "offload",
    "QuantizeModules": "quantize",
    "QuantizeRewardModel": "quantize",
    "RolloutProgress": "progress",
    "SampleTable": "sample_table",
}
__all__ = [
    "ExportHF",
    "FreezeParameters",
    "GradientCheckpointing",
    "MemoryReport",
    "OOMGuard",
    "OffloadActivations",
    "OffloadRoles",
    "QuantizeModules",
    "QuantizeRewardModel",
    "RolloutProgress",
    "SampleTable",
]


def __getattr__(name: str) -> Any:
    """Import a callback when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lit_ppo.callbacks.{_HOMES[name]}"), name)
