"""What is installed is what is in the repository, and importing it is cheap."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import lit_ppo

ROOT = Path(__file__).parent.parent


def python(code: str, cwd: Path = ROOT, *flags: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked(*folders: str) -> set[str]:
    """The Python files that git knows in these folders."""
    listed = subprocess.run(["git", "ls-files", *folders], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    return {name for name in listed.split() if name.endswith(".py")}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the sdist, and the wheel that is built from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A folder into which the wheel is installed, without its dependencies."""
    target = tmp_path_factory.mktemp("site")
    [wheel] = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(command, check=True, capture_output=True)
    return target


def test_wheel_and_sdist_hold_every_file_as_a_real_file(built):
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    expected = tracked("lit_ppo") | {f"lit_ppo/{name}" for name in tracked("callbacks")}
    assert "lit_ppo/callbacks/__init__.py" in expected
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert expected <= names
        assert "lit_ppo/py.typed" in names
        assert not [name for name in names if name.startswith(("tests/", "callbacks/", "examples/"))]
        assert archive.read("lit_ppo/callbacks/progress.py") == (ROOT / "callbacks" / "progress.py").read_bytes()
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[-1]: member for member in archive.getmembers()}
        assert expected <= members.keys()
        assert members["lit_ppo/callbacks/progress.py"].isfile()
        assert "README.md" in members


def test_the_wheel_works_elsewhere(installed, tmp_path):
    code = f"""
import sys
sys.path = [{str(installed)!r}] + [p for p in sys.path if p not in ("", {str(ROOT)!r})]
sys.meta_path = [f for f in sys.meta_path if "editable" not in str(f).lower()]
import lit_ppo, lit_ppo.callbacks
from lit_ppo.callbacks import GradientCheckpointing
from lit_ppo.cli import main
main(["--help"])
print(lit_ppo.__file__, lit_ppo.callbacks.__file__, lit_ppo.__version__)
"""
    out = python(code, tmp_path)
    assert "usage: lit-ppo" in out
    where, callbacks, version = out.splitlines()[-1].split()
    assert Path(where).parent == installed / "lit_ppo"
    assert Path(callbacks).parent == installed / "lit_ppo" / "callbacks"
    assert version == lit_ppo.__version__
    script = (installed / "bin" / "lit-ppo").read_text()
    assert "from lit_ppo.cli import main" in script


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == lit_ppo.__version__


def added(before: str, statement: str) -> set[str]:
    """What `statement` imports beyond the standard library in a fresh interpreter that has done `before`: its roots."""
    code = f"import json, sys; {before}; old = set(sys.modules); {statement}"
    code += "; print(json.dumps([*(sys.modules.keys() - old)]))"
    return {name.split(".")[0] for name in json.loads(python(code))} - sys.stdlib_module_names - {"_typing"}


def test_importing_the_package_costs_nothing():
    assert added("pass", "import lit_ppo") == {"lit_ppo"}


def test_importing_the_module_adds_no_library_to_lightnings_own_and_touches_no_gpu():
    everything = "import lit_ppo.module, lit_ppo.data, lit_ppo.export, lit_ppo.callbacks"
    code = f"{everything}; assert not torch.cuda.is_initialized()"
    assert added("import torch, lightning.pytorch", code) == {"lit_ppo"}


@pytest.mark.slow  # interpreters that each import torch, several times
def test_importing_the_module_takes_about_as_long_as_lightning():
    def seconds(what: str) -> float:
        code = f"import time; start = time.perf_counter(); import {what}; print(time.perf_counter() - start)"
        return min(float(python(code)) for _ in range(3))

    assert seconds("lit_ppo.module") <= 1.5 * seconds("lightning.pytorch")
