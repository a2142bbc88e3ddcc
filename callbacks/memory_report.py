"""Who holds the memory, printed and logged, and how busy the device is."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lit_ppo.callbacks._common import check_flags
from lit_ppo.memory.ledger import GIB, KINDS, Ledger, Use, caches_of, device_use, process_use, take

_EVENTS = 200_000
"""Allocations and frees that a snapshot looks back on."""

_SAMPLE_EVERY = 0.2
"""Seconds between two looks at how busy the device is; the driver's own window is 1/6 to 1 second."""


class MemoryReport(Callback):
    """Prints who holds the memory, by role and by phase, at the start and the end of a fit, and logs it meanwhile.

    Works on any LightningModule. One that has `roles`, `phase_listeners` and `memory_bytes()` (see
    `lit_ppo.memory.ledger`), as `PPOLightningModule` does, gets rows by role and by phase; for others the rows are the
    child modules, and a training step is the only phase. What is logged is the largest over all ranks, but roles
    and `gpu/busy`, which like the tables are rank 0's.

    Args:
        by_role: Log the bytes of each role in every iteration, too.
        table: Print the tables.
        snapshot: A file for PyTorch's memory visualizer (https://pytorch.org/memory_viz), written after the iteration
            with the highest peak so far, and at an out-of-memory. CUDA only. Recording costs some speed.

    Raises:
        ValueError: A bad argument, or a snapshot of a device that is not CUDA.

    Metrics, logged in every iteration:
        - `memory/allocated_gib`: in tensors between iterations; on the CPU left out.
        - `memory/reserved_gib`, `memory/fragmentation_gib`, `memory/others_gib`: taken by the process, taken and not
          allocated, taken by other processes and by contexts. CUDA only.
        - `memory/<phase>_peak_gib`: where the module does not log it; without phases `memory/step_peak_gib`. CUDA only.
        - `memory/host_gib`: resident memory of the process.
        - `memory/role/<name>_gib`: with `by_role`.
        - `gpu/busy`: share of the time in which a kernel ran. Needs the package `nvidia-ml-py`.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo.callbacks import MemoryReport
        >>> trainer = Trainer(callbacks=[MemoryReport(by_role=True)], logger=False)
    """

    def __init__(self, by_role: bool = False, table: bool = True, snapshot: str | None = None) -> None:
        super().__init__()
        check_flags("MemoryReport", by_role=by_role, table=table)
        if snapshot is not None and (not isinstance(snapshot, (str, os.PathLike)) or not str(snapshot).strip()):
            raise ValueError(f"`MemoryReport(snapshot={snapshot!r})` must be the name of a file, or None.")
        self.by_role, self.table = by_role, table
        self.snapshot = None if snapshot is None else Path(snapshot)
        self.peaks: dict[str, Use] = {}
        """By phase, the use of the device when its peak was highest."""
        self._module: Any = None
        self._phase: str | None = None
        self._iteration: dict[str, Use] = {}  # of this iteration, by phase
        self._ours: set[str] = set()  # the peaks that the module does not log
        self._worst, self._recording = 0, False
        self._resting: list[int] = []  # bytes after the first iteration and after the last
        self._busy: _Busy | None = None

    # ------------------------------------------------------------------------------------------- attach and detach

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Measure the loading from here."""
        device = trainer.strategy.root_device
        if self.snapshot is not None and device.type != "cuda":
            raise ValueError(
                f"`MemoryReport(snapshot={str(self.snapshot)!r})` records CUDA memory, and this run is on {device}. "
                "Leave it out."
            )
        if stage != "fit":
            return
        self.peaks, self._iteration, self._worst, self._resting = {}, {}, 0, []
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if self.snapshot is not None:
            self.snapshot.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
            self._recording = True

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the module's phases; the loading has ended."""
        self._keep("load", device_use(pl_module.device))
        self._module, self._phase = pl_module, None
        listeners = getattr(pl_module, "phase_listeners", None)
        if listeners is not None and self._on_phase not in listeners:
            listeners.append(self._on_phase)
        if pl_module.device.type == "cuda":
            self._busy = _Busy(pl_module.device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what is there before the first step."""
        if self.table and trainer.is_global_zero:
            _print(_by_role(take(pl_module), "memory before the first step"))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what is there after the last step, and the peak of each phase."""
        self._end_of("save")
        if self.table and trainer.is_global_zero:
            _print(_by_role(take(pl_module), "memory after the last step"), _by_phase(self.peaks), self._growth())

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop listening and recording."""
        listeners = getattr(pl_module, "phase_listeners", [])
        if self._on_phase in listeners:
            listeners.remove(self._on_phase)
        if self._busy is not None:
            self._busy.stop()
        self._module = self._busy = None
        if self._recording:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recording = False

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the snapshot of an out-of-memory error."""
        if self._recording and isinstance(exception, (MemoryError, torch.OutOfMemoryError)):
            self._write_snapshot(trainer.global_rank)
        self.teardown(trainer, pl_module, "fit")

    # ------------------------------------------------------------------------------------------------- an iteration

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measure a step from here."""
        self._end_of("save")
        self._iteration = {}
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what is in use."""
        if not self._iteration:
            self._end_of("step", begun=True)
        device = pl_module.device
        now, values = device_use(device), {"host": process_use()[0]}
        if device.type == "cuda":
            values |= {"allocated": now.allocated, "reserved": now.reserved, "others": now.others}
            values["fragmentation"] = Ledger(device, [], caches_of(pl_module), now).fragmentation
            peaks = {f"{phase}_peak": use.peak for phase, use in self._iteration.items()}
            self._ours |= {name for name in peaks if f"memory/{name}_gib" not in trainer.callback_metrics}
            values |= {name: n for name, n in peaks.items() if name in self._ours}
        self._log(trainer, pl_module, {f"memory/{name}_gib": n / GIB for name, n in values.items()}, largest=True)
        own = {f"memory/role/{r.name}_gib": r.total / GIB for r in take(pl_module).rows} if self.by_role else {}
        if self._busy is not None and (busy := self._busy.share()) is not None:
            own["gpu/busy"] = busy
        self._log(trainer, pl_module, own)
        self._resting = [*self._resting[:1], now.allocated]
        worst = max((use.peak for use in self._iteration.values()), default=0)
        if self.snapshot is not None and worst > 1.01 * self._worst:
            self._worst = worst
            self._write_snapshot(trainer.global_rank)

    @staticmethod
    def _log(trainer: Trainer, module: LightningModule, values: dict[str, float], *, largest: bool = False) -> None:
        """Log this rank's values, or the largest over the ranks, which must all have the same names."""
        module.log_dict(
            values,
            logger=trainer.logger is not None,
            on_step=True,
            on_epoch=False,
            reduce_fx="max",
            sync_dist=largest and trainer.world_size > 1,
            batch_size=1,
        )

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Measure the saving from here: to the next step, or the end."""
        self._phase = "save"
        if pl_module.device.type == "cuda" and self._module is not None:
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def _on_phase(self, phase: str | None) -> None:
        """Note the peak of a phase that ends; called by the module."""
        if self._module is None:
            return
        if phase is None:
            self._end_of(self._phase)
            return
        self._end_of("save")
        trainer = self._module.trainer
        self._phase = phase if trainer.training and not trainer.sanity_checking else "validation"
        if self._module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._module.device)

    def _end_of(self, phase: str | None, *, begun: bool = False) -> None:
        """Note the peak of that phase, if it is the one that has begun."""
        if phase is None or (self._phase != phase and not begun) or self._module is None:
            return
        self._phase = None
        use = device_use(self._module.device)
        self._keep(phase, use)
        if phase not in ("save", "validation"):
            self._iteration[phase] = use

    def _keep(self, phase: str, use: Use) -> None:
        if phase not in self.peaks or use.peak > self.peaks[phase].peak:
            self.peaks[phase] = use

    def _growth(self) -> str:
        """Say how much more is in use after the last iteration than after the first."""
        if len(self._resting) < 2:
            return ""
        first, last = self._resting
        return f"Between iterations {first / GIB:.2f} GiB were in use after the first, {last / GIB:.2f} after the last."

    def _write_snapshot(self, rank: int) -> None:
        assert self.snapshot is not None
        path = self.snapshot if rank == 0 else self.snapshot.with_suffix(f".rank{rank}{self.snapshot.suffix}")
        part = path.with_name(path.name + ".part")
        try:
            torch.cuda.memory._dump_snapshot(str(part))
            os.replace(part, path)
        except (OSError, RuntimeError) as error:
            rank_zero_warn(f"MemoryReport: the snapshot {str(path)!r} could not be written: {error}.")


class _Busy:
    """Looks at the device's utilization every now and then, in a thread of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: list[int] = []
        self._end = threading.Event()
        try:
            torch.cuda.utilization(device)
        except Exception as error:  # no NVML bindings, or a driver that does not tell
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            rank_zero_info(f"MemoryReport: `gpu/busy` is not logged ({reason}); it needs the package nvidia-ml-py.")
            return
        threading.Thread(target=self._look, name="lit-ppo gpu/busy", daemon=True).start()

    def _look(self) -> None:
        while not self._end.wait(_SAMPLE_EVERY):
            try:
                self.seen.append(torch.cuda.utilization(self.device))
            except Exception:  # the driver is being shut down
                return

    def share(self) -> float | None:
        """Return the mean share since the last call, or None where nothing was seen."""
        seen, self.seen = self.seen, []
        return sum(seen) / len(seen) / 100 if seen else None

    def stop(self) -> None:
        """End the thread."""
        self._end.set()


def _by_role(ledger: Ledger, title: str) -> Any:
    """Return the table of a ledger: a row for each role and each thing that nobody's role is."""
    table = _table(f"{title} ({ledger.device})", ("GiB", *KINDS, "total"))
    for row in ledger.rows:
        table.add_row(row.name, *(_gib(getattr(row, kind)) for kind in (*KINDS, "total")))
    rows = dict(ledger.caches)
    if ledger.use.device:
        rows |= {"activations and the rest": ledger.rest, "allocated": ledger.use.allocated}
        rows |= {"reserved": ledger.use.reserved, "fragmentation": ledger.fragmentation}
        rows |= {"other processes": ledger.use.others, "free": ledger.use.free, "device": ledger.use.device}
    else:
        rows |= {"this process": ledger.use.allocated}
    for name, size in rows.items():
        table.add_row(name, *[""] * len(KINDS), _gib(size))
    return table


def _by_phase(peaks: dict[str, Use]) -> Any:
    """Return the table of the phases' peaks."""
    reserves = any(use.device for use in peaks.values())
    table = _table("peaks by phase", ("GiB", "allocated", *(("reserved",) if reserves else ())))
    for phase, use in peaks.items():
        table.add_row(phase, _gib(use.peak), *((_gib(use.peak_reserved),) if reserves else ()))
    return table


def _table(title: str, columns: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i)
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.3f}" if size else ""


def _print(*parts: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)  # a log file: cut no names
    for part in parts:
        if part:
            console.print(part, highlight=False)
