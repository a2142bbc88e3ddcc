"""Prompts with answers, for supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_ppo.data.encode import collate, front
from lit_ppo.data.formats import Rows
from lit_ppo.data.rows import Prompt
from lit_ppo.data.sets import SetsDataModule, Source
from lit_ppo.data.turns import Turns, answer_tokens, column, join, text_or_chat
from lit_ppo.experience import Rollout


@dataclass
class Answers(Rollout):
    """Prompts with answers to learn: what stands before the first answer is the prompt, all behind it the response."""

    trained: Tensor
    """(B, R) bool: tokens of an answer. Those between the answers of a chat are read and not trained on."""

    @staticmethod
    def of(ids: list[list[int]], trained: list[list[bool]], index: Tensor, pad: int) -> Answers:
        """Make a batch of B texts, perhaps of none.

        Args:
            ids: Tokens of each text.
            trained: Which of them are of an answer; not the first, and at least one.
            index: (B,) int64, number of each text in its iteration.
            pad: Id under the padding.
        """
        starts = [row.index(True) for row in trained]
        prompts = [Prompt("", "", None, {}, row[:start]) for row, start in zip(ids, starts, strict=True)]
        width = max((len(row) - start for row, start in zip(ids, starts, strict=True)), default=1)
        responses = torch.full((len(ids), width), pad, dtype=torch.long)
        mask = torch.zeros(len(ids), width, dtype=torch.bool)
        for i, start in enumerate(starts):
            responses[i, : len(ids[i]) - start] = torch.tensor(ids[i][start:])
            mask[i, : len(ids[i]) - start] = torch.tensor(trained[i][start:])
        lengths = [len(row) - start for row, start in zip(ids, starts, strict=True)]
        return Answers(
            prompts=collate(prompts, index, pad),
            ids=responses,
            lengths=torch.tensor(lengths, dtype=torch.long),
            stopped=torch.ones(len(ids), dtype=torch.bool),
            logprobs=torch.zeros(len(ids), width),
            trained=mask,
        )


class SFTDataModule(SetsDataModule):
    """Prompts with the answers to learn, from what `PromptDataModule` reads.

    A row is an object with a prompt (a text or a chat so far) and its answer (a text); or a whole chat, whose turns of
    the assistant are the answers; or a plain string, all of which is learned. Prompt and answer are joined as they are:
    an answer that goes on mid-sentence begins with its space. Answers end with the EOS, or as the chat template says.

    Args:
        train: Rows to train on.
        val: Held-out rows.
        test: Rows for `test`.
        val_fraction: Hold out this share of `train` (below 1) or this many of its rows (2 or more) as `val`.
        batch_size: Rows of one optimizer step, over all ranks. A smaller set is taken whole.
        val_batch_size: As `batch_size`, for the other sets. None: as it.
        prompt_column: Where objects keep the prompt.
        answer_column: Where objects keep the answer.
        messages_column: Where objects keep a whole chat, in place of the two.
        answers: `all` of a chat's answers are learned, or the `last` alone.
        max_length: Longest prompt with answer, in tokens. None: any length.
        overlong: `drop` longer ones, or `cut` the ends of their answers (which then have no EOS).
        shuffle: Train in a new order each epoch.
        seed: Of that order, and of the choice for `val_fraction`.
        drop_last: Leave the rows that do not fill a batch out of the epoch.
        chat_template: Jinja text that replaces the chat template of the module's tokenizer, in exports too.
        encoding: Of text files.

    Raises:
        FileNotFoundError: A path that is not a file.
        ValueError: An option out of range or without effect, or a row that cannot be used; it names the line.
        TypeError: A set or row of another type.

    Example::

        trainer.fit(SFTModule("my-model"), SFTDataModule("answers.jsonl", val_fraction=0.1, batch_size=64))
    """

    what = "rows"

    def __init__(
        self,
        train: Source = None,
        val: Source = None,
        test: Source = None,
        val_fraction: float = 0.0,
        batch_size: int = 64,
        val_batch_size: int | None = None,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        messages_column: str = "messages",
        answers: str = "all",
        max_length: int | None = None,
        overlong: str = "drop",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        chat_template: str | None = None,
        encoding: str = "utf-8",
    ) -> None:
        if answers not in ("all", "last"):
            raise ValueError(f"`answers={answers!r}` must be 'all' or 'last'.")
        self._columns = (prompt_column, answer_column, messages_column)
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
        chats = [turns.messages for items in self._sets.values() for turns in items if turns.messages is not None]
        if chat_template is not None and not chats:
            raise ValueError("`chat_template` has no effect: no row is a chat.")
        if answers == "last" and not any(sum(m["role"] == "assistant" for m in chat) > 1 for chat in chats):
            raise ValueError("`answers='last'` has no effect: no row has more than one answer.")
        self.max_length, self.answers = max_length, answers

    def _parse(self, rows: Rows, name: str) -> list[Turns]:
        """Find prompt and answer of each row."""
        items = [self._parse_row(row, where) for where, row in rows]
        if not items:
            raise ValueError(f"`{name}` is empty. Give at least one row.")
        return items

    def _parse_row(self, row: Any, where: str) -> Turns:
        prompt, answer, messages = self._columns
        if isinstance(row, str):
            return join("", text_or_chat(row, "text", where), where, "text")
        if isinstance(row, dict) and messages in row and answer not in row:
            chat = text_or_chat(row[messages], messages, where)
            if isinstance(chat, str):
                raise ValueError(f"{where}: `{messages}` is a text, not a list of chat messages.")
            turns = join([], chat, where, messages) if chat[-1]["role"] != "user" else Turns(where, "", "", chat[:-1])
            if not any(message["role"] == "assistant" for message in turns.messages or []):
                raise ValueError(f"{where}: `{messages}` has no message of the role 'assistant' to learn from.")
            return turns
        given = text_or_chat(column(row, prompt, "prompt_column", where), prompt, where, empty=True)
        return join(given, text_or_chat(column(row, answer, "answer_column", where), answer, where), where, answer)

    def tokenized(self, name: str, items: list[Turns]) -> list[Turns]:
        """Return the rows of a set with their tokens, less those that are too long."""
        plain = next((turns for turns in items if turns.messages is None), None)
        prefix = [] if plain is None else front(self._tokenizer, plain.answer)
        kept, over = [], 0
        for turns in items:
            answer_tokens(turns, self._tokenizer, self.chat_template, prefix, last_only=self.answers == "last")
            if self.max_length is not None and len(turns.ids) > self.max_length:
                over += 1
                if self.overlong == "drop":
                    continue
                turns.ids, turns.trained = turns.ids[: self.max_length], turns.trained[: self.max_length]
            if any(turns.trained):
                kept.append(turns)
        left = len(items) - len(kept)
        if not kept:
            raise ValueError(
                f"No row of `{name}` is left: all {left:,} are longer than `max_length={self.max_length}` tokens, or "
                "have no token of an answer within it. Raise `max_length`."
            )
        if over or left:
            rank_zero_warn(
                f"{over:,} of {len(items):,} rows of `{name}` are longer than `max_length={self.max_length}` tokens: "
                f"{left:,} dropped{f', {len(items) - left:,} kept' if self.overlong == 'cut' else ''}."
            )
        return kept

    def tokens(self, item: Turns) -> list[int]:
        """Return the tokens of a row."""
        return item.ids

    def collate(self, items: list[Turns], index: Tensor, pad: int) -> Answers:
        """Make a batch of rows."""
        return Answers.of([turns.ids for turns in items], [turns.trained for turns in items], index, pad)
