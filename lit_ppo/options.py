"""Checks of options: each error names the option and its value, and says what to write."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields
from numbers import Integral, Number, Real
from typing import Any, TypeVar

T = TypeVar("T")


def from_dict(cls: type[T], value: T | dict[str, Any] | None) -> T:
    """Accept a dataclass, the dict of its fields, or None for its defaults.

    Checkpoints store plain dicts (a pickled dataclass does not load with ``weights_only=True``).

    Args:
        cls: The dataclass to build.
        value: An instance, a dict of fields, or None.

    Raises:
        ValueError: A key that is not a field; the nearest field is named.
        TypeError: Neither an instance nor a dict.
    """
    if value is None:
        return cls()
    if isinstance(value, cls):
        for f in fields(cls):  # type: ignore[arg-type]
            setattr(value, f.name, _python(getattr(value, f.name)))
        return value
    if not isinstance(value, dict):
        raise TypeError(f"Expected {cls.__name__} or a dict of its fields, got {type(value).__name__}: {value!r}.")
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in value:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else f" Its options are: {', '.join(names)}."
            raise ValueError(f"`{key}` is not an option of {cls.__name__}.{hint}")
    return cls(**{key: _python(option) for key, option in value.items()})


def _python(value: Any) -> Any:
    """Return numpy's numbers as Python's: in a checkpoint, the former do not load with ``weights_only=True``."""
    return value.item() if isinstance(value, Number) and hasattr(value, "item") else value


def choice(owner: str, name: str, value: str, options: Sequence[str]) -> None:
    """Raise unless `value` is one of `options`; `owner` and `name` say which option it is."""
    if value not in options:
        near = difflib.get_close_matches(str(value), options, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ValueError(
            f"`{owner}{'.' * bool(owner)}{name}={value!r}` must be one of {', '.join(map(repr, options))}.{hint}"
        )


def check_types(owner: str, options: Any) -> None:
    """Raise unless every number and switch of a dataclass is one, and no number infinite."""
    for f in fields(options):
        value, kind = getattr(options, f.name), str(f.type).removesuffix(" | None")
        wanted = {"int": (Integral, "a whole number"), "float": (Real, "a number"), "bool": (bool, "true or false")}
        if kind not in wanted or (value is None and kind != f.type):
            continue
        if not isinstance(value, wanted[kind][0]) or (kind != "bool" and isinstance(value, bool)):
            raise TypeError(f"`{owner}.{f.name}={value!r}` must be {wanted[kind][1]}, and is a {type(value).__name__}.")
        if value in (float("inf"), -float("inf")):
            raise ValueError(f"`{owner}.{f.name}={value!r}` must be a finite number.")


def at_least(owner: str, name: str, value: float | None, low: float, *, strict: bool = False, why: str = "") -> None:
    """Raise if a number is below `low`, or with `strict` not above it; `why` ends the message. None is no number."""
    if value is None:
        return
    ok = value > low if strict else value >= low
    if not ok:  # NaN is not ok either
        raise ValueError(
            f"`{owner}.{name}={value!r}` must be {'>' if strict else '>='} {low:g}.{' ' + why if why else ''}"
        )


def at_most(owner: str, name: str, value: float | None, high: float, why: str = "") -> None:
    """Raise if a number is above `high`; `why` ends the message. None is no number."""
    if value is not None and not value <= high:
        raise ValueError(f"`{owner}.{name}={value!r}` must be <= {high:g}.{' ' + why if why else ''}")
