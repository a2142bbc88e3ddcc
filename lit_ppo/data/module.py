"""The LightningDataModule for prompts."""

from __future__ import annotations

from torch import Tensor

from lit_ppo.data.encode import collate, limit, tokenize
from lit_ppo.data.loader import PromptLoader
from lit_ppo.data.rows import Prompt, parse_rows
from lit_ppo.data.sets import SetsDataModule, Source
from lit_ppo.experience import Prompts


class PromptDataModule(SetsDataModule):
    """Prompts for fit, validate, test and predict, from files, Hugging Face datasets or given in place.

    A row is a string, or an object with the prompt in `prompt_column` and anything else in other columns, which reward
    functions get. A prompt is a string or a list of chat messages (`{"role": ..., "content": ...}`). A set is what
    `lit_ppo.data.rows.read_rows` reads: a path to JSONL, CSV, TSV or Parquet, a folder of `save_to_disk`,
    `hf:owner/name:split`, or rows in memory. They are read and checked here, tokenized in `setup`.

    Args:
        train: Prompts to train on.
        val: Held-out prompts.
        test: Prompts for `test`.
        predict: Prompts for `predict`; None: those of `val`.
        val_fraction: Hold out this share of `train` (below 1) or this many of its prompts (2 or more) as `val`.
        batch_size: Prompts of one iteration, over all ranks. A smaller set is taken whole in each iteration; the
            attribute then says so after `setup`.
        val_batch_size: As `batch_size`, for the other sets, which keep their order and their last batch. None: as it.
        prompt_column: Where objects keep the prompt.
        max_prompt_length: Longest prompt, in tokens. None: any length.
        overlong: `drop` longer ones, or `cut` them: their last tokens (and a BOS) stay, in chats as in strings.
        shuffle: Train in a new order each epoch. `Trainer(overfit_batches=...)` turns it off.
        seed: Of that order, and of the choice for `val_fraction`.
        drop_last: Leave the prompts that do not fill a batch out of the epoch.
        chat_template: Jinja text that replaces the chat template of the module's tokenizer in `setup`, and so is what
            checkpoints, exports and `lit-ppo generate --chat` have.
        add_generation_prompt: End a chat with the opening of the assistant's turn.
        encoding: Of text files. UTF-8 may start with a byte order mark.

    Raises:
        FileNotFoundError: A path that is not a file.
        ValueError: An option out of range or without effect, or a row that cannot be used; it names the line.
        TypeError: A set or row of another type.

    Example::

        trainer.fit(module, PromptDataModule("prompts.jsonl", val_fraction=0.1, batch_size=64))
    """

    what = "prompts"

    def __init__(
        self,
        train: Source = None,
        val: Source = None,
        test: Source = None,
        predict: Source = None,
        val_fraction: float = 0.0,
        batch_size: int = 512,
        val_batch_size: int | None = None,
        prompt_column: str = "prompt",
        max_prompt_length: int | None = None,
        overlong: str = "drop",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        encoding: str = "utf-8",
    ) -> None:
        super().__init__(
            {"train": train, "val": val, "test": test, "predict": predict},
            lambda rows, name: parse_rows(rows, name, prompt_column),
            {"batch_size": batch_size, "val_batch_size": val_batch_size, "max_prompt_length": max_prompt_length},
            val_fraction=val_fraction,
            limit="max_prompt_length",
            overlong=overlong,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            chat_template=chat_template,
            encoding=encoding,
        )
        chats = any(prompt.messages is not None for prompts in self._sets.values() for prompt in prompts)
        if not chats and (chat_template is not None or not add_generation_prompt):
            raise ValueError(
                "`chat_template` and `add_generation_prompt` have no effect: every prompt is a plain string. Write "
                'prompts as chats, [{"role": "user", "content": "..."}], to have them rendered.'
            )
        self.max_prompt_length, self.add_generation_prompt = max_prompt_length, add_generation_prompt

    def tokenized(self, name: str, items: list[Prompt]) -> list[Prompt]:
        """Return the prompts of a set with their tokens, less those that are too long."""
        prompts = tokenize(items, self._tokenizer, self.chat_template, self.add_generation_prompt)
        return limit(prompts, self._tokenizer, self.max_prompt_length, self.overlong, name)

    def tokens(self, item: Prompt) -> list[int]:
        """Return a prompt's tokens."""
        return item.ids

    def collate(self, items: list[Prompt], index: Tensor, pad: int) -> Prompts:
        """Left-pad prompts into one batch."""
        return collate(items, index, pad)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of the sets that `setup` has tokenized."""
        return self.longest

    @property
    def columns(self) -> dict[str, set[str]]:
        """Names of the columns beside the prompt that any row has, of each set that `setup` has tokenized."""
        return {name: set().union(*(p.columns for p in prompts)) for name, prompts in self._ready.items()}

    def predict_dataloader(self) -> PromptLoader:
        """Return this rank's share of `predict`, or else of `val`."""
        return self._loader("predict", self.val_batch_size)
