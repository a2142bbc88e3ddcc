"""Reading and checking prompts, without a tokenizer: every error names the file, the line and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lit_ppo.data.formats import FILES, HUB, Rows, from_memory, read_folder, read_hub, read_jsonl, short


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


def read_rows(source: Any, name: str, encoding: str = "utf-8") -> Rows:
    """Return (place, row) for each row of a file, a dataset or a list.

    Args:
        source: A path to a JSONL, CSV, TSV or Parquet file or to a folder that Hugging Face's `save_to_disk` wrote;
            `hf:owner/name:split`; or the rows themselves: a list, a Hugging Face dataset, a DataFrame, an Arrow table.
        name: The option that the source was given as.
        encoding: Of a text file.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Something in it that cannot be read, or no rows.
        TypeError: Neither a path nor rows.
        ModuleNotFoundError: The package that reads this kind is not installed.
    """
    if not isinstance(source, str | os.PathLike):
        return [(f"`{name}[{i}]`", row) for i, row in enumerate(from_memory(source, name))]
    path = os.fspath(source)
    if path.startswith(HUB):
        rows = read_hub(path, name)
    elif os.path.isdir(path):
        rows = read_folder(path, name)
    elif not os.path.isfile(path):
        raise FileNotFoundError(
            f"`{name}={path!r}` is not a file (looked in {os.getcwd()}). Give the path of a JSONL, CSV or Parquet "
            "file, `hf:owner/name` for a dataset of the hub, or a list."
        )
    else:
        rows = FILES.get(os.path.splitext(path)[1].lower(), read_jsonl)(path, encoding)
    if not rows:
        raise ValueError(f"`{name}={path!r}` has no rows: it is empty. Give at least one.")
    return rows


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


def _parse(row: Any, where: str, prompt_column: str) -> Prompt:
    if isinstance(row, str):
        row = {prompt_column: row}
    if not isinstance(row, dict):
        raise TypeError(
            f"{where} is neither a string nor an object: {short(row)}. Write a prompt, or an object with "
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
            check_message(message, f"{where}: message {number} of `{prompt_column}`")
        return Prompt(where, "", value, columns)
    if value in ("", []):
        raise ValueError(f"{where}: `{prompt_column}` is empty. Remove the row or give it a prompt.")
    raise ValueError(f"{where}: `{prompt_column}` is neither a string nor a list of chat messages: {short(value)}.")


def check_message(message: Any, where: str) -> None:
    """Check that a chat message has a role and a content, both strings."""
    if not isinstance(message, dict):
        raise ValueError(f'{where} is not an object: {short(message)}. Write {{"role": "user", "content": "..."}}.')
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            state = (
                f"is {short(message[key])}"
                if key in message
                else f"is missing (it has {', '.join(map(repr, message))})"
            )
            raise ValueError(f"{where}: `{key}` {state}. It must be a string.")
