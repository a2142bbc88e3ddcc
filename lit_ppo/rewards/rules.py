"""Small rewards that need no model. Functions work by import path; classes are made in Python.

Example::

    rewards:
      - source: lit_ppo.rewards.rules.exact_match
      - {source: lit_ppo.rewards.rules.length_penalty, weight: 0.001}
"""

from __future__ import annotations

import re
from typing import Any

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
        if self.column not in columns:
            raise RewardError(f"`ExactMatch(column={self.column!r})`: there are only {', '.join(sorted(columns))}.")
        return exact_match(responses, columns[self.column])


class RegexFormat:
    r"""1 where a regular expression matches the response, else 0.

    Args:
        pattern: As for `re.search`; anchor it (`^...$` or `\A...\Z`) to judge the whole response.
        flags: As for `re.compile`, such as `re.DOTALL`.

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
