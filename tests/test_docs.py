"""What the documentation and the examples show works: commands parse or run, YAML is accepted, Python imports."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import stages
import tiny
import yaml

from lit_ppo.cli import COMMANDS, STAGES, main
from lit_ppo.cli.errors import config_files, stages_of
from lit_ppo.plan.cards import parse_gpus

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # a resumed run has a folder of its own
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),  # Lightning's calls
]

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
SHELL = ("bash", "sh", "shell", "console")


def blocks(*languages: str) -> list[pytest.param]:
    """Every fenced block of these languages, named by page and line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^( *)```(\w+)[^\n]*\n(.*?)^ *```", text, re.M | re.S):
            if match[2] in languages:
                line = text[: match.start()].count("\n") + 2
                code = re.sub(f"^{match[1]}", "", match[3], flags=re.M)
                found.append(pytest.param(code, id=f"{page.name}:{line}"))
    return found


def commands() -> list[pytest.param]:
    """Every command line that starts with lit-ppo, in shell blocks and in the comments of the examples."""
    found = []
    for block in blocks(*SHELL):
        text = block.values[0].replace("\\\n", " ")
        lines = [line.removeprefix("$ ").split(" #")[0].strip() for line in text.splitlines()]
        found += [pytest.param(line, id=f"{block.id} {line}") for line in lines if line.startswith("lit-ppo")]
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        lines = re.findall(
            r"^#.*?(lit-ppo (?:sft |reward |ppo )?(?:fit|validate|test|predict|generate|export|plan) .*)$",
            path.read_text(),
            re.M,
        )
        found += [pytest.param(line, id=f"{path.name} {line}") for line in lines]
    return found


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the examples to be in, as in a checkout."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("examples", None)  # another test's copy
    sys.modules.pop("examples.rewards", None)
    return tmp_path


def stage_of(given: dict) -> list[str]:
    """What a command line of these options begins with: options of a stage's own tell it."""
    model = given.get("model", {})
    return ["sft"] if "sft" in model else ["reward"] if "ranking" in model else []


def accepts(argv: list[str]) -> None:
    """Parse a command line without running it."""
    stage = [argv.pop(0)] if argv[0] in STAGES else []
    if argv[0] in ("generate", "export", "doctor"):
        import_module(COMMANDS[argv[0]][0]).parse(argv)
        return
    if argv[0] == "plan":
        args, rest = import_module(COMMANDS["plan"][0]).parse(argv)
        parse_gpus(args.gpus)
        stage = stage or stages_of(config_files(rest))[:1]
        argv = ["fit", *rest]
    argv = [*stage, *argv]
    with pytest.raises(SystemExit) as stop:
        main(argv if "--help" in argv else [*argv, "--print_config"])
    assert stop.value.code == 0


@pytest.mark.parametrize("line", commands())
def test_every_command_line_is_accepted(line, project):
    argv = shlex.split(line)[1:]
    if argv and not argv[0].startswith("-"):
        accepts(argv)
    else:
        assert main(argv) == 0


EXAMPLES = [pytest.param(p.read_text(), id=p.name) for p in sorted((ROOT / "examples").rglob("*.yaml"))]


@pytest.mark.parametrize("text", [*blocks("yaml", "yml"), *EXAMPLES])
def test_every_yaml_is_accepted(text, project, capsys):
    given = yaml.safe_load(text)
    if not {"model", "data", "trainer", "seed_everything"} & given.keys():
        given = {"model": given}  # a part of a module's options
    Path("page.yaml").write_text(yaml.safe_dump(given))
    stage = stage_of(given)
    role = "reward" if stage == ["reward"] else "actor"
    source = [] if role in given.get("model", {}) else [f"--model.{role}=some-model"]
    accepts([*stage, "fit", "--config", "page.yaml", *source])


@pytest.mark.parametrize("code", blocks("python"))
def test_every_python_block_compiles_and_finds_what_it_imports(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            home = import_module(node.module)
            for alias in node.names:
                assert hasattr(home, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_key_of_an_example_is_explained(path):
    groups = r"class_path|init_args|^\s+(actor|critic|reference|reward|lora|sampling|ppo|optim|callbacks):$"
    for above, line in itertools.pairwise(path.read_text().splitlines()):
        if re.match(r"\s+(- )?\w+:", line) and not re.search(groups, line):
            explained = above.lstrip().startswith("#") or re.search(r"^\s*- source", line)
            assert explained, f"{path.name} has no comment above {line.strip()!r}"


def test_the_readme_s_module_trains(project):
    """The README's Python, as it stands but for the model and the length of its responses."""
    code = next(b.values[0] for b in blocks("python") if b.id.startswith("README") and "trainer.fit" in b.values[0])
    for shown, small in {
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': repr(tiny.folder()),
        "max_new_tokens=64": "max_new_tokens=4",
        "batch_size=64)": "batch_size=8)",
        "Trainer(": 'Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, ',
    }.items():
        assert shown in code
        code = code.replace(shown, small)
    rows = [f'{{"prompt": "{row}"}}' for row in tiny.rows(20)]
    Path("prompts.jsonl").write_text("\n".join(rows))
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert Path("my-model/model.safetensors").is_file()


def test_the_quickstart_trains_and_what_follows_works(project, capsys):
    """The commands of the README, one after the other, on a model that fits a test."""
    small = ["--model.actor", tiny.folder(), "--model.sampling.max_new_tokens=6", "--trainer.accelerator=cpu"]
    run = ["--config", "examples/quickstart.yaml", *small, "--trainer.enable_progress_bar=false"]
    assert main(["fit", *run, "--trainer.max_epochs=1"]) == 0
    assert main(["fit", *run, "--trainer.max_epochs=2", "--ckpt_path=last"]) == 0
    assert len(list(Path("outputs/quickstart").glob("version_*/metrics.csv"))) == 2
    assert main(["validate", *run, "--ckpt_path=last"]) == 0
    assert "val/reward_mentions" in capsys.readouterr().out
    assert main(["generate", "--ckpt=outputs/quickstart", "--prompt", "w1", "--max-new-tokens=3"]) == 0
    assert main(["export", "--ckpt=outputs/quickstart", "--to=my-model"]) == 0
    assert Path("my-model/model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:Of . pairs of:UserWarning")  # the tiny tokenizer knows few words
def test_the_stages_train_one_after_the_other(project, capsys):
    """The commands of docs/three_stages.md, on a model that fits a test."""
    small = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--data.max_length=null"]
    run = ["sft", "fit", "--config", "examples/sft.yaml", *small, "--trainer.max_epochs=1"]
    assert main([*run, "--model.actor", tiny.folder(), f"--data.chat_template={stages.TEMPLATE}"]) == 0
    assert main(["export", "--ckpt=outputs/sft", "--to=outputs/sft-model"]) == 0
    assert main(["reward", "fit", "--config", "examples/reward_model.yaml", *small]) == 0
    assert main(["export", "--ckpt=outputs/reward", "--to=outputs/reward-model"]) == 0
    more = ["--model.actor=outputs/sft-model", "--model.reward=outputs/reward-model", "--trainer.max_epochs=1"]
    more += ["--model.sampling.max_new_tokens=4", *small[:2]]
    assert main(["ppo", "fit", "--config", "examples/quickstart.yaml", *more]) == 0
