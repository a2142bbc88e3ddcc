"""What the `source` of a reward is: a folder, an import path or the id of a model on the hub."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from torch import nn

from lit_ppo.rewards.base import RewardError

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_EXPECTED = (
    "A reward's `source` is a folder with a sequence-classification model (config.json, weights, tokenizer), "
    "an import path such as `package.module.function`, or a hub id such as `owner/name`."
)


def resolve(source: str, options: dict[str, Any] | None = None) -> Any:
    """Return the Python object that an import path names, or the string itself where it names a model.

    An existing folder is a model, whatever its name. The current directory is searched for modules.

    Args:
        source: Folder, import path or hub id.
        options: Arguments of the class, or some of the function, that an import path names.

    Raises:
        RewardError: A path that does not exist, a name alone, an import path of which a part is missing or cannot
            be imported, or options that it does not take.
    """
    path = Path(source).expanduser()
    if source and path.is_dir():
        return source
    if _IMPORT_PATH.fullmatch(source) and not path.exists():
        return _instance(source, _import(source), options or {})
    if not source or path.exists():
        raise RewardError(f"`reward.source={source!r}` is {'a file' if source else 'empty'}. {_EXPECTED}")
    if source.startswith((".", "~", "/")) or source.endswith("/") or "\\" in source or source.count("/") > 1:
        raise RewardError(f"`reward.source={source!r}` does not exist{_nearby(path)}. {_EXPECTED}")
    if source.isidentifier():
        raise RewardError(
            f"`reward.source={source!r}` is no folder in {os.getcwd()}, and a function is given with its module, "
            f"`module.{source}`. {_EXPECTED}"
        )
    if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", source):
        raise RewardError(f"`reward.source={source!r}` is neither a folder, an import path nor a hub id. {_EXPECTED}")
    return source


def _nearby(path: Path) -> str:
    parent = next(p for p in path.absolute().parents if p.is_dir())
    there = sorted(p.name for p in parent.iterdir() if not p.name.startswith("."))
    near = difflib.get_close_matches(path.name, there, n=3) or there[:8]
    return f" ({parent} holds: {', '.join(near)})" if near else f" ({parent} is empty)"


def _import(source: str) -> Any:
    """Import `package.module.attribute` or `package.module:attribute`; attributes may be nested."""
    cwd = os.getcwd()
    if cwd not in sys.path and "" not in sys.path:
        sys.path.insert(0, cwd)  # as `python -m` does; stays, for what the function imports when it is called
    importlib.invalidate_caches()
    module_path, colon, attributes = source.partition(":")
    parts = module_path.split(".")
    names = attributes.split(".") if colon else []
    module, imported = None, 0
    for imported in range(len(parts) if colon else len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:imported])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # only when it is this module, or a package above it, that is missing: not something that it imports
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise _broken(source, module_name, error) from error
            continue
        except Exception as error:
            raise _broken(source, module_name, error) from error
        break
    if module is None:
        raise _missing_module(source, [], parts[0])
    names = parts[imported:] + names
    found: Any = module
    for depth, name in enumerate(names):
        if not hasattr(found, name):
            if depth == 0 and (len(names) > 1 or colon) and imported < len(parts) and hasattr(module, "__path__"):
                raise _missing_module(source, parts[:imported], name)
            near = difflib.get_close_matches(name, [n for n in dir(found) if not n.startswith("__")], n=3)
            owner = ".".join([module.__name__, *names[:depth]])
            hint = f" Did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else ""
            raise RewardError(f"`reward.source={source!r}`: `{owner}` has no attribute `{name}`.{hint}")
        found = getattr(found, name)
    return found


def _missing_module(source: str, package: list[str], name: str) -> RewardError:
    where = sys.modules[".".join(package)].__path__ if package else None
    there = [m.name for m in pkgutil.iter_modules(where)]
    near = difflib.get_close_matches(name, there, n=3)
    hint = f" Did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else ""
    return RewardError(
        f"`reward.source={source!r}`: there is no module `{'.'.join([*package, name])}`. The installed packages and "
        f"the current directory, {os.getcwd()}, were searched.{hint} {_EXPECTED}"
    )


def _broken(source: str, module: str, error: Exception) -> RewardError:
    return RewardError(
        f"`reward.source={source!r}`: importing `{module}` failed with {type(error).__name__}: {error}. "
        "Fix that module or install what it imports."
    )


def _instance(source: str, found: Any, options: dict[str, Any]) -> Any:
    """Make an instance of a class; bind options to a function."""
    if not callable(found) or isinstance(found, nn.Module):
        return found
    try:
        parameters = inspect.signature(found).parameters
    except (ValueError, TypeError):  # FunctionReward says what to do about it
        return functools.partial(found, **options) if options else found
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in options:
        if name not in parameters and not open_ended:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else f" It takes {', '.join(f'`{n}`' for n in parameters)}."
            raise RewardError(f"`reward.source={source!r}` has no option `{name}`.{hint}")
    if not inspect.isclass(found):
        return functools.partial(found, **options) if options else found
    needed = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in options
    ]
    if needed:
        given = ", ".join(f"{name}: ..." for name in needed)
        raise RewardError(
            f"`reward.source={source!r}` is a class that needs {', '.join(f'`{n}`' for n in needed)}. Give `options: "
            f"{{{given}}}` beside `source`, or pass an instance from Python."
        )
    try:
        return found(**options)
    except (TypeError, ValueError) as error:
        raise RewardError(f"`reward.source={source!r}` refuses its options: {error}") from error
