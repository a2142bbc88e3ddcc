"""What works on this machine, and which known mistakes a configuration makes: `lit-ppo doctor`."""

from __future__ import annotations

from dataclasses import dataclass

STATUSES = ("ok", "info", "warn", "missing", "error")
"""From good to bad; only an `error` makes a machine or a configuration unusable."""


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    status: str
    """One of STATUSES."""
    what: str
    """What was found, and what it is for or why it matters."""
    fix: str = ""
    """A command, or the line of YAML to write; empty where nothing is to be done."""
    option: str = ""
    """The dotted name of the option at fault, to find its place in the file."""
