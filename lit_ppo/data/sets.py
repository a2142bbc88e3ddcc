"""What every LightningDataModule of this package does: sets of rows, held-out rows, batches that a resume continues."""

from __future__ import annotations

import random
import zlib
from abc import abstractmethod
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, ClassVar

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_ppo.data.encode import pad_id
from lit_ppo.data.formats import Rows
from lit_ppo.data.loader import PromptLoader
from lit_ppo.data.rows import read_rows
from lit_ppo.ranks import together

# For jsonargparse the list has to come first: it would take a YAML list for text otherwise.
Source = list[str | dict[str, Any]] | str | None


class SetsDataModule(LightningDataModule):
    """Sets of rows: read and checked when constructed, tokenized in `setup`, dealt to the ranks in batches.

    Args:
        sources: What each set is read from, by name; None where there is none.
        parse: Turns the rows of a set, and its name, into items.
        counts: Options that are whole numbers of at least 1, or None: `batch_size` and `val_batch_size` among them.
        val_fraction: Share or number of the items of `train` to hold out.
        limit: Which of `counts` an item that is overlong exceeds.
        overlong: Has to be `drop` or `cut`, and this with a limit.
        shuffle: Train in a new order each epoch.
        seed: Of that order, and of the choice for `val_fraction`.
        drop_last: Leave the items that do not fill a batch out of the epoch.
        chat_template: Jinja text for the tokenizer, or None.
        encoding: Of text files.

    Raises:
        FileNotFoundError: A path that is not a file.
        ValueError: An option out of range, or a row that cannot be used.
        TypeError: A set, row or option of another type.
    """

    what: ClassVar[str]
    """What an item is called, in the plural."""

    def __init__(
        self,
        sources: dict[str, Any],
        parse: Callable[[Rows, str], list[Any]],
        counts: dict[str, Any],
        *,
        val_fraction: Any,
        limit: str,
        overlong: str,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        chat_template: str | None,
        encoding: str,
    ) -> None:
        super().__init__()
        for name, value in counts.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise TypeError(f"`{name}={value!r}` must be a whole number, and is a {type(value).__name__}.")
            if value is not None and value < 1:
                raise ValueError(f"`{name}={value}` must be at least 1.")
        if isinstance(val_fraction, bool) or not isinstance(val_fraction, Real):
            raise TypeError(
                f"`val_fraction={val_fraction!r}` must be a number, and is a {type(val_fraction).__name__}."
            )
        if overlong not in ("drop", "cut"):
            raise ValueError(f"`overlong={overlong!r}` must be 'drop' or 'cut'.")
        if overlong == "cut" and counts[limit] is None:
            raise ValueError(f"`overlong='cut'` has no effect without `{limit}`. Set how many tokens to keep.")
        if chat_template is not None and "{" not in chat_template:
            raise ValueError(
                f"`chat_template={chat_template!r}` has no Jinja in it. Give the template's text, not its name."
            )
        self._sets = {
            name: parse(read_rows(source, name, encoding), name)
            for name, source in sources.items()
            if source is not None
        }
        if not self._sets:
            raise ValueError(
                f"There are no {self.what}. Give {' or '.join(f'`{name}`' for name in sources)}: a path or a list."
            )
        if val_fraction:
            self._hold_out(val_fraction, seed)
        self.batch_size = self._wanted = counts["batch_size"]
        self.val_batch_size = counts["val_batch_size"] or self.batch_size
        self.overlong = overlong
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.chat_template = chat_template
        if chat_template is not None:  # into checkpoints, for `lit_ppo.export`
            self.save_hyperparameters({"chat_template": chat_template}, logger=False)
        self._ready: dict[str, list[Any]] = {}
        self._tokenizer: Any = None

    @abstractmethod
    def tokenized(self, name: str, items: list[Any]) -> list[Any]:
        """Return the items of a set with their tokens, less those that cannot be used."""

    @abstractmethod
    def tokens(self, item: Any) -> list[int]:
        """Return an item's tokens: their number is its length, and ranks compare them."""

    @abstractmethod
    def collate(self, items: list[Any], index: Any, pad: int) -> Any:
        """Make a batch of tokenized items, perhaps of none; `index` numbers them in their iteration."""

    def _hold_out(self, val_fraction: Any, seed: int) -> None:
        """Move a random part of `train` to `val`."""
        me = f"`val_fraction={val_fraction:g}`"
        if "train" not in self._sets or "val" in self._sets:
            raise ValueError(f"{me} takes {self.what} from `train` for `val`: give `train` and leave `val` out.")
        if val_fraction == 1 and not isinstance(val_fraction, Integral):
            raise ValueError(f"{me} would be all of `train`. Give a share below 1, or 2 or more {self.what}.")
        items = self._sets["train"]
        held = round(val_fraction * len(items)) if val_fraction < 1 else int(val_fraction)
        if held != val_fraction and val_fraction > 1:
            raise ValueError(f"{me} must be a share below 1 or a whole number of {self.what}.")
        if not 0 < held < len(items):
            raise ValueError(
                f"{me} of {len(items):,} {self.what} is {held:,}: `train` and `val` both need at least one."
            )
        chosen = set(random.Random(f"{seed} val").sample(range(len(items)), held))
        self._sets["val"] = [item for i, item in enumerate(items) if i in chosen]
        self._sets["train"] = [item for i, item in enumerate(items) if i not in chosen]

    def setup(self, stage: str) -> None:
        """Tokenize the sets that a stage needs with the tokenizer of the LightningModule.

        Raises:
            ValueError: The stage has no rows, or none that can be used.
            AttributeError: The LightningModule has no `tokenizer`.
            RuntimeError: Another rank failed.
        """
        together(f"reading the {self.what}", lambda: self._read(stage))
        if "val" not in self._sets:  # Lightning validates where the hook is overridden
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    def _read(self, stage: str) -> None:
        stage = str(getattr(stage, "value", stage))  # Lightning passes an enum
        if stage == "predict" and "predict" not in self._sets and "val" in self._sets:
            self._sets["predict"] = self._sets["val"]
        needed = {"fit": "train", "validate": "val"}.get(stage, stage)
        if needed not in self._sets:
            other = {"val": " or `val_fraction`", "predict": " or `val`"}.get(needed, "")
            raise ValueError(
                f"`{stage}` needs {self.what}, and {type(self).__name__} has none for it. Give `{needed}`{other}."
            )
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
                f"{type(self).__name__} tokenizes with `{type(module).__name__}.tokenizer`, which is missing: {error}. "
                "Give the LightningModule a `tokenizer` that exists before its `setup`."
            ) from error

    def _prepare(self, name: str) -> None:
        """Tokenize a set and say what became of it."""
        items = self.tokenized(name, self._sets[name])
        self._ready[name] = items
        count = len(items)
        lengths = [len(self.tokens(item)) for item in items]
        report = f"`{name}`: {count:,} {self.what}, {min(lengths):,} to {max(lengths):,} tokens long"
        if name == "train":
            self.batch_size = min(self._wanted, count)
            if count < self._wanted:
                rank_zero_warn(
                    f"`batch_size={self._wanted}` is more than the {count} {self.what} of `train`: a batch is {count}."
                )
            report += f"; iterations an epoch: {self.iterations_per_epoch:,} of {self.batch_size:,} {self.what}"
            if left := count % self.batch_size:
                which = "others each epoch" if self.shuffle else "the same each epoch"
                report += f", {left:,} left out ({which})" if self.drop_last else f", the last of {left:,}"
        rank_zero_info(report)

    def describe(self) -> dict[str, Any]:
        """Return what decides the batches, for ranks to compare: options, and a checksum of each tokenized set."""
        names = ("batch_size", "val_batch_size", "shuffle", "seed", "drop_last")
        options = {name: getattr(self, name) for name in names}
        sums = {
            name: zlib.crc32(repr([self.tokens(item) for item in items]).encode())
            for name, items in self._ready.items()
        }
        return options | sums

    @property
    def iterations_per_epoch(self) -> int:
        """Batches of an epoch of `train`, over all ranks; known after `setup`."""
        return len(PromptLoader(self._ready_set("train"), self.batch_size, drop_last=self.drop_last))

    @property
    def longest(self) -> int:
        """Tokens of the longest item of the sets that `setup` has tokenized."""
        return max((len(self.tokens(item)) for items in self._ready.values() for item in items), default=0)

    def __str__(self) -> str:  # Lightning's own expects a DataLoader
        sets = (f"{name}: {len(items):,} {self.what}" for name, items in self._sets.items())
        return f"{type(self).__name__}({', '.join(sets)})"

    def _ready_set(self, name: str) -> list[Any]:
        if name not in self._ready:
            raise RuntimeError(
                f"The {self.what} of `{name}` are not tokenized yet. The Trainer calls `setup` for that."
            )
        return self._ready[name]

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} needs a Trainer: pass it to `fit`, `validate`, `test` or `predict`."
            )
        return self.trainer

    def _loader(self, name: str, batch_size: int, **options: Any) -> PromptLoader:
        share = self._trainer().distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return PromptLoader(
            self._ready_set(name),
            batch_size,
            pad=pad_id(self._tokenizer),
            make=self.collate,
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
