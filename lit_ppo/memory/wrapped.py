"""Standing in for a method of one object."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any


class Wrapped:
    """Takes the place of a method on its owner until `undo`; in a copy of the owner it is the copy's own method."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner, self._name, self._function = owner, name, function
        self._before = vars(owner).get(name)  # a compiled module has methods of its instance
        update_wrapper(self, getattr(owner, name))
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the stand-in."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self._owner, self._name)) if self._before is None else (_same, (self._before,))

    def undo(self) -> None:
        """Put back what was there, unless it was replaced since."""
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)
            if self._before is not None:
                setattr(self._owner, self._name, self._before)


def _same(value: Any) -> Any:
    return value
