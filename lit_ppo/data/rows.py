"""Reading and checking prompts, without a tokenizer: every error names the file, the line and what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Prompt:
    """One prompt of a set."""

    where: str
    """Its place in the source, for messages."""
    text: str
    """The prompt as given, or what its chat template made of it."""
    messages: list[dict[str, Any]] | None
    """The chat, if it is one."""
    columns: dict[str, Any]
    """The other columns of its row."""
    ids: list[int] = field(default_factory=list)
    """Its tokens, once it is tokenized."""


def read_rows(source: Any, name: str, encoding: str = "utf-8") -> list[tuple[str, Any]]:
    """Return (place, row) for each row of a JSONL file or of a list.

    Args:
        source: A path, or the rows themselves.
        name: The option that the source was given as.
        encoding: Of the file.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line that is not JSON, or that the encoding cannot read.
        TypeError: Neither a path nor rows.
    """
    if isinstance(source, str | os.PathLike):
        return _read_jsonl(os.fspath(source), name, encoding)
    if isinstance(source, dict) or not isinstance(source, Iterable):
        raise TypeError(f"`{name}` must be a path to a JSONL file or a list of rows, got {_short(source)}.")
    return [(f"`{name}[{i}]`", row) for i, row in enumerate(source)]


def parse_rows(rows: Iterable[tuple[str, Any]], name: str, prompt_column: str = "prompt") -> list[Prompt]:
    """Find the prompt of each row and check it.

    Raises:
        ValueError: No rows, or a row without a usable prompt.
        TypeError: A row that is neither a string nor a dict.
    """
    prompts = [_parse(row, where, prompt_column) for where, row in rows]
    if not prompts:
        raise ValueError(f"`{name}` has no prompts: it is empty. Give at least one row.")
    return prompts


def _read_jsonl(path: str, name: str, encoding: str) -> list[tuple[str, Any]]:
    if not os.path.isfile(path):
        what = "a folder, not a file" if os.path.isdir(path) else "not a file"
        raise FileNotFoundError(
            f"`{name}={path!r}` is {what} (looked in {os.getcwd()}). Give the path of a JSONL file or a list."
        )
    with open(path, "rb") as file:
        lines = _decode(file.read(), path, encoding).split("\n")  # splitlines would also split at U+2028, within a text
    rows = []
    for number, line in enumerate(lines, 1):
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
                f"{where} is not JSON ({why}{at}): {_short(line)}. Write one object a line.{hint}"
            ) from error
        rows.append((where, row))
    if not rows:
        raise ValueError(f"`{name}={path!r}` has no prompts: the file is empty. Write one JSON object a line.")
    return rows


def _decode(data: bytes, path: str, encoding: str) -> str:
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


def _parse(row: Any, where: str, prompt_column: str) -> Prompt:
    if isinstance(row, str):
        row = {prompt_column: row}
    if not isinstance(row, dict):
        raise TypeError(
            f"{where} is neither a string nor an object: {_short(row)}. Write a prompt, or an object with "
            f"the prompt in `{prompt_column}`."
        )
    if prompt_column not in row:
        raise ValueError(
            f"{where} has no column `{prompt_column}`; it has {', '.join(map(repr, row)) or 'none'}. Set "
            "`prompt_column` to the one with the prompt."
        )
    value = row[prompt_column]
    columns = {key: column for key, column in row.items() if key != prompt_column}
    if isinstance(value, str) and value:
        return Prompt(where, value, None, columns)
    if isinstance(value, list) and value:
        for number, message in enumerate(value):
            _check_message(message, f"{where}: message {number} of `{prompt_column}`")
        return Prompt(where, "", value, columns)
    if value in ("", []):
        raise ValueError(f"{where}: `{prompt_column}` is empty. Remove the row or give it a prompt.")
    raise ValueError(f"{where}: `{prompt_column}` is neither a string nor a list of chat messages: {_short(value)}.")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f'{where} is not an object: {_short(message)}. Write {{"role": "user", "content": "..."}}.')
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            state = (
                f"is {_short(message[key])}"
                if key in message
                else f"is missing (it has {', '.join(map(repr, message))})"
            )
            raise ValueError(f"{where}: `{key}` {state}. It must be a string.")


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 80 else f"{type(value).__name__} {text[:77]}..."
