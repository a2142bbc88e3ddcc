"""How the package is built: what may import what, and what every file keeps to.

An import goes to a lower layer, or stays inside its own package: LAYERS are the layers, from the bottom.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lit_ppo

LAYERS = [
    {"options"},  # how an option is refused
    {"config", "memory", "hooks", "hf_folder", "ranks"},  # options; for any LightningModule; agreements of processes
    {"experience", "algo", "metrics", "optim", "output", "speed", "callbacks"},  # mathematics; for any LightningModule
    {"roles", "data"},  # models, prompts
    {"rollout", "rewards", "sharding"},  # text from models, numbers from text, models on many devices
    {"checks", "micro", "plan"},  # what can be said of the two before a run; how batches are cut; the memory of it
    {"preflight", "checkpoint", "summary", "worst_case"},  # what is around the iterations
    {"base"},  # what PPO and the stages before it share
    {"harness"},  # Lightning's hooks
    {"module", "stages"},  # the algorithm, and what comes before it
    {"export", "doctor"},  # what comes after it, and instead of trying
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = {"transformers", "peft", "bitsandbytes", "datasets", "pandas", "triton", "vllm"}
"""Imported inside functions: a mistake in the options is reported at once, and what is not used is not needed."""
MAY_IMPORT = {  # besides Python's own; packages that are not named here may import anything
    "algo": {"torch"},
    "config": set(),
    "options": set(),
    "experience": {"torch"},
    "hooks": {"lightning"},
    "memory": {"torch", "lightning", "lightning_utilities", "typing_extensions"},
}

ROOT = Path(lit_ppo.__file__).parent
FILES = sorted(
    [p for p in ROOT.rglob("*.py") if "callbacks" not in p.parts] + list((ROOT.parent / "callbacks").rglob("*.py"))
)


def package(path: Path) -> str:
    """The part of lit_ppo that a file belongs to."""
    if ROOT not in path.parents:
        return "callbacks"
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(node: ast.AST) -> Iterator[str]:
    """Full names of what is imported in a node and below it, but for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import of {child.module}"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from imports(child)


def ours(name: str) -> str | None:
    """The part of lit_ppo that an import is of, if any."""
    parts = name.split(".")
    if parts[0] != "lit_ppo" or parts[1:] == ["__version__"]:
        return None
    return lit_ppo._HOMES.get(parts[1], name).split(".")[1]


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


PARTS = [p for p in FILES if p != ROOT / "__init__.py"]  # which names everything, and imports it when it is used


@pytest.mark.parametrize("path", PARTS, ids=ids)
def test_imports_point_one_way(path: Path) -> None:
    here = package(path)
    assert here in LEVEL, f"say in LAYERS where {here} belongs"
    for name in imports(ast.parse(path.read_text())):
        there = ours(name)
        if there is not None and there != here:
            assert LEVEL[there] < LEVEL[here], f"{here} imports {name}"
            assert here != "callbacks" or there in ("memory", "hooks", "hf_folder"), (
                f"callbacks are for any LightningModule: {name}"
            )


@pytest.mark.parametrize("path", [p for p in PARTS if package(p) in MAY_IMPORT], ids=ids)
def test_what_lies_beneath_everything_needs_little(path: Path) -> None:
    allowed = MAY_IMPORT[package(path)] | set(sys.stdlib_module_names) | {"lit_ppo"}
    assert {name.split(".")[0] for name in imports(ast.parse(path.read_text()))} <= allowed


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_files(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 420, "over about 400 lines a file is two ideas"
    tree = ast.parse(text)
    top = {name.split(".")[0] for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
           for name in imports(ast.Module([node], []))}  # fmt: skip
    if path.stem.endswith("kernels"):  # Triton reads the source of what it compiles: it cannot stand inside a function
        top.discard("triton")
    assert not top & HEAVY, "import it inside the function that needs it"
    assert ast.get_docstring(tree), "a module says what it is"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            public = [n for n in [node, *node.body] if isinstance(n, ast.ClassDef | ast.FunctionDef)]
            for child in public if not node.name.startswith("_") else []:
                excused = any(ast.unparse(d) in ("override", "overload") for d in child.decorator_list)
                documented = ast.get_docstring(child) or excused or child.name.startswith("_")
                assert documented, f"{node.name}.{child.name} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_the_rules_can_tell() -> None:
    source = "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\n"
    source += "from lit_ppo import PPOLightningModule, config\ndef f():\n    import lit_ppo.rewards\n"
    found = list(imports(ast.parse(source)))
    assert [ours(name) for name in found[2:]] == ["module", "config", "rewards"]
    assert ours("torch.nn") is None
    assert "a" not in found


def test_the_public_names_are_where_they_are_said_to_be() -> None:
    for name in lit_ppo.__all__:
        assert getattr(lit_ppo, name).__module__.startswith(lit_ppo._HOMES[name])
    with pytest.raises(AttributeError, match="no attribute 'PPO'"):
        lit_ppo.PPO  # noqa: B018


def test_callbacks_are_real_files_under_one_name() -> None:
    link = ROOT / "callbacks"
    assert link.is_symlink(), "lit_ppo/callbacks is a link to callbacks/ (on Windows: git config core.symlinks true)"
    assert link.resolve() == ROOT.parent / "callbacks"
