"""Progress inside a PPO iteration, which Lightning's bar sees as one long step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from typing_extensions import override


class RolloutProgress(Callback):
    """Show the phase of the iteration and its last tokens per second, reward and KL beside the progress bar.

    Works with Lightning's tqdm and rich bars, and does nothing without one. `PPOLightningModule` adds it by itself; any
    module that has `phase_listeners` (called with a phase's name, or None at its end) can use it.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._module: Any = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the bar and listen to phases."""
        self._bar, self._module = trainer.progress_bar_callback, pl_module
        listeners = getattr(pl_module, "phase_listeners", None)
        if listeners is not None and self.show not in listeners:
            listeners.append(self.show)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop listening."""
        listeners = getattr(pl_module, "phase_listeners", [])
        if self.show in listeners:
            listeners.remove(self.show)

    def show(self, phase: str | None) -> None:
        """Put the phase on the bar; called at each change."""
        if phase is None or self._module is None or not self._module.trainer.is_global_zero:
            return
        if self._module.trainer.sanity_checking or not self._module.trainer.training:
            return
        text = self.describe(phase)
        bar = self._bar
        if isinstance(bar, TQDMProgressBar) and not bar.is_disabled:
            bar.train_progress_bar.set_postfix_str(text)
        elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
            task = bar.progress.tasks[bar.train_progress_bar_id]
            title = task.description.split(" · ")[0]
            bar.progress.update(bar.train_progress_bar_id, description=f"{title} · {text}")
            bar.refresh()

    def describe(self, phase: str) -> str:
        """Return what is shown: the phase, and the last iteration's figures once there are some."""
        known = self._module.trainer.callback_metrics
        parts = [phase]
        for name, label, form in (
            ("rollout/tokens_per_s", "tok/s", ",.0f"),
            ("objective/scores", "reward", ".3f"),
            ("objective/kl", "kl", ".2f"),
        ):
            if name in known:
                parts.append(f"{label} {float(known[name]):{form}}")
        return ", ".join(parts)
