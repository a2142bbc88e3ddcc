"""Samples beside the curves: what the model writes, in tables of W&B, text of TensorBoard, or a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

Row = dict[str, Any]


class SampleTable(Callback):
    """Logs samples: prompt, response, scores and whatever else the module says of them.

    A logger that has tables (`log_table(key, columns, data, step)`, as W&B's) gets a table, TensorBoard a text; for all
    others, and where there is no logger, rows are appended to `samples.jsonl` in the logger's folder.

    Works on any LightningModule that has `samples`: a list of dicts, the last batch's rows, set in training and
    validation steps. `PPOLightningModule` has. Only rank 0's are logged.

    Args:
        every_n: Log training samples in every so many iterations; 0: never.
        rows: At most so many of a batch.
        validation: Also log those of the first validation batch, which are the same prompts each time.
        columns: Only these, in this order; None: all.

    Raises:
        ValueError: A bad argument, a module without `samples`, or a column that no sample has.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> from lit_ppo.callbacks import SampleTable
        >>> trainer = Trainer(callbacks=[SampleTable(every_n=10, rows=4)], logger=False)
    """

    def __init__(
        self, every_n: int = 1, rows: int = 8, validation: bool = True, columns: Iterable[str] | None = None
    ) -> None:
        super().__init__()
        for name, value, low in (("every_n", every_n, 0), ("rows", rows, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"`SampleTable({name}={value!r})` must be a whole number, {low} or more.")
        if not isinstance(validation, bool):
            raise ValueError(f"`SampleTable(validation={validation!r})` must be True or False.")
        if not every_n and not validation:
            raise ValueError("`SampleTable(every_n=0, validation=False)` would log nothing.")
        self.every_n, self.rows, self.validation = every_n, rows, validation
        self.columns = None if columns is None else [columns] if isinstance(columns, str) else list(columns)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the module says what it sampled."""
        if not isinstance(getattr(pl_module, "samples", None), list):
            raise ValueError(
                f"`SampleTable` reads `{type(pl_module).__name__}.samples`, a list of dicts that training and "
                "validation steps set, and there is none. Set it to [] in `__init__`, and to the rows in the steps."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the iteration's samples."""
        if self.every_n and step_of(trainer) % self.every_n == 0:
            self.show(trainer, pl_module, "train")

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log the samples of the first batch."""
        if self.validation and batch_idx == 0 and dataloader_idx == 0 and not trainer.sanity_checking:
            self.show(trainer, pl_module, "val")

    def show(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Send the module's samples to every logger.

        Args:
            trainer: Has the loggers.
            pl_module: Has the samples.
            stage: `train` or `val`; part of the name.
        """
        samples: list[Row] = pl_module.samples[: self.rows]  # type: ignore[assignment, index]
        if not trainer.is_global_zero or not samples:
            return
        names = list(dict.fromkeys(name for row in samples for name in row))
        if self.columns is not None:
            for name in self.columns:
                if name not in names:
                    raise ValueError(
                        f"`SampleTable(columns={self.columns!r})`: no sample has {name!r}; they have "
                        f"{', '.join(map(repr, names))}."
                    )
            names = self.columns
        rows = [{name: row.get(name) for name in names} for row in samples]
        step, filed = step_of(trainer), False
        for logger in trainer.loggers:
            writer: Any = getattr(logger, "experiment", None)
            if hasattr(logger, "log_table"):
                cells = [[_cell(value) for value in row.values()] for row in rows]
                logger.log_table(f"samples/{stage}", columns=names, data=cells, step=step)
            elif hasattr(writer, "add_text"):
                writer.add_text(f"samples/{stage}", markdown(rows), step)
            elif not filed:
                folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
                self._append(Path(folder or trainer.default_root_dir), rows, stage, step)
                filed = True
        if not trainer.loggers:
            self._append(Path(trainer.default_root_dir), rows, stage, step)

    def _append(self, folder: Path, rows: list[Row], stage: str, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            for row in rows:
                line = {"step": step, "stage": stage, **row}
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")


def step_of(trainer: Trainer) -> int:
    """Return the x axis at which Lightning logs training metrics: of PPO, the iteration."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def markdown(rows: list[Row]) -> str:
    """Return rows as a Markdown table.

    Args:
        rows: Dicts of the same keys.
    """

    def line(cells: Iterable[Any]) -> str:
        texts = (f"{cell:.3g}" if isinstance(cell, float) else str(_cell(cell)) for cell in cells)
        return (
            "| " + " | ".join(" ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") for text in texts) + " |"
        )

    return "\n".join([line(rows[0]), "|" + "---|" * len(rows[0]), *(line(row.values()) for row in rows)])


def _cell(value: Any) -> Any:
    """Return what a table can hold: numbers, switches and texts as they are, the rest as text."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
