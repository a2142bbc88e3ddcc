"""What people read when a configuration is wrong: the option, where it stands, and what was probably meant."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

SECTIONS = {"sft": "sft", "reward": "ranking", "ppo": "ppo"}
"""The section of a configuration that only one stage has."""

STEPS = {"training_step", "validation_step", "test_step", "predict_step"}


def is_configuration_error(error: BaseException) -> bool:
    """Whether an error is about what the user asked for, found before any work was done.

    Once steps run, an error may be anybody's, and its traceback is worth more than a short message.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lit_ppo.rewards import RewardError

    kinds = (ValueError, TypeError, OSError, AttributeError, RewardError, MisconfigurationException)
    frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    ours = isinstance(error, kinds) or (isinstance(error, RuntimeError) and "check_keys" in frames)
    return ours and not frames & STEPS


def message_of(error: BaseException) -> str:
    """Return an error's message without the number that an OSError carries."""
    text = error.strerror if isinstance(error, OSError) and error.strerror and not error.filename else str(error)
    return text or type(error).__name__


def explain(message: str, options: Iterable[str], args: list[str]) -> str:
    """Turn the parser's message about an option that does not exist into one that says what was meant.

    Args:
        message: The parser's own.
        options: Every option of the command, dotted.
        args: The command line, for the YAML files that it names.

    Returns:
        One line for what is recognised, else the message as it is.
    """
    options = [option for option in options if not option.endswith(".help")]
    where = re.search(r'Parser key "([^"]+)"', message)
    if found := re.search(r"[Uu]nrecognized arguments: --?([^\s=]+)", message):
        return f"`{found[1]}` is not an option.{did_you_mean(nearest(found[1], options))}"
    if found := re.search(r"does not accept option '([^']+)'", message):
        key = found[1]
        hint = other_stage(options, args) or did_you_mean(nearest(key, options))
        return f"`{key}`{place(wrong_part(key, options), args)} is not an option.{hint}"
    if found := re.search(r"File does not exist: '?([^'\s]+)", message):
        return f"`--config`: there is no file {found[1]}."
    if found := re.search(r"given class_path '([^']+)':\s+Option '([^']+)' is not accepted", message):
        owner, key = found.groups()
        known = arguments_of(owner)
        hint = did_you_mean(nearest(key, known)) or f" Its options are: {', '.join(known)}."
        inside = f" in `{where[1]}`" if where else ""
        return f"`{key}`{place(key, args)}{inside} is not an option of {owner.rsplit('.', 1)[-1]}.{hint}"
    if found := re.search(r"Expected a dot import path string: (\S+)", message):
        name = found[1]
        near = nearest(name, class_names())
        hint = did_you_mean(near) or " Give its import path, `package.module.Class`."
        return f"`{where[1] if where else 'class_path'}`: no class `{name}`{place(name, args)} is known.{hint}"
    if where and (found := re.search(r"Expected an? <class '(\w+)'>\. Got value: (.*)", message)):
        return (
            f"`{where[1]}={found[2]}`{place(where[1].rsplit('.', 1)[-1], args, found[2])} must be of type {found[1]}."
        )
    if found := re.search(r"arguments are required: (.+)$", message):
        keys = [re.sub(r"^(fit|validate|test|predict)\.", "", key) for key in found[1].split(", ")]
        ways = " and ".join(f"`{key}`" for key in keys)
        return f"{ways} is missing. Set it in the YAML (--config) or on the command line (--{keys[0]} ...)."
    return message


def nearest(key: str, options: Iterable[str]) -> str | None:
    """Return the option most like `key`: the last part weighs as much as the whole path."""
    options = list(options)
    leaf = key.rsplit(".", 1)[-1]
    whole = difflib.get_close_matches(key, options, n=1, cutoff=0.7)
    if whole:
        return whole[0]
    leaves = {option.rsplit(".", 1)[-1]: option for option in reversed(options)}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    return leaves[close[0]] if close else None


def did_you_mean(near: str | None) -> str:
    """Return the question, or nothing."""
    return f" Did you mean `{near}`?" if near else ""


def other_stage(options: list[str], args: list[str]) -> str:
    """Return a sentence if a YAML of the command line is of another stage than the command, or nothing."""
    for stage in stages_of(config_files(args)):
        if not any(option.startswith(f"model.{SECTIONS[stage]}.") for option in options):
            return f" This is a configuration for `lit-ppo {stage} fit`."
    return ""


def stages_of(files: list[str]) -> list[str]:
    """Return the stages that YAML files are of, as far as they have a section that only one stage has."""
    found = []
    for name in files:
        text = Path(name).read_text(encoding="utf-8", errors="replace") if Path(name).is_file() else ""
        found += [stage for stage, section in SECTIONS.items() if re.search(rf"^ +{section}:", text, re.MULTILINE)]
    return found


def wrong_part(key: str, options: Iterable[str]) -> str:
    """Return the first part of a dotted key at which no option goes on."""
    parts, options = key.split("."), list(options)
    for i, part in enumerate(parts, 1):
        prefix = ".".join(parts[:i])
        if not any(option == prefix or option.startswith(prefix + ".") for option in options):
            return part
    return parts[-1]


def place(word: str, args: list[str], value: str = "") -> str:
    """Return " (file, line n)" where a YAML file of the command line has `word` as a key or value, or nothing.

    Args:
        word: The key, without the keys above it.
        args: The command line.
        value: What the line must have as well.
    """
    for name in config_files(args):
        path = Path(name)
        if not path.is_file():
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            text = line.split("#", 1)[0]
            if re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", text) and value in text:
                return f" ({name}, line {number})"
    return ""


def config_files(args: list[str]) -> list[str]:
    """Return the YAML files that a command line names."""
    files = []
    for i, arg in enumerate(args):
        if arg in ("-c", "--config") and i + 1 < len(args):
            files.append(args[i + 1])
        elif arg.startswith("--config="):
            files.append(arg.split("=", 1)[1])
    return files


def arguments_of(class_path: str) -> list[str]:
    """Return the names of the arguments of a class."""
    import inspect

    from jsonargparse._util import import_object

    found = import_object(class_path)
    return [name for name in inspect.signature(found).parameters if name not in ("self", "args", "kwargs")]


def class_names() -> list[str]:
    """Return the names of the classes that a YAML may use without their import path."""
    from lightning.pytorch import callbacks, loggers, strategies

    import lit_ppo.callbacks as ours

    return [name for home in (ours, callbacks, loggers, strategies) for name in home.__all__]
