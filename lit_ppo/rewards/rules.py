"""Small rewards that need no model, by import path or from Python; `options` are the arguments of the classes.

Example::

    reward:
      - source: lit_ppo.rewards.rules.NumericAnswer
      - {source: lit_ppo.rewards.rules.RegexFormat, options: {pattern: "<answer>.*</answer>"}, weight: 0.2}
      - {source: lit_ppo.rewards.rules.LengthWithin, options: {high: 200}, weight: 0.1}
"""

from __future__ import annotations

import re
import threading
from importlib.util import find_spec
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_ppo.rewards.base import RewardError


def length_penalty(response_ids: list[list[int]]) -> list[float]:
    """Return minus the number of tokens of each response, the stop token included; the weight sets its price."""
    return [-float(len(ids)) for ids in response_ids]


def exact_match(responses: list[str], answer: list[Any]) -> list[float]:
    """Return 1 where a response is the `answer` of its row, else 0; white space around either does not count."""
    return [float(r.strip() == str(a).strip()) for r, a in zip(responses, answer, strict=True)]


class ExactMatch:
    """`exact_match` with another column than `answer`.

    Args:
        column: The column of the prompt set that holds the answer.
    """

    def __init__(self, column: str) -> None:
        self.column = column

    def __call__(self, responses: list[str], **columns: list[Any]) -> list[float]:
        """Return 1 where a response is the answer, else 0.

        Raises:
            RewardError: The prompt set has no such column.
        """
        return exact_match(responses, _column(self, self.column, columns))


class RegexFormat:
    r"""1 where a regular expression matches the response, else 0.

    Args:
        pattern: As for `re.search`; anchor it (`^...$` or `\A...\Z`) to judge the whole response.
        flags: As for `re.compile`, such as `re.DOTALL`; in a pattern itself, `(?s)`.

    Raises:
        ValueError: `pattern` is not a regular expression.

    Example::

        RegexFormat(r"<think>.*</think>\s*<answer>.*</answer>\s*\Z", re.DOTALL)
    """

    def __init__(self, pattern: str, flags: int = 0) -> None:
        try:
            self.pattern = re.compile(pattern, flags)
        except re.error as error:
            raise ValueError(f"`RegexFormat(pattern={pattern!r})` is not a regular expression: {error}.") from error

    def __call__(self, responses: list[str]) -> list[float]:
        """Return 1 where the pattern is found in a response, else 0."""
        return [float(self.pattern.search(r) is not None) for r in responses]


class LengthWithin:
    """1 where a response is as long as wanted, else falling to 0.

    Args:
        low: Least length.
        high: Greatest length; None: any.
        unit: What is counted: `tokens` (the stop token included), `words` or `characters`.
        slack: How far outside the score reaches 0; 0: at once.

    Raises:
        ValueError: A unit that is none of these, or bounds that nothing can meet.
    """

    def __init__(self, low: int = 0, high: int | None = None, unit: str = "tokens", slack: int = 0) -> None:
        me = f"`LengthWithin(low={low!r}, high={high!r}, unit={unit!r}, slack={slack!r})`"
        if unit not in ("tokens", "words", "characters"):
            raise ValueError(f"{me}: `unit` must be 'tokens', 'words' or 'characters'.")
        if low < 0 or slack < 0 or (high is not None and high < low):
            raise ValueError(f"{me}: needs 0 <= `low` <= `high` and 0 <= `slack`.")
        if low == 0 and high is None:
            raise ValueError(f"{me}: every response has such a length. Give `low` or `high`.")
        self.low, self.high, self.unit, self.slack = low, high, unit, slack

    def __call__(self, responses: list[str], response_ids: list[list[int]]) -> list[float]:
        """Return 1 within the bounds, less outside."""
        counts = {
            "tokens": lambda: [len(ids) for ids in response_ids],
            "words": lambda: [len(r.split()) for r in responses],
            "characters": lambda: [len(r) for r in responses],
        }[self.unit]()
        outside = [max(self.low - n, n - (n if self.high is None else self.high), 0) for n in counts]
        return [max(0.0, 1 - n / self.slack) if self.slack else float(n == 0) for n in outside]


class NumericAnswer:
    r"""1 where the number that a response ends on is that of its row, else 0.

    math-verify, where it is installed (`pip install math-verify`), reads LaTeX, fractions, percentages, sets and
    equations, and compares them as mathematics. The plain reader takes the last `\boxed{...}`, else what follows the
    last `####`, else the last number of the text, and knows integers, decimals, exponents, thousands separators and
    `a/b`; it says once that it is in use where `reader` leaves the choice.

    Args:
        column: The column of the prompt set that holds the answer: a number, or a text that ends on one.
        reader: `auto`, `math-verify` or `plain`.
        tolerance: How far the plain reader's two numbers may be apart, relative to the answer.

    Raises:
        ValueError: A reader that is none of these.
        ModuleNotFoundError: `reader="math-verify"`, and it is not installed.
    """

    def __init__(self, column: str = "answer", reader: str = "auto", tolerance: float = 1e-6) -> None:
        if reader not in ("auto", "math-verify", "plain"):
            raise ValueError(f"`NumericAnswer(reader={reader!r})` must be 'auto', 'math-verify' or 'plain'.")
        self.column, self.tolerance = column, tolerance
        self.plain = reader == "plain" or find_spec("math_verify") is None
        if self.plain and reader == "math-verify":
            raise ModuleNotFoundError(
                "`NumericAnswer(reader='math-verify')`: math-verify is not installed. Run `pip install math-verify`, "
                "or use reader='plain'."
            )
        if self.plain and reader == "auto":
            rank_zero_warn(
                "`NumericAnswer` reads plain numbers only (no LaTeX, no expressions), as math-verify is not installed. "
                "Run `pip install math-verify`, or choose so with reader='plain'."
            )

    def __call__(self, responses: list[str], **columns: list[Any]) -> list[float]:
        """Return 1 where the two numbers are the same, else 0.

        Raises:
            RewardError: The prompt set has no such column, or a row has no number in it.
        """
        answers = _column(self, self.column, columns)
        return [
            self._same(response, answer, row)
            for row, (response, answer) in enumerate(zip(responses, answers, strict=True))
        ]

    def _same(self, response: str, answer: Any, row: int) -> float:
        gold, found = (self._read(str(text)) for text in (answer, response))
        if gold in (None, []):
            raise RewardError(
                f"`NumericAnswer(column={self.column!r})`: no number is in {answer!r}, the answer of sample {row}."
            )
        if not self.plain:
            from math_verify import verify

            return float(verify(gold, found, timeout_seconds=_seconds()))
        return float(found is not None and abs(found - gold) <= self.tolerance * max(1.0, abs(gold)))

    def _read(self, text: str) -> Any:
        if self.plain:
            return plain_number(text)
        from math_verify import parse

        return parse(text, parsing_timeout=_seconds())


_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][+-]?\d+)?(?:\s*/\s*\d+)?")


def plain_number(text: str) -> float | None:
    r"""Return the number that a text ends on, or None.

    Args:
        text: Any text. `1,234.5`, `-3`, `2e-3` and `3/4` are numbers; a sign after a digit or a word is a hyphen.
    """
    boxed = re.findall(r"\\boxed\s*\{([^{}]*)\}", text)
    if boxed:
        text = boxed[-1]
    elif "####" in text:
        text = text.rsplit("####", 1)[1]
    found = [m for m in _NUMBER.finditer(text) if m[0]]
    if not found:
        return None
    last = found[-1]
    number = last[0]
    if number.startswith("-") and last.start() and (text[last.start() - 1].isalnum() or text[last.start() - 1] == ")"):
        number = number[1:]  # 12-7
    above, _, below = number.replace(",", "").partition("/")
    if below and not float(below):
        return None
    return float(above) / (float(below) if below else 1.0)


def _seconds() -> int | None:
    """How long math-verify may take for one answer: its alarm works in the main thread alone."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def _column(rule: Any, name: str, columns: dict[str, list[Any]]) -> list[Any]:
    if name not in columns:
        raise RewardError(f"`{type(rule).__name__}(column={name!r})`: there are only {', '.join(sorted(columns))}.")
    return columns[name]
