"""Rewards for quickstart.yaml: functions of the responses and of the other columns of the prompts."""

from __future__ import annotations


def mentions(responses: list[str], keyword: list[str]) -> list[float]:
    """1 where a response uses its keyword; `keyword` is a column of prompts.jsonl."""
    return [float(word in response.lower()) for response, word in zip(responses, keyword, strict=True)]


def brevity(responses: list[str]) -> list[float]:
    """Minus the number of words of each response."""
    return [-float(len(response.split())) for response in responses]
