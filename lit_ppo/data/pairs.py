"""Pairs of answers of which people prefer one, for a reward model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_ppo.data.encode import collate
from lit_ppo.data.formats import Rows, short
from lit_ppo.data.rows import Prompt, read_rows
from lit_ppo.data.sets import SetsDataModule, Source
from lit_ppo.data.turns import Messages, Turns, column, join, judged_tokens, text_or_chat
from lit_ppo.experience import Rollout, _Rows


def texts(ids: list[list[int]], index: Tensor, pad: int) -> Rollout:
    """Return whole texts as prompts with a response of one token that nobody reads.

    The value before that token is the value of the text.

    Args:
        ids: Tokens of B texts, perhaps of none.
        index: (B,) int64.
        pad: Id under the padding.
    """
    one = torch.ones(len(ids), dtype=torch.long)
    prompts = collate([Prompt("", "", None, {}, row) for row in ids], index, pad)
    return Rollout(prompts, one[:, None] * pad, one, one.bool(), torch.zeros(len(ids), 1))


@dataclass
class Pairs(_Rows):
    """B pairs of whole texts."""

    chosen: Rollout
    """The texts that are preferred, as `texts` makes them."""
    rejected: Rollout
    """The others."""
    margin: Tensor
    """(B,) float32: by how much the scores should differ at least."""
    real: Tensor
    """(B,) bool: False for a ghost, which no loss and no metric counts."""

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.margin)

    def part(self, rows: Tensor) -> Pairs:
        """Return the given pairs, trimmed; for none at all a ghost.

        Args:
            rows: (b,) int64 row numbers.
        """
        if len(rows):
            picked = self.select(rows)
            return replace(picked, chosen=picked.chosen.trim(), rejected=picked.rejected.trim())
        zero = self.margin.new_zeros(1)
        return Pairs(self.chosen.part(rows), self.rejected.part(rows), zero, zero.bool())


@dataclass
class Pair:
    """One pair of a set."""

    chosen: Turns
    rejected: Turns
    margin: float


class PreferenceDataModule(SetsDataModule):
    """Pairs of answers, one preferred to the other, from what `PromptDataModule` reads.

    A row is an object with the answers in `chosen` and `rejected`, and what they answer in `prompt`: texts, which are
    joined as they are, or chats. Where both answers are whole chats the prompt may be missing, or stand in both.

    Args:
        train: Pairs to train on.
        val: Held-out pairs.
        test: Pairs for `test`.
        reference: Answers whose scores will have the mean 0: rows with `prompt` and `answer`, chats in `messages`, or
            plain texts. None: the chosen answers of `train`.
        val_fraction: Hold out this share of `train` (below 1) or this many of its pairs (2 or more) as `val`.
        batch_size: Pairs of one optimizer step, over all ranks. A smaller set is taken whole.
        val_batch_size: As `batch_size`, for the other sets. None: as it.
        prompt_column: Where the prompt is.
        chosen_column: Where the preferred answer is.
        rejected_column: Where the other one is.
        margin_column: Where a pair says by how much its scores should differ at least (arXiv 2307.09288); None: by
            any amount.
        max_length: Longest prompt with answer, in tokens. None: any length.
        overlong: `drop` a pair with a longer text, or `cut` the text: its last tokens (and a BOS) stay, as where the
            model is used as a reward.
        shuffle: Train in a new order each epoch.
        seed: Of that order, and of the choice for `val_fraction`.
        drop_last: Leave the pairs that do not fill a batch out of the epoch.
        chat_template: Jinja text that replaces the chat template of the module's tokenizer, in exports too.
        encoding: Of text files.

    Raises:
        FileNotFoundError: A path that is not a file.
        ValueError: An option out of range or without effect, or a row that cannot be used; it names the line.
        TypeError: A set or row of another type.

    Example::

        trainer.fit(RewardModule("sft-model"), PreferenceDataModule("pairs.jsonl", val_fraction=0.1, batch_size=64))
    """

    what = "pairs"

    def __init__(
        self,
        train: Source = None,
        val: Source = None,
        test: Source = None,
        reference: Source = None,
        val_fraction: float = 0.0,
        batch_size: int = 64,
        val_batch_size: int | None = None,
        prompt_column: str = "prompt",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        margin_column: str | None = None,
        max_length: int | None = None,
        overlong: str = "drop",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        chat_template: str | None = None,
        encoding: str = "utf-8",
    ) -> None:
        self._columns = (prompt_column, chosen_column, rejected_column, margin_column)
        super().__init__(
            {"train": train, "val": val, "test": test},
            self._parse,
            {"batch_size": batch_size, "val_batch_size": val_batch_size, "max_length": max_length},
            val_fraction=val_fraction,
            limit="max_length",
            overlong=overlong,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            chat_template=chat_template,
            encoding=encoding,
        )
        pairs = [pair for items in self._sets.values() for pair in items]
        if chat_template is not None and all(pair.chosen.messages is None for pair in pairs):
            raise ValueError("`chat_template` has no effect: no pair is of chats.")
        self.max_length = max_length
        self._reference: list[Turns] | None = None
        self._referred: tuple[Any, list[Turns]] | None = None
        if reference is not None:
            rows = read_rows(reference, "reference", encoding)
            self._reference = [self._parse_reference(row, where) for where, row in rows]
            if not self._reference:
                raise ValueError("`reference` is empty. Give at least 2 answers, or leave it out.")

    def _parse(self, rows: Rows, name: str) -> list[Pair]:
        items = [self._parse_pair(row, where) for where, row in rows]
        if not items:
            raise ValueError(f"`{name}` is empty. Give at least one pair.")
        return items

    def _parse_pair(self, row: Any, where: str) -> Pair:
        prompt_column, *names, margin_column = self._columns
        answers = {}
        for name, option in zip(names, ("chosen_column", "rejected_column"), strict=True):
            answers[name] = text_or_chat(column(row, str(name), option, where), str(name), where)
        prompt: str | Messages = []
        if prompt_column in row or any(isinstance(answer, str) for answer in answers.values()):
            prompt = text_or_chat(
                column(row, str(prompt_column), "prompt_column", where), str(prompt_column), where, empty=True
            )
        chosen, rejected = (join(prompt, answer, where, str(name)) for name, answer in answers.items())
        if (chosen.prompt, chosen.answer, chosen.messages) == (rejected.prompt, rejected.answer, rejected.messages):
            raise ValueError(
                f"{where}: `{names[0]}` and `{names[1]}` are the same, so neither is preferred. Remove the row."
            )
        margin: Any = 0.0
        if margin_column is not None:
            margin = column(row, margin_column, "margin_column", where)
            if isinstance(margin, bool) or not isinstance(margin, Real) or not math.isfinite(margin) or margin < 0:
                raise ValueError(f"{where}: `{margin_column}` must be a number of at least 0, got {short(margin)}.")
        return Pair(chosen, rejected, float(margin))

    def _parse_reference(self, row: Any, where: str) -> Turns:
        if isinstance(row, str):
            return join("", text_or_chat(row, "text", where), where, "text")
        if isinstance(row, dict) and "messages" in row:
            return join([], text_or_chat(row["messages"], "messages", where), where, "messages")
        prompt = text_or_chat(column(row, str(self._columns[0]), "prompt_column", where), "prompt", where, empty=True)
        answer = text_or_chat(column(row, "answer", "reference", where), "answer", where)
        return join(prompt, answer, where, "answer")

    def tokenized(self, name: str, items: list[Pair]) -> list[Pair]:
        """Return the pairs of a set with their tokens, less those that are too long or cannot be told apart."""
        kept, over, same = [], 0, 0
        for pair in items:
            fits = [self._tokenize(turns) for turns in (pair.chosen, pair.rejected)]
            over += not all(fits)
            if not all(fits) and self.overlong == "drop":
                continue
            if pair.chosen.ids == pair.rejected.ids:
                same += 1
                continue
            kept.append(pair)
        parts = []
        if over:
            done = "dropped" if self.overlong == "drop" else "cut at the start"
            parts.append(f"{over:,} have a text longer than `max_length={self.max_length}` tokens ({done})")
        if same:
            parts.append(f"{same:,} are of two texts with the same tokens (dropped)")
        if not kept:
            raise ValueError(
                f"No pair of `{name}` is left: of {len(items):,}, {' and '.join(parts)}. Raise `max_length`, or use "
                "the tokenizer that belongs to the texts."
            )
        if parts:
            rank_zero_warn(f"Of {len(items):,} pairs of `{name}`, {' and '.join(parts)}.")
        return kept

    def _tokenize(self, turns: Turns) -> bool:
        """Fill in the tokens, cut to `max_length`; return whether nothing had to be cut."""
        ids = judged_tokens(turns, self._tokenizer, self.chat_template)
        if not ids:
            raise ValueError(f"{turns.where}: a text has no tokens. Remove the row.")
        turns.ids = ids
        if self.max_length is None or len(ids) <= self.max_length:
            return True
        kept = 1 if ids[0] == getattr(self._tokenizer, "bos_token_id", None) and self.max_length > 1 else 0
        turns.ids = ids[:kept] + ids[len(ids) - (self.max_length - kept) :]
        return False

    def references(self, count: int) -> list[list[int]]:
        """Return the tokens of reference answers, spread evenly over those that there are.

        Args:
            count: How many at most.

        Raises:
            ValueError: No answer of `reference` fits `max_length`.
        """
        if self._reference is None:
            sets = self._ready.get("train") or next(iter(self._ready.values()), [])
            found = [pair.chosen for pair in sets]
        else:
            if self._referred is None or self._referred[0] is not self._tokenizer:
                fits = [self._tokenize(turns) or self.overlong == "cut" for turns in self._reference]
                kept = [turns for turns, fit in zip(self._reference, fits, strict=True) if fit]
                self._referred = (self._tokenizer, kept)
            found = self._referred[1]
            if not found:
                raise ValueError(f"Every answer of `reference` is longer than `max_length={self.max_length}` tokens.")
        step = max(1, len(found) / count)
        return [found[int(i * step)].ids for i in range(min(count, len(found)))]

    def tokens(self, item: Pair) -> list[int]:
        """Return the tokens of the longer text of a pair."""
        return max(item.chosen.ids, item.rejected.ids, key=len)

    def collate(self, items: list[Pair], index: Tensor, pad: int) -> Pairs:
        """Make a batch of pairs."""
        return Pairs(
            chosen=texts([pair.chosen.ids for pair in items], index, pad),
            rejected=texts([pair.rejected.ids for pair in items], index, pad),
            margin=torch.tensor([pair.margin for pair in items], dtype=torch.float32),
            real=torch.ones(len(items), dtype=torch.bool),
        )
