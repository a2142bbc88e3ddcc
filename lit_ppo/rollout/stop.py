"""Responses that end with a text rather than a token."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class StopStrings:
    """Finds where a response first contains one of some texts. The text itself belongs to the response.

    Args:
        strings: One or more, none empty.
        decode: Turns token ids into text, special tokens included.
    """

    def __init__(self, strings: list[str], decode: Callable[[list[int]], str]) -> None:
        self.strings, self.decode = strings, decode
        self.window = (
            max(len(s.encode()) for s in strings) + 4
        )  # a token is a byte or more; some begin half a character

    def end(self, ids: list[int], known: int = 0) -> int | None:
        """Return the length at which the first of the texts is complete, or None.

        Args:
            ids: Response tokens.
            known: So many of the first tokens are known to complete none.
        """
        if not self._in(ids[max(0, known + 1 - self.window) :]):
            return None
        ends = range(known + 1, len(ids) + 1)
        return next((n for n in ends if self._in(ids[max(0, n - self.window) : n])), None)

    def _in(self, ids: list[int]) -> bool:
        text = self.decode(ids)
        return any(s in text for s in self.strings)


class StopWatch:
    """A stopping criterion of transformers' `generate`: ends each row at its stop string, and remembers where.

    Args:
        strings: What ends a response.
        prompt: Width of the prompts.
        rows: Number of rows.
    """

    def __init__(self, strings: StopStrings, prompt: int, rows: int) -> None:
        self.strings, self.prompt = strings, prompt
        self.ends: list[int | None] = [None] * rows

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """(B, P + t) ids -> (B,) bool, True for rows that have ended."""
        responses = input_ids[:, self.prompt :].tolist()
        for row, ids in enumerate(responses):
            if self.ends[row] is None:
                self.ends[row] = self.strings.end(ids, len(ids) - 1)
        return input_ids.new_tensor([end is not None for end in self.ends]).bool()
