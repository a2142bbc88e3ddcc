"""Rewards that are Python functions."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_ppo.config import from_dict
from lit_ppo.rewards.base import Reward, RewardError, Samples, refuse_options
from lit_ppo.rewards.config import RewardConfig

_OFFERED = ("prompts", "responses", "messages", "response_ids", "stopped")
_LOCATE_SECONDS = 5.0  # how long the sample that makes a function fail is looked for


class FunctionReward(Reward):
    """A Python function, or any callable, that returns one number per sample.

    It is called with keyword arguments, each a list with one entry per sample, and gets those that its signature
    names: `prompts` and `responses` (texts), any other column of the prompt set (None where a row lacks it),
    `messages` (the chats, None where the prompt was a plain text), `response_ids` (token ids) and `stopped` (whether
    the response ended with a stop token). `**kwargs` gets everything. `prompt + response`, special tokens aside, is
    the whole text, so a response that goes on in mid-sentence starts with a space.

    Args:
        function: A callable that returns a list, tuple, array or tensor of B numbers.
        options: Fields of `RewardConfig`: `weight`, `name`, `on_error`, `timeout`.

    Raises:
        TypeError: `function` cannot be called that way.
        ValueError: An option that a function has no use for.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        config = from_dict(RewardConfig, options)
        super().__init__(config, _name_of(function))
        refuse_options(config, {"source", "weight", "name", "on_error", "timeout"}, "a reward that is a function")
        if not callable(function):
            raise TypeError(f"Reward `{self.name}` is a {type(function).__name__}, which cannot be called.")
        for part in (function, getattr(function, "__call__", None), getattr(function, "func", None)):  # noqa: B004
            if inspect.iscoroutinefunction(part) or inspect.isasyncgenfunction(part):
                raise TypeError(
                    f"Reward `{self.name}` is an async function. Rewards are called from the training loop, which has "
                    "no event loop: make it a plain function, for example one that calls `asyncio.run`."
                )
        self.function = function
        self._parameters = self._read_signature(function)
        self._columns: set[str] = set()

    def _read_signature(self, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
        try:
            parameters = dict(inspect.signature(function).parameters)
        except (ValueError, TypeError) as error:
            raise TypeError(
                f"Reward `{self.name}` has no signature that can be read ({error}): wrap it in a Python function that "
                "names its arguments."
            ) from error
        for p in parameters.values():
            if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
                raise TypeError(
                    f"Reward `{self.name}` takes `{p.name}` by position only; rewards are called by keyword. "
                    "Wrap it in a function of `prompts` and `responses`."
                )
        return parameters

    def check_columns(self, columns: set[str]) -> None:
        """Check the signature against a prompt set, whose columns every batch then has (None where a row lacks one).

        Args:
            columns: Those of any row, without the prompt's.

        Raises:
            RewardError: An argument is none of them, or one has a name that every function is offered.
        """
        self._wanted(sorted(columns))
        self._columns |= columns

    def _wanted(self, columns: list[str]) -> set[str]:
        """Return the names of the arguments that the function gets."""
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        named = [p for p in self._parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        offered = {*_OFFERED, *columns}
        wanted = offered if takes_all else {p.name for p in named} & offered
        for clash in sorted(wanted.intersection(_OFFERED).intersection(columns)):
            raise self.fail(
                f"`{clash}` is both what every reward is offered and a column of the prompt set. Rename the column"
                + (", or name the arguments instead of taking `**kwargs`." if takes_all else ".")
            )
        for p in named:
            if p.name not in wanted and p.default is p.empty:
                raise self.fail(
                    f"its argument `{p.name}` is not a column of the prompt set, which has "
                    f"{', '.join(f'`{n}`' for n in columns) or 'none but the prompt'}. "
                    f"Every function is also offered {', '.join(f'`{n}`' for n in _OFFERED)}."
                )
        return wanted

    def _arguments(self, samples: Samples) -> dict[str, list[Any]]:
        """Return the keyword arguments that the function takes."""
        columns = sorted(self._columns.union(*samples.columns))
        wanted = self._wanted(columns)
        arguments: dict[str, list[Any]] = {n: list(getattr(samples, n)) for n in _OFFERED if n in wanted}
        return arguments | {n: [row.get(n) for row in samples.columns] for n in columns if n in wanted}

    def score(self, samples: Samples, batch_size: int | None = None) -> Tensor:
        """Call the function.

        Args:
            samples: B samples.
            batch_size: Means nothing here: a function gets all samples at once.

        Returns:
            (B,) float32 on the CPU.

        Raises:
            RewardError: It fails, takes longer than `timeout`, or returns something other than B numbers.
        """
        arguments = self._arguments(samples)
        try:
            with torch.no_grad():
                result = self._call(arguments)
        except (torch.OutOfMemoryError, RewardError):
            raise  # memory is the trainer's business
        except Exception as error:
            raise self.fail(
                f"it raised {type(error).__name__}: {error} on a batch of {len(samples)} samples"
                f"{self._culprit(samples, type(error))}."
            ) from error
        return self._numbers(result, samples)

    def _call(self, arguments: dict[str, list[Any]]) -> Any:
        if self.config.timeout is None:
            return self.function(**arguments)
        outcome: list[Any] = []
        failure: list[BaseException] = []
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def work() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # a thread starts on device 0, and with gradients on
                with torch.no_grad():
                    outcome.append(self.function(**arguments))
            except BaseException as error:
                failure.append(error)

        # a daemon: a function that never returns must not keep the process alive either
        thread = threading.Thread(target=work, daemon=True, name=f"reward {self.name}")
        thread.start()
        thread.join(self.config.timeout)
        if failure:
            raise failure[0]
        if not outcome:
            raise self.fail(
                f"it did not return within `reward.timeout={self.config.timeout:g}` seconds on a batch of samples. "
                "Raise the limit, or give what it waits for a limit of its own."
            )
        return outcome[0]

    def _culprit(self, samples: Samples, kind: type[Exception]) -> str:
        """Find the first sample that fails alone in the same way, if that does not take long."""
        deadline = time.monotonic() + _LOCATE_SECONDS
        for row in range(len(samples)):
            if time.monotonic() > deadline:
                break
            try:
                with torch.no_grad():
                    self._call(self._arguments(samples.select([row])))
            except kind:
                return f"; the first that fails alone is {samples.describe(row)}"
            except Exception:
                continue
        return ""

    def _numbers(self, result: Any, samples: Samples) -> Tensor:
        kind = type(result).__name__
        if inspect.isawaitable(result):
            getattr(result, "close", lambda: None)()
            raise self.fail(f"it returned an awaitable ({kind}). Make it return the numbers themselves.")
        if isinstance(result, Tensor):
            if result.is_meta:
                raise self.fail("it returned a tensor on the meta device, which holds no numbers.")
            result = result.detach()
        if hasattr(result, "tolist"):  # arrays, tensors, series
            shape = tuple(getattr(result, "shape", ()))
            if len(shape) != 1:
                raise self.fail(f"it returned a {kind} of shape {shape}, not one number per sample: ({len(samples)},).")
            result = result.tolist()
        if not isinstance(result, (list, tuple)):
            raise self.fail(f"it returned a {kind}, not a list, tuple, array or tensor with one number per sample.")
        if len(result) != len(samples):
            short = len(result) < len(samples)
            where = f" The first without a score is {samples.describe(len(result))}." if short else ""
            raise self.fail(f"it returned {len(result)} scores for {len(samples)} samples.{where}")
        return torch.tensor([self._number(x, row, samples) for row, x in enumerate(result)], dtype=torch.float32)

    def _number(self, value: Any, row: int, samples: Samples) -> float:
        if not isinstance(value, (str, bytes, bytearray)):
            try:
                return float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                pass
        raise self.fail(
            f"it returned {value!r}, which is not a number, for {samples.describe(row)}. "
            "To leave a sample out, return `float('nan')` and set `reward.on_error` to 'skip'."
        )


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)
