"""The example, the documentation's code and the command line, as a user would run them."""

import re
import runpy
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

import lit_ppo.callbacks
from lit_ppo.callbacks import FreezeParameters, GradientCheckpointing, QuantizeModules

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "callbacks.md").read_text()
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "add_one_callback.py"))
pytestmark = [
    pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode"),
    pytest.mark.filterwarnings("ignore:.*no logger configured.*"),
]


def test_the_example_learns_with_any_callbacks():
    bare = EXAMPLE["main"]([])
    assert EXAMPLE["main"](["checkpointing"]) == bare
    others = [EXAMPLE["main"](names) for names in (["freeze"], ["quantize"], ["oom"], ["oom", "quantize", "freeze"])]
    assert others[2] == pytest.approx(bare, rel=1e-4)
    assert all(0.5 * bare < other < 2 * bare for other in others)
    together = ["checkpointing", "freeze", "quantize", "oom"]
    assert EXAMPLE["main"](together) == pytest.approx(EXAMPLE["main"](together[::-1]), rel=1e-4)


@pytest.mark.parametrize("names", re.findall(r"add_one_callback.py +([a-z ]*)#", EXAMPLE["__doc__"]))
def test_the_example_s_commands_run(names, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["add_one_callback.py", *names.split()])
    runpy.run_path(str(ROOT / "examples" / "add_one_callback.py"), run_name="__main__")
    assert "loss after training" in capsys.readouterr().out


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", DOCS, flags=re.DOTALL))
def test_code_in_the_documentation_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "callbacks.md", "exec"), {})


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # by Lightning's CLI
def test_yaml_in_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lit"])
    (config,) = re.findall(r"```yaml\n(.*?)```", DOCS, flags=re.DOTALL)
    path = tmp_path / "config.yaml"
    path.write_text(config)
    quiet = {
        "accelerator": "cpu",
        "max_steps": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    data = DataLoader(EXAMPLE["torch"].randn(8, 64), batch_size=4)
    cli = LightningCLI(
        EXAMPLE["Distillation"],
        args=["--config", str(path)],
        run=False,
        trainer_defaults=quiet,
        save_config_callback=None,
        seed_everything_default=0,
    )
    cli.trainer.fit(cli.model, data)
    kinds = {type(c): c for c in cli.trainer.callbacks}
    assert kinds[GradientCheckpointing].bytes_saved > 0
    assert kinds[QuantizeModules].reports["teacher"].layers == 2
    assert kinds[FreezeParameters].freeze == ["norms", r"re:blocks\.[01]\."]


@pytest.mark.parametrize("callback", [GradientCheckpointing, QuantizeModules, FreezeParameters])
def test_the_documentation_names_every_option(callback):
    import inspect

    options = [p for p in inspect.signature(callback.__init__).parameters if p != "self"]
    tables = set(re.findall(r"^`?([a-z_]+)`?(?:, `([a-z_]+)`)? \|", DOCS, flags=re.MULTILINE))
    named = {name for pair in tables for name in pair}
    assert options
    assert named.issuperset(options)


def test_unknown_names_are_not_there():
    assert set(lit_ppo.callbacks.__all__) >= {"FreezeParameters", "GradientCheckpointing", "QuantizeRewardModel"}
    for name in lit_ppo.callbacks.__all__:
        assert getattr(lit_ppo.callbacks, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nope'"):
        _ = lit_ppo.callbacks.Nope
