"""Prompt sets in other forms than JSONL: the same rows, and errors that name the place."""

from __future__ import annotations

import builtins
import csv
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_ppo import PromptDataModule
from lit_ppo.data.rows import read_rows

ROWS = [
    {"prompt": "one, two", "answer": "3"},
    {"prompt": 'say "four"\nand five', "answer": ""},
    {"prompt": "café\u2028", "answer": "6"},
]
CHATS = [
    {"prompt": [{"role": "user", "content": "w1"}], "n": 1},
    {"prompt": [{"role": "user", "content": "w2"}], "n": 2},
]


def rows_of(source, **options):
    return [row for _, row in read_rows(source, "train", **options)]


def write_csv(path: Path, rows: list[dict], delimiter: str = ",") -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.mark.parametrize(("name", "delimiter"), [("p.csv", ","), ("p.TSV", "\t")])
def test_a_table_of_text_gives_its_rows(tmp_path, name, delimiter):
    path = write_csv(tmp_path / name, ROWS, delimiter)
    assert rows_of(path) == ROWS
    assert [place for place, _ in read_rows(path, "train")] == [f"{path}, line {n}" for n in (2, 4, 5)]
    data = PromptDataModule(path)
    assert [p.columns for p in data._sets["train"]] == [{"answer": row["answer"]} for row in ROWS]


def test_a_csv_file_may_have_an_encoding_a_mark_blank_lines_and_long_values(tmp_path):
    path = str(tmp_path / "p.csv")
    Path(path).write_bytes("\ufeffprompt , answer\r\n\r\na,b\r\n".encode())
    assert rows_of(path) == [{"prompt": "a", "answer": "b"}]
    Path(path).write_text("prompt\ncafé\n", encoding="latin-1")
    assert rows_of(path, encoding="latin-1") == [{"prompt": "café"}]
    with pytest.raises(ValueError, match="line 2: byte 0xe9"):
        rows_of(path)
    before = csv.field_size_limit()
    Path(path).write_text("prompt\n" + "x" * (before + 1) + "\n")
    assert len(rows_of(path)[0]["prompt"]) == before + 1
    assert csv.field_size_limit() == before


@given(st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"))] * 2)))
def test_any_text_survives_csv(tmp_path_factory, values):
    rows = [{"prompt": a + "x", "b": b} for a, b in values] or [{"prompt": "x", "b": ""}]
    assert rows_of(write_csv(tmp_path_factory.mktemp("csv") / "p.csv", rows)) == rows


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"`train='.*p.csv'` has no rows: it is empty"),
        ("prompt\n", r"has no rows: it is empty"),
        ("prompt,prompt\na,b\n", r"p.csv, line 1 has two columns `prompt`"),
        (",prompt\n0,b\n", r"p.csv, line 1 has a column without a name"),
        ("prompt,answer\na\n", r"p.csv, line 2 has 1 values for 2 columns \(prompt, answer\)"),
        ("prompt\na\nb,c\n", r"p.csv, line 3 has 2 values for 1 columns"),
        ('prompt\n"a\n', r"p.csv, line 2: unexpected end of data. Write a value that holds a quote"),
    ],
)
def test_tables_that_cannot_be_right_are_refused(tmp_path, text, match):
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(ValueError, match=match):
        PromptDataModule(str(tmp_path / "p.csv"))


def test_parquet_gives_its_rows_and_chats(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = str(tmp_path / "p.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(CHATS), path)
    assert rows_of(path) == CHATS
    assert [p.messages for p in PromptDataModule(path)._sets["train"]] == [row["prompt"] for row in CHATS]
    assert rows_of(pyarrow.Table.from_pylist(CHATS)) == CHATS
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}]), path)
    with pytest.raises(ValueError, match=r"p.parquet, row 0 has no column `prompt`; it has 'text'"):
        PromptDataModule(path)
    Path(path).write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"p.parquet cannot be read as Parquet"):
        PromptDataModule(path)


def test_hugging_face_datasets_on_disk_and_in_memory(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(CHATS), "test": datasets.Dataset.from_list(ROWS)}
    )
    splits.save_to_disk(tmp_path / "set")
    assert rows_of(str(tmp_path / "set" / "train")) == CHATS
    assert rows_of(splits["test"]) == ROWS
    assert len(PromptDataModule(splits["train"], val=splits["test"])._sets["val"]) == 3
    with pytest.raises(ValueError, match=r"holds several splits. Give one of them: '.*test' or '.*train'"):
        rows_of(str(tmp_path / "set"))
    with pytest.raises(ValueError, match=r"`train` is a dataset with the splits 'train', 'test'"):
        rows_of(splits)
    (tmp_path / "set" / "train" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot be read as a dataset"):
        rows_of(str(tmp_path / "set" / "train"))


def test_a_dataset_of_the_hub_is_asked_for_by_name_configuration_and_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*where, split):
        asked.append((*where, split))
        if "nothing" in where[0]:
            raise ConnectionError("Couldn't reach it")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)  # the hub itself is out of a test's reach
    for source in ("hf:owner/name", "hf:owner/name:test[:10%]", "hf:owner/name/main:test", "hf:name"):
        assert rows_of(source) == ROWS
    assert asked == [
        ("owner/name", "train"),
        ("owner/name", "test[:10%]"),
        ("owner/name", "main", "test"),
        ("name", "train"),
    ]
    with pytest.raises(ValueError, match=r"`train='hf:owner/nothing'` cannot be loaded: Couldn't reach it. Check name"):
        rows_of("hf:owner/nothing")
    for source in ("hf:", "hf:a//b", "hf:a/b/c/d"):
        with pytest.raises(ValueError, match="must be `hf:owner/name`"):
            rows_of(source)


def test_a_data_frame_gives_its_rows():
    pandas = pytest.importorskip("pandas")
    assert rows_of(pandas.DataFrame(ROWS)) == ROWS


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "pyarrow":
            raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("importlib.import_module", without)
    (tmp_path / "p.parquet").write_bytes(b"")
    with pytest.raises(ModuleNotFoundError, match=r"needs the package `pyarrow`.*Run `pip install pyarrow`"):
        rows_of(str(tmp_path / "p.parquet"))


def test_jsonl_stays_what_a_file_is_read_as(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(map(json.dumps, ROWS)))
    assert rows_of(tmp_path / "prompts.txt") == ROWS
