"""Which parameters a pattern of `FreezeParameters` means: globs, regular expressions and presets."""

from __future__ import annotations

import re

from torch import nn

from lit_ppo.callbacks._common import clean_name, matches, nearest, prefixes

PRESETS = ("embeddings", "norms", "all-but-head", "first:N", "last:N")
HEADS = ("score", "classifier", "lm_head", "head", "heads", "fc", "v_head", "value_head")


def check_pattern(pattern: str) -> None:
    """Check what can be checked without a model.

    Raises:
        ValueError: A bad regular expression, or `first:` or `last:` without a number of layers.
    """
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"`FreezeParameters({pattern!r})` is not a regular expression: {error}.") from None
    elif re.match(r"(first|last)(:|$)", pattern) and not re.fullmatch(r"(first|last):[1-9]\d*", pattern):
        head, _, rest = pattern.partition(":")
        raise ValueError(
            f"`FreezeParameters({pattern!r})`: `{head}:N` needs a number of layers >= 1, got {rest!r}. "
            f"(A submodule of that name is `{head}.*`.)"
        )


def parameters(pl_module: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter that could train, under all its names (tied weights have several)."""
    named = pl_module.named_parameters(remove_duplicate=False)
    return {clean_name(n): p for n, p in named if p.is_floating_point() or p.is_complex()}


def parents(name: str) -> list[str]:
    """Return the names of everything a dotted name lies in: `a.b.c` in `a` and `a.b`."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def tied(pl_module: nn.Module, names: set[str]) -> set[str]:
    """Return `names`, and every other name of the same parameters."""
    named = parameters(pl_module)
    tensors = {id(named[n]) for n in names}
    return {n for n, p in named.items() if id(p) in tensors}


def match(pl_module: nn.Module, pattern: str, option: str) -> set[str]:
    """Return the names of the parameters that a pattern means.

    Args:
        pl_module: Whose parameters.
        pattern: A glob, `re:...`, or, for the option `freeze`, a preset.
        option: `freeze` or `keep`, for the error.

    Raises:
        ValueError: It matches nothing, or the preset does not apply.
    """
    names = set(parameters(pl_module))
    if option == "freeze" and (found := _preset(pl_module, pattern, names)) is not None:
        return found
    if pattern.startswith("re:"):
        matched = {n for n in names if re.search(pattern[3:], n)}
    else:
        matched = {n for n in names if matches(n, pattern)}
    if not matched:
        known = prefixes(names) | (set(PRESETS) if option == "freeze" else set())
        raise ValueError(
            f"`FreezeParameters({option}={pattern!r})` matches no parameter of {type(pl_module).__name__}."
            f"{nearest(pattern.removeprefix('re:'), known)}"
        )
    return matched


def _preset(pl_module: nn.Module, pattern: str, names: set[str]) -> set[str] | None:
    """The names a preset stands for; None if `pattern` is none."""
    modules = {clean_name(n): m for n, m in pl_module.named_modules(remove_duplicate=False)}
    owners = {n: modules[n.rpartition(".")[0]] for n in names}
    if pattern == "embeddings":
        matched = {n for n, m in owners.items() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
        missing = "no `nn.Embedding`"
    elif pattern == "norms":
        matched = {n for n, m in owners.items() if "norm" in type(m).__name__.lower() and not list(m.children())}
        missing = "no normalisation layer"
    elif pattern == "all-but-head":
        head = {n for n in names if set(n.split(".")[:-1]) & set(HEADS) and not re.search(r"\.\d+\.", n)}
        matched = names - tied(pl_module, head) if head else set()
        missing = f"no head (a submodule called {', '.join(HEADS)}); give `freeze='*'` and your head as `keep`"
    elif found := re.fullmatch(r"(first|last):(\d+)", pattern):
        matched = _layers(pl_module, pattern, names, last=found[1] == "last", count=int(found[2]))
        missing = "no stack of layers (a ModuleList or Sequential of one class)"
    else:
        return None
    if not matched:
        raise ValueError(f"`FreezeParameters({pattern!r})`: {type(pl_module).__name__} has {missing}.")
    return matched


def _layers(pl_module: nn.Module, pattern: str, names: set[str], *, last: bool, count: int) -> set[str]:
    matched: set[str] = set()
    for name, layers in _stacks(pl_module).items():
        if count > len(layers):
            raise ValueError(f"`FreezeParameters({pattern!r})`: `{name}` has {len(layers)} layers only.")
        for layer in layers[-count:] if last else layers[:count]:
            matched |= {n for n in names if n.startswith(f"{name}.{layer}.")}
    return matched


def _stacks(pl_module: nn.Module) -> dict[str, list[str]]:
    """The outermost lists of at least two modules of one class that have parameters, and the names in them."""
    found: dict[str, list[str]] = {}
    for raw, module in pl_module.named_modules():
        name = clean_name(raw)
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(p in found for p in parents(name)):
            continue
        layers = dict(module.named_children())
        one_class = len({type(m) for m in layers.values()}) == 1
        if one_class and len(layers) > 1 and all(any(True for _ in m.parameters()) for m in layers.values()):
            found[name] = [clean_name(n) for n in layers]
    return found
