"""Options of one source of reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lit_ppo.config import DTYPES, QUANTIZE, check_revision, choice
from lit_ppo.options import at_least, check_types

TRUNKS = ("own", "actor")


@dataclass
class RewardConfig:
    """One source of reward; several add up with their weights and are logged apart."""

    source: str = ""
    """A sequence-classification model (folder or id), or the import path of a function: `package.module.name`."""
    options: dict[str, Any] | None = None
    """Further arguments by name: of the class to make an instance of, or bound to the function."""
    trunk: str = "own"
    """own: `source` is a model of its own. actor: it is an adapter and a head for the actor's base (as exported after
    `lit-ppo reward fit` with `lora`), and they alone are loaded, onto the trunk under the actor's adapters."""
    weight: float = 1.0
    """Its factor in the sum."""
    name: str | None = None
    """Logged as `reward/<name>`. None: the function's name or the last part of the path."""
    on_error: str = "raise"
    """What a score that is not finite does: `raise`, or `skip` the sample (it then has no part in the update)."""
    batch_size: int = 64
    """Texts scored in one forward of a reward model. The score does not depend on it beyond rounding."""
    timeout: float | None = None
    """Seconds that a function may take for a batch before the run stops. It then runs in a thread. None: no limit."""
    max_length: int | None = None
    """Longest input of a reward model, in its own tokens; longer ones lose the prompt's start. None: its context."""
    use_chat_template: bool | None = None
    """Rebuild chats with the reward model's own template. None: if the prompt is a chat and the model has one."""
    dtype: str = "auto"
    """As in RoleConfig."""
    attn_implementation: str | None = None
    """As in RoleConfig."""
    quantize: str = "none"
    """As in RoleConfig: none, nf4, fp4 or int8."""
    device: str | None = None
    """As in RoleConfig."""
    device_map: str | dict[str, Any] | None = None
    """Spread the model over several devices as transformers does: "auto", "balanced", or a device for each part by name
    (needs accelerate). None: on one."""
    trust_remote_code: bool = False
    """As in RoleConfig."""
    revision: str | None = None
    """As in RoleConfig."""

    def __post_init__(self) -> None:
        """Check every value."""
        check_types("reward", self)
        choice("reward", "on_error", self.on_error, ("raise", "skip"))
        choice("reward", "dtype", self.dtype, DTYPES)
        choice("reward", "quantize", self.quantize, QUANTIZE)
        choice("reward", "trunk", self.trunk, TRUNKS)
        if self.device is not None and self.device_map is not None:
            raise ValueError(
                f"`reward.device={self.device!r}` puts the model on one device and `reward.device_map="
                f"{self.device_map!r}` on several. Leave one of the two out."
            )
        at_least("reward", "batch_size", self.batch_size, 1)
        at_least("reward", "max_length", self.max_length, 1)
        at_least("reward", "timeout", self.timeout, 0, strict=True)
        check_revision("reward", self)
        if self.weight != self.weight:
            raise ValueError(f"`reward.weight={self.weight!r}` must be a finite number.")
