"""Samples in tables, in TensorBoard and in files, of PPO and of any module that has `samples`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lit_ppo import OptimConfig, PPOConfig, PPOLightningModule, PromptDataModule, SamplingConfig
from lit_ppo.callbacks import SampleTable
from lit_ppo.callbacks.sample_table import markdown


class Tables(DummyLogger):
    """A logger with W&B's way of taking tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[str], list[list[Any]], int]] = []

    def log_table(self, key, columns=None, data=None, dataframe=None, step=None):
        self.tables.append((key, columns, data, step))


def run(tmp_path: Path, callback: SampleTable, logger: Any, **options: Any) -> PPOLightningModule:
    module = PPOLightningModule(
        tiny.folder(),
        reward=tiny.count_w1,
        sampling=SamplingConfig(max_new_tokens=4, temperature=1.0),
        ppo=PPOConfig(epochs=1),
        optim=OptimConfig(actor_lr=1e-3),
    )
    rows = [{"prompt": row, "tags": ["a", i]} for i, row in enumerate(tiny.rows())]
    data = PromptDataModule(rows, val=rows[:6], batch_size=4, val_batch_size=3)
    tiny.fit(tmp_path, module, data, callbacks=[callback], logger=logger, log_every_n_steps=1, **options)
    return module


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_csv_logger_gets_a_file_beside_its_metrics(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    run(tmp_path, SampleTable(every_n=2, rows=3), logger, num_sanity_val_steps=2)
    rows = lines(tmp_path / "samples.jsonl")
    assert [(r["step"], r["stage"]) for r in rows] == [(0, "train")] * 3 + [(2, "train")] * 3 + [(3, "val")] * 3
    assert {"prompt", "response", "stopped", "reward", "reward/count_w1", "tags"} <= rows[0].keys()
    assert rows[0]["tags"][0] == "a"
    with (tmp_path / "metrics.csv").open() as file:
        metrics = list(csv.DictReader(file))
    trained = {int(m["step"]): m for m in metrics if m["objective/kl"]}
    assert {0, 2} <= trained.keys(), "samples and metrics share their x axis"
    assert [int(m["step"]) for m in metrics if m["val/reward"]] == [3]


def test_a_logger_with_tables_gets_tables(tmp_path):
    logger = Tables()
    run(tmp_path, SampleTable(rows=2, columns=["response", "tags", "reward"]), logger)
    assert [(key, step) for key, _, _, step in logger.tables] == [("samples/train", i) for i in range(4)] + [
        ("samples/val", 3)
    ]
    _, columns, data, _ = logger.tables[0]
    assert columns == ["response", "tags", "reward"]
    assert len(data) == 2
    assert data[0][1].startswith('["a", ')  # a table's cells are texts and numbers
    assert isinstance(data[0][2], float)
    assert not (tmp_path / "samples.jsonl").exists()


def test_tensorboard_gets_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="")
    run(tmp_path, SampleTable(every_n=0), logger)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["tensors"] == ["samples/val/text_summary"]
    (event,) = events.Tensors("samples/val/text_summary")
    assert event.step == 3
    assert event.tensor_proto.string_val[0].decode().startswith("| tags | prompt | response | stopped | reward |")


def test_without_a_logger_there_is_a_file(tmp_path):
    run(tmp_path, SampleTable(validation=False), False)
    assert len(lines(tmp_path / "samples.jsonl")) == 16


class Plain(LightningModule):
    """Any module; `samples` may be missing."""

    def __init__(self, samples: list[dict[str, Any]] | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        if samples is not None:
            self.samples = samples

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(2, 1))


def test_any_module_with_samples(tmp_path):
    module = Plain([{"prompt": "a", "response": "b"}, {"prompt": "c", "score": torch.tensor(1)}])
    tiny.trainer(tmp_path, callbacks=[SampleTable()]).fit(module)
    rows = lines(tmp_path / "samples.jsonl")
    assert len(rows) == 4
    assert rows[1] == {"step": 0, "stage": "train", "prompt": "c", "response": None, "score": "tensor(1)"}
    empty = Plain([])
    tiny.trainer(tmp_path / "empty", callbacks=[SampleTable()]).fit(empty)
    assert not (tmp_path / "empty" / "samples.jsonl").exists()


def test_what_cannot_be_logged_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`SampleTable` reads `Plain.samples`, a list of dicts"):
        tiny.trainer(tmp_path, callbacks=[SampleTable()]).fit(Plain(None))
    with pytest.raises(ValueError, match=r"no sample has 'answer'; they have 'prompt'"):
        tiny.trainer(tmp_path, callbacks=[SampleTable(columns="answer")]).fit(Plain([{"prompt": "a"}]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every_n": -1}, r"`SampleTable\(every_n=-1\)` must be a whole number, 0 or more"),
        ({"rows": 0}, r"`SampleTable\(rows=0\)` must be a whole number, 1 or more"),
        ({"rows": True}, r"must be a whole number"),
        ({"validation": "yes"}, r"must be True or False"),
        ({"every_n": 0, "validation": False}, r"would log nothing"),
    ],
)
def test_bad_arguments(options, match):
    with pytest.raises(ValueError, match=match):
        SampleTable(**options)


def test_a_table_stays_a_table_whatever_the_texts_hold():
    text = markdown([{"a": "x|y\nz", "b": 0.123456, "c": None}, {"a": "<b>", "b": 2, "c": [1]}])
    assert text == "| a | b | c |\n|---|---|---|\n| x\\|y z | 0.123 | None |\n| &lt;b> | 2 | [1] |"
