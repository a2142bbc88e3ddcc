"""Tables on disk and on the hub as rows: JSONL, CSV, Parquet, Hugging Face datasets. What reads them is imported here.

Every error names the file, the place in it, the cause and the fix.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

Rows = list[tuple[str, Any]]
"""(place, row) of each row; the place is for messages."""

HUB = "hf:"
"""What a source on the hub starts with."""


def read_jsonl(path: str, encoding: str) -> Rows:
    """Read one JSON value a line; empty lines do not count.

    Args:
        path: Of the file.
        encoding: Of its text.

    Raises:
        ValueError: A line that is not JSON, or that the encoding cannot read.
    """
    rows = []
    for number, line in enumerate(_text(path, encoding).split("\n"), 1):  # splitlines would split at U+2028, in a text
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line, object_pairs_hook=_no_duplicates)
        except ValueError as error:
            at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            why = error.msg if isinstance(error, json.JSONDecodeError) else error
            hint = f" It looks like another encoding than `encoding={encoding!r}`." if "\0" in line else ""
            raise ValueError(
                f"{where} is not JSON ({why}{at}): {short(line)}. Write one object a line.{hint}"
            ) from error
        rows.append((where, row))
    return rows


def read_csv(path: str, encoding: str, delimiter: str = ",") -> Rows:
    """Read a table of text whose first line names the columns. Every value is a string; quoted ones may have lines.

    Args:
        path: Of the file.
        encoding: Of its text.
        delimiter: Between the values.

    Raises:
        ValueError: No names, two of one name, a row with more or fewer values than names, or a quote that never ends.
    """
    old = csv.field_size_limit(2**31 - 1)  # texts may be long
    try:
        lines = csv.reader(io.StringIO(_text(path, encoding), newline=""), delimiter=delimiter, strict=True)
        table = []
        try:
            for values in lines:
                table.append((lines.line_num, values))
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {lines.line_num}: {error}. Write a value that holds a quote, a line break or "
                f"{delimiter!r} in double quotes, and its own quotes twice."
            ) from error
    finally:
        csv.field_size_limit(old)
    if not table:
        return []
    names = [name.strip() for name in table[0][1]]
    for name in names:
        if not name or names.count(name) > 1:
            what = f"has two columns `{name}`" if name else "has a column without a name"
            raise ValueError(f"{path}, line 1 {what}: {short(table[0][1])}. It names the columns: give each its own.")
    rows: Rows = []
    for number, values in table[1:]:
        if len(values) != len(names):
            if not values:
                continue  # an empty line
            raise ValueError(
                f"{path}, line {number} has {len(values)} values for {len(names)} columns ({', '.join(names)}). Quote "
                f"values that hold {delimiter!r}."
            )
        rows.append((f"{path}, line {number}", dict(zip(names, values, strict=True))))
    return rows


def read_tsv(path: str, encoding: str) -> Rows:
    """Read a table as `read_csv` does, with tabs between the values."""
    return read_csv(path, encoding, "\t")


def read_parquet(path: str, encoding: str) -> Rows:
    """Read a Parquet file.

    Args:
        path: Of the file.
        encoding: Means nothing here: the format says it.

    Raises:
        ValueError: It is none.
        ModuleNotFoundError: `pyarrow` is not installed.
    """
    parquet = _needs("pyarrow.parquet", path)
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are these
        raise ValueError(f"{path} cannot be read as Parquet: {_first_line(error)} Write it again.") from error
    return [(f"{path}, row {i}", row) for i, row in enumerate(table.to_pylist())]


FILES: dict[str, Callable[[str, str], Rows]] = {
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}
"""By the end of a file's name; any other is JSONL."""


def read_folder(path: str, name: str) -> Rows:
    """Read a dataset that Hugging Face's `save_to_disk` wrote.

    Args:
        path: Of the folder.
        name: The option that it was given as.

    Raises:
        ValueError: It has several splits, or cannot be read.
        FileNotFoundError: The folder holds no dataset.
        ModuleNotFoundError: `datasets` is not installed.
    """
    inside = sorted(os.listdir(path))
    if "dataset_dict.json" in inside:
        splits = [split for split in inside if os.path.isdir(os.path.join(path, split))]
        given = " or ".join(repr(os.path.join(path, split)) for split in splits)
        raise ValueError(f"`{name}={path!r}` holds several splits. Give one of them: {given}.")
    if "dataset_info.json" not in inside:
        raise FileNotFoundError(
            f"`{name}={path!r}` is a folder, and no dataset that `save_to_disk` wrote (it holds "
            f"{', '.join(inside[:8]) or 'nothing'}). Give a JSONL, CSV or Parquet file in it, or a list."
        )
    datasets = _needs("datasets", path)
    try:
        rows = datasets.load_from_disk(path)
    except Exception as error:
        raise ValueError(f"`{name}={path!r}` cannot be read as a dataset: {_first_line(error)}") from error
    return [(f"{path}, row {i}", row) for i, row in enumerate(rows)]


def read_hub(source: str, name: str) -> Rows:
    """Read a dataset of the Hugging Face hub, or of its cache.

    Args:
        source: `hf:owner/name`, then perhaps `/configuration`, then perhaps `:split`, which may be cut as in
            `train[:1000]`. Without a split it is `train`.
        name: The option that it was given as.

    Raises:
        ValueError: It cannot be loaded.
        ModuleNotFoundError: `datasets` is not installed.
    """
    address, _, split = source.removeprefix(HUB).partition(":")
    parts = address.split("/")
    if not 1 <= len(parts) <= 3 or not all(parts):
        raise ValueError(
            f"`{name}={source!r}` must be `hf:owner/name`, `hf:owner/name/configuration`, or end in `:split`."
        )
    datasets = _needs("datasets", source)
    try:
        rows = datasets.load_dataset("/".join(parts[:2]), *parts[2:], split=split or "train")
    except Exception as error:
        raise ValueError(
            f"`{name}={source!r}` cannot be loaded: {_first_line(error)} Check name, configuration and split (which "
            "is `train` unless you write another, as in `hf:owner/name:test`); offline, it must be in the cache."
        ) from error
    return [(f"{source}, row {i}", row) for i, row in enumerate(rows)]


def from_memory(source: Any, name: str) -> Iterable[Any]:
    """Return the rows of something that is in memory: a list, a Hugging Face dataset, a table of pandas or Arrow.

    Args:
        source: It.
        name: The option that it was given as.

    Raises:
        ValueError: A Hugging Face dataset with several splits.
        TypeError: Something without rows.
    """
    if hasattr(source, "to_pylist"):  # an Arrow table
        rows: Iterable[Any] = source.to_pylist()
        return rows
    if hasattr(source, "to_dict") and hasattr(source, "iterrows"):  # a DataFrame, which iterates over its columns
        rows = source.to_dict("records")
        return rows
    if isinstance(source, dict) and hasattr(source, "column_names"):
        raise ValueError(f"`{name}` is a dataset with the splits {', '.join(map(repr, source))}. Give one of them.")
    if isinstance(source, dict) or not isinstance(source, Iterable):
        raise TypeError(
            f"`{name}` must be a path to a JSONL, CSV or Parquet file, a dataset or a list of rows, "
            f"got {short(source)}."
        )
    return source


def short(value: Any) -> str:
    """Return a value's type and the start of it, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 80 else f"{type(value).__name__} {text[:77]}..."


def _needs(module: str, source: str) -> Any:
    from importlib import import_module

    package = module.split(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Reading {source!r} needs the package `{package}`, which is not installed. Run `pip install {package}`, "
            "or convert it to JSONL."
        ) from error


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
    return line if line.endswith((".", "!", "?")) else line + "."


def _text(path: str, encoding: str) -> str:
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = data.decode(encoding)
    except LookupError as error:
        raise ValueError(
            f"`encoding={encoding!r}` is unknown. Use a name such as 'utf-8', 'utf-16' or 'latin-1'."
        ) from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        looks = "'utf-16'" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "such as 'utf-16' or 'latin-1'"
        raise ValueError(
            f"{path}, line {line}: byte {data[error.start]:#04x} at offset {error.start} cannot be read with "
            f"`encoding={encoding!r}`. Set `encoding` to the file's own, {looks}, or convert the file."
        ) from error
    return text.removeprefix("\ufeff")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise ValueError(f"{key!r} stands twice in one object")
        row[key] = value
    return row
