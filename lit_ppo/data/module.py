"""The LightningDataModule for prompts."""

from __future__ import annotations

import random
import zlib
from numbers import Integral, Real
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_ppo.data.encode import limit, pad_id, tokenize
from lit_ppo.data.loader import PromptLoader
from lit_ppo.data.rows import Prompt, parse_rows, read_rows
from lit_ppo.ranks import together

# For jsonargparse the list has to come first: it would take a YAML list for text otherwise.
Source = list[str | dict[str, Any]] | str | None


class PromptDataModule(LightningDataModule):
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
        super().__init__()
        val_batch_size = batch_size if val_batch_size is None else val_batch_size
        counts: dict[str, Any] = {
            "batch_size": batch_size,
            "val_batch_size": val_batch_size,
            "max_prompt_length": max_prompt_length,
        }
        for name, value in counts.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise TypeError(f"`{name}={value!r}` must be a whole number, and is a {type(value).__name__}.")
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1.")
        share: Any = val_fraction
        if isinstance(share, bool) or not isinstance(share, Real):
            raise TypeError(f"`val_fraction={share!r}` must be a number, and is a {type(share).__name__}.")
        if overlong not in ("drop", "cut"):
            raise ValueError(f"`overlong={overlong!r}` must be 'drop' or 'cut'.")
        if overlong == "cut" and max_prompt_length is None:
            raise ValueError("`overlong='cut'` has no effect without `max_prompt_length`. Set how many tokens to keep.")
        if chat_template is not None and "{" not in chat_template:
            raise ValueError(
                f"`chat_template={chat_template!r}` has no Jinja in it. Give the template's text, not its name."
            )
        sources = {"train": train, "val": val, "test": test, "predict": predict}
        self._sets = {
            name: parse_rows(read_rows(source, name, encoding), name, prompt_column)
            for name, source in sources.items()
            if source is not None
        }
        if not self._sets:
            raise ValueError("There are no prompts. Give `train`, `val`, `test` or `predict`: a path or a list.")
        chats = any(prompt.messages is not None for prompts in self._sets.values() for prompt in prompts)
        if not chats and (chat_template is not None or not add_generation_prompt):
            raise ValueError(
                "`chat_template` and `add_generation_prompt` have no effect: every prompt is a plain string. Write "
                'prompts as chats, [{"role": "user", "content": "..."}], to have them rendered.'
            )
        if val_fraction:
            self._hold_out(val_fraction, seed)
        self.batch_size = self._wanted = batch_size
        self.val_batch_size = val_batch_size
        self.max_prompt_length, self.overlong = max_prompt_length, overlong
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.chat_template, self.add_generation_prompt = chat_template, add_generation_prompt
        if chat_template is not None:  # into checkpoints, for `lit_ppo.export`
            self.save_hyperparameters({"chat_template": chat_template}, logger=False)
        self._ready: dict[str, list[Prompt]] = {}
        self._tokenizer: Any = None

    def _hold_out(self, val_fraction: Any, seed: int) -> None:
        """Move a random part of `train` to `val`."""
        me = f"`val_fraction={val_fraction:g}`"
        if "train" not in self._sets or "val" in self._sets:
            raise ValueError(f"{me} takes prompts from `train` for `val`: give `train` and leave `val` out.")
        if val_fraction == 1 and not isinstance(val_fraction, Integral):
            raise ValueError(f"{me} would be all of `train`. Give a share below 1, or 2 or more prompts.")
        prompts = self._sets["train"]
        held = round(val_fraction * len(prompts)) if val_fraction < 1 else int(val_fraction)
        if held != val_fraction and val_fraction > 1:
            raise ValueError(f"{me} must be a share below 1 or a whole number of prompts.")
        if not 0 < held < len(prompts):
            raise ValueError(f"{me} of {len(prompts):,} prompts is {held:,}: `train` and `val` both need at least one.")
        chosen = set(random.Random(f"{seed} val").sample(range(len(prompts)), held))
        self._sets["val"] = [prompt for i, prompt in enumerate(prompts) if i in chosen]
        self._sets["train"] = [prompt for i, prompt in enumerate(prompts) if i not in chosen]

    def setup(self, stage: str) -> None:
        """Tokenize the sets that a stage needs with the tokenizer of the LightningModule.

        Raises:
            ValueError: The stage has no prompts, or none that can be used.
            AttributeError: The LightningModule has no `tokenizer`.
            RuntimeError: Another rank failed.
        """
        together("reading the prompts", lambda: self._read(stage))
        if "val" not in self._sets:  # Lightning validates where the hook is overridden
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    def _read(self, stage: str) -> None:
        stage = str(getattr(stage, "value", stage))  # Lightning passes an enum
        if stage == "predict" and "predict" not in self._sets and "val" in self._sets:
            self._sets["predict"] = self._sets["val"]
        needed = {"fit": "train", "validate": "val"}.get(stage, stage)
        if needed not in self._sets:
            other = {"val": " or `val_fraction`", "predict": " or `val`"}.get(needed, "")
            raise ValueError(f"`{stage}` needs prompts, and PromptDataModule has none for it. Give `{needed}`{other}.")
        tokenizer = self._find_tokenizer()
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._ready = tokenizer, {}
            if self.chat_template is not None:
                tokenizer.chat_template = self.chat_template
        for name in ("train", "val") if stage == "fit" else (needed,):
            if name in self._sets and name not in self._ready:
                self._prepare(name)

    def teardown(self, stage: str) -> None:
        """Undo what `setup` did to the hooks."""
        self.__dict__.pop("val_dataloader", None)

    def _find_tokenizer(self) -> Any:
        module = self._trainer().lightning_module
        try:
            return module.tokenizer
        except AttributeError as error:
            raise AttributeError(
                f"PromptDataModule tokenizes with `{type(module).__name__}.tokenizer`, which is missing: {error}. "
                "Give the LightningModule a `tokenizer` that exists before its `setup`."
            ) from error

    def _prepare(self, name: str) -> None:
        """Tokenize a set and say what became of it."""
        prompts = tokenize(self._sets[name], self._tokenizer, self.chat_template, self.add_generation_prompt)
        prompts = limit(prompts, self._tokenizer, self.max_prompt_length, self.overlong, name)
        self._ready[name] = prompts
        count = len(prompts)
        lengths = [len(prompt.ids) for prompt in prompts]
        report = f"`{name}`: {count:,} prompts, {min(lengths):,} to {max(lengths):,} tokens long"
        if name == "train":
            self.batch_size = min(self._wanted, count)
            if count < self._wanted:
                rank_zero_warn(
                    f"`batch_size={self._wanted}` is more than the {count} prompts of `train`: a batch is {count}."
                )
            report += f"; iterations an epoch: {self.iterations_per_epoch:,} of {self.batch_size:,} prompts"
            if left := count % self.batch_size:
                which = "others each epoch" if self.shuffle else "the same each epoch"
                report += f", {left:,} left out ({which})" if self.drop_last else f", the last of {left:,}"
        rank_zero_info(report)

    def describe(self) -> dict[str, Any]:
        """Return what decides the batches, for ranks to compare: options, and a checksum of each tokenized set."""
        names = ("batch_size", "val_batch_size", "shuffle", "seed", "drop_last")
        options = {name: getattr(self, name) for name in names}
        sums = {name: zlib.crc32(repr([p.ids for p in prompts]).encode()) for name, prompts in self._ready.items()}
        return options | sums

    @property
    def iterations_per_epoch(self) -> int:
        """Batches of an epoch of `train`, over all ranks; known after `setup`."""
        return len(PromptLoader(self._ready_set("train"), self.batch_size, drop_last=self.drop_last))

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of the sets that `setup` has tokenized."""
        return max((len(prompt.ids) for prompts in self._ready.values() for prompt in prompts), default=0)

    @property
    def columns(self) -> dict[str, set[str]]:
        """Names of the columns beside the prompt that any row has, of each set that `setup` has tokenized."""
        return {name: set().union(*(p.columns for p in prompts)) for name, prompts in self._ready.items()}

    def __str__(self) -> str:  # Lightning's own expects a DataLoader
        sets = (f"{name}: {len(prompts):,} prompts" for name, prompts in self._sets.items())
        return f"{type(self).__name__}({', '.join(sets)})"

    def _ready_set(self, name: str) -> list[Prompt]:
        if name not in self._ready:
            raise RuntimeError(f"The prompts of `{name}` are not tokenized yet. The Trainer calls `setup` for that.")
        return self._ready[name]

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError("PromptDataModule needs a Trainer: pass it to `fit`, `validate`, `test` or `predict`.")
        return self.trainer

    def _loader(self, name: str, batch_size: int, **options: Any) -> PromptLoader:
        share = self._trainer().distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return PromptLoader(
            self._ready_set(name),
            batch_size,
            pad=pad_id(self._tokenizer),
            rank=share["rank"],
            world_size=share["num_replicas"],
            **options,
        )

    def train_dataloader(self) -> PromptLoader:
        """Return this rank's share of the training batches; it continues where the Trainer stands."""
        trainer: Any = self._trainer()  # `overfit_batches` is not in its types
        return self._loader(
            "train",
            self.batch_size,
            shuffle=self.shuffle and not trainer.overfit_batches,
            seed=self.seed,
            drop_last=self.drop_last,
            progress=lambda: _progress(trainer),
        )

    def val_dataloader(self) -> PromptLoader:
        """Return this rank's share of `val`. Without `val`, `fit` does not validate."""
        return self._loader("val", self.val_batch_size)

    def test_dataloader(self) -> PromptLoader:
        """Return this rank's share of `test`."""
        return self._loader("test", self.val_batch_size)

    def predict_dataloader(self) -> PromptLoader:
        """Return this rank's share of `predict`, or else of `val`."""
        return self._loader("predict", self.val_batch_size)


def _progress(trainer: Any) -> tuple[int, int] | None:
    """Return (epoch, next batch) by the Trainer's counters at the first batch of a pass; None outside of training.

    Lightning 2.6, resumed from a checkpoint of the last batch or of the end of an epoch, begins the next epoch without
    counting it as begun. A checkpoint within that epoch would then count as its start, and a second resume would repeat
    what was done. So the epoch is counted here; where Lightning did, nothing changes.
    """
    if not trainer.training:
        return None
    loop, epoch = trainer.fit_loop, trainer.current_epoch
    for count in (loop.epoch_progress.current, loop.epoch_progress.total):
        count.ready = count.started = epoch + 1
        count.processed = epoch
    return epoch, loop.batch_idx + 1
