"""`lit-ppo plan`: what it counts is what a real run allocates, and what it says can be acted on."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lit_ppo import RewardModule, SFTModule
from lit_ppo.cli import main
from lit_ppo.plan.cards import CARDS, CONTEXT, GIB, parse_gpus
from lit_ppo.plan.forecast import Forecast, kv_bytes
from lit_ppo.plan.levers import levers
from lit_ppo.plan.report import report
from lit_ppo.plan.roles import shallow
from lit_ppo.plan.setup import read_setup
from lit_ppo.plan.stages import read_stage
from lit_ppo.plan.stand_ins import kernels
from lit_ppo.plan.trace import _recompute, rows_of
from lit_ppo.plan.track import ROUND, Tracker, tracing
from lit_ppo.roles.build import RolePlan, build_roles
from lit_ppo.roles.fused_layers import fuse
from lit_ppo.sharding.units import layers

pytestmark = [
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),  # Lightning's calls
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SIZE = dict(hidden_size=64, intermediate_size=160, vocab_size=256, max_position_embeddings=256)


def big(kind: str = "llama", layers: int = 6) -> Any:
    """A shape large enough for its activations to be more than rounding."""
    config = tiny.CONFIGS[kind]
    return shallow(type(config)(**(config.to_dict() | SIZE)), layers)


def setup_of(kind: str = "llama", layers: int = 6, gpus: int = 1, **options: Any) -> Any:
    config = {
        "model": {
            "actor": "here",
            "reward": "examples.rewards.brevity",
            "sampling": {"max_new_tokens": 16},
            "ppo": {"micro_batch_size": 2, "rollout_engine": "hf"} | options.pop("ppo", {}),
        }
        | options.pop("model", {}),
        "data": {"batch_size": 8, "max_prompt_length": 48} | options.pop("data", {}),
        "trainer": {"precision": "32-true"} | options.pop("trainer", {}),
    }
    assert not options
    return read_setup(config, lambda role, source: big(kind, layers), gpus=gpus), config


def real_roles(setup: Any) -> Any:
    """The same roles with weights."""
    make = [AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForCausalLM]
    models = []
    for kind, wanted in zip(make, (setup.actor, None if setup.shared else setup.critic, setup.reference), strict=True):
        if wanted is None:
            models.append(None)
            continue
        config = shallow(wanted.config, 6, **({"num_labels": 1} if kind is make[1] else {}))
        models.append(kind.from_config(config, dtype=wanted.dtype, attn_implementation="sdpa"))
    plan = RolePlan(
        *models, layout="shared" if setup.shared else "separate", lora=setup.lora, has_critic=setup.critic is not None,
        has_reference=setup.reference is not None, config=setup.actor.config, seed=0,
    )  # fmt: skip
    roles = build_roles(plan, torch.device("cpu"))
    fuse(*(view.store for view in roles.all().values()))
    assert roles.pack() is None
    return roles


CASES = {
    "full": {},
    "tied": {"kind": "qwen2-tied"},
    "checkpointing": {"trainer": {"callbacks": ["GradientCheckpointing"]}},
    "shared": {"model": {"lora": {"r": 4}, "layout": "shared"}},
    "shared, checkpointing": {
        "model": {"lora": {"r": 4}, "layout": "shared"}, "trainer": {"callbacks": ["GradientCheckpointing"]},
    },
    "lora": {"model": {"lora": {"r": 4}}},
}  # fmt: skip


QUICK = ("full", "shared, checkpointing")
PARAMS = [
    pytest.param(options, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, options in CASES.items()
]


@pytest.mark.parametrize("options", PARAMS)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_trace_of_few_layers_gives_the_bytes_of_a_real_step(role, options):
    setup, _ = setup_of(**dict(options))
    step = Forecast(setup).step(role)
    view = getattr(real_roles(setup), role)
    view.store.train()
    for _, _, layer in layers(view.store) if setup.checkpointing else ():
        _recompute(layer, view.store, True)
    for parameter in view.store.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    rollout = rows_of(2, 48, 16)
    with Tracker() as tracker, kernels():
        tracker.ignore(view.store)
        more = {"entropy": True, "temperature": 0.7} if role == "actor" else {}
        loss = (view(rollout, **more)[0] * rollout.mask).sum()
        kept = tracker.live
        loss.backward()
    assert step.kept.at(6) == pytest.approx(kept, rel=0.02)
    assert max(peak.at(6) for peak in step.peaks.values()) == pytest.approx(tracker.peak, rel=0.05)


@pytest.mark.parametrize("options", PARAMS)
def test_weights_gradients_and_optimizer_state_are_counted_as_they_are(options):
    setup, _ = setup_of(**dict(options))
    forecast = Forecast(setup)
    roles = real_roles(setup)
    for role, store in forecast.stores.items():
        view = getattr(roles, role)
        assert store.weights == pytest.approx(sum(p.nbytes for p in view.store.parameters()), rel=0.02)
        both = ("actor", "critic") if role == "actor" and setup.shared else (role,)
        trained = [p for name in both for _, p in roles.trained().get(name, ())]
        assert store.trained == sum(p.nbytes for p in trained)
        assert store.state == 2 * store.trained  # float32: two moments
    assert ("reference" in forecast.stores) == (setup.lora is None)


def test_fused_layers_keep_less_in_16_bits_and_change_nothing_in_float32():
    kept = {
        (precision, on): Forecast(setup_of(trainer={"precision": precision}, ppo={"fused_layers": on})[0])
        .step("actor")
        .kept.at(6)
        for precision in ("bf16-true", "bf16-mixed", "32-true")
        for on in (True, False)
    }
    assert kept["32-true", True] == kept["32-true", False]
    assert kept["bf16-mixed", True] < 0.95 * kept["bf16-mixed", False]
    # A layer: its inputs, two norms, q, k, v, their rotations and output, gate, up, and what the last projection is
    # given, in 2 bytes; per token and in elements of the hidden size 64 (the MLP's is 160).
    tokens, elements = 2 * 63, 4 * 64 + 2 * 64 + 2 * 32 + 32 + 64 + 3 * 160
    assert kept["bf16-true", True] == pytest.approx(6 * 2 * tokens * elements, rel=0.25)
    assert kept["bf16-true", True] < 0.7 * kept["bf16-true", False]


def test_a_trace_makes_no_weights_and_reads_masks():
    with tracing() as tracker:
        huge = torch.empty(2**20, 2**20)
        assert tracker.live == 2**42
        mask = torch.ones(4, dtype=torch.bool)
        assert int(mask.sum()) == 4
        picked = huge[:4][mask]
        assert picked.shape == (4, 2**20)
        del huge
    assert tracker.live == 4 * 2**20 * 4 + ROUND


def test_keys_and_values_take_what_the_configuration_says():
    assert kv_bytes(tiny.CONFIGS["llama"], torch.bfloat16) == 2 * 2 * 2 * 8 * 2  # k and v, layers, heads, dim, bytes


def test_levers_save_what_they_say_and_are_ranked(monkeypatch):
    monkeypatch.setattr("lit_ppo.plan.levers.WORTH", 1)
    setup, config = setup_of(
        layers=8, model={"lora": {"r": 4}, "layout": "shared"}, trainer={"precision": "bf16-true"},
        ppo={"micro_batch_size": 8, "rollout_engine": "hf"},
    )  # fmt: skip
    now = Forecast(setup)
    found = levers(config, lambda changed: read_setup(changed, lambda role, source: setup.actor.config), now)
    lines = [lever.line for lever in found]
    assert {"trainer.callbacks: [GradientCheckpointing]", "model.ppo.micro_batch_size: 4"} < set(lines)
    saved = [lever.saved for lever in found]
    assert saved == sorted(saved, reverse=True)
    assert all(lever.peak + lever.saved == now.peak for lever in found)
    text = report(now, parse_gpus("12GB"), found, "run.yaml")
    assert all(f"\n{line}" in text for line in lines)


def test_more_ranks_share_what_is_trained():
    one, four = (Forecast(setup_of(gpus=n, trainer={"strategy": "fsdp"})[0]) for n in (1, 4))
    assert four.stores["actor"].state == -(-one.stores["actor"].state // 4)
    assert four.setup.episodes == 2
    assert four.phases["rollout"].parts["gathered actor"] == one.stores["actor"].weights
    ddp = Forecast(setup_of(gpus=4, trainer={"strategy": "ddp"})[0])
    assert ddp.stores["actor"].state == one.stores["actor"].state


def test_fsdp1_does_not_cut_what_has_another_dtype_than_the_trunk():
    lora = {"lora": {"r": 4}, "layout": "shared", "actor": {"source": "here", "dtype": "bfloat16"}}
    flat, fully, ddp = (
        Forecast(setup_of(gpus=4, model=dict(lora), trainer={"strategy": strategy})[0]).stores["actor"]
        for strategy in ("fsdp", {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}, "ddp")
    )
    assert flat.state == ddp.state == 4 * fully.state
    assert flat.trained == ddp.trained == 4 * fully.trained
    # small ones take blocks of 512 bytes, which the gradients' sum does not count
    assert flat.weights == pytest.approx(ddp.trained + (ddp.weights - ddp.trained) / 4, rel=0.02)
    assert fully.weights == ddp.weights // 4


FSDP2 = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 4, "tensor_parallel_size": 1},
}


def test_what_waits_in_host_memory_is_not_there():
    def spread(roles: list[str] | None, **optim: Any) -> Any:
        callbacks = [] if roles is None else [{"class_path": "OffloadRoles", "init_args": {"roles": roles}}]
        trainer = {"strategy": FSDP2, "callbacks": callbacks, "precision": "bf16-true"}
        made = Forecast(setup_of(gpus=4, model={"optim": optim}, trainer=trainer)[0])
        return made, {name: made.phases[name].parts for name in made.phases}

    _, plain = spread(None)
    some, held = spread(["critic", "reference"])
    assert "weights critic" not in held["rollout"]
    assert {"weights critic", "weights reference"} < held["load"].keys() & held["score"].keys()
    assert "weights reference" not in held["update"]
    assert held["rollout"]["weights actor"] == some.stores["actor"].weights
    assert "optimizer" in held["rollout"]
    full, away = spread(["actor", "critic", "reference"], paged=True)
    assert not any("optimizer" in parts for parts in away.values())
    assert not full.setup.notes
    rollout = {name: size for name, size in away["rollout"].items() if name.startswith("weights")}
    assert not rollout or "KV cache" not in away["rollout"]  # the shards leave before the first token
    assert full.phases["rollout"].total < some.phases["rollout"].total
    assert sum(away["update"].values()) < sum(plain["update"].values())
    flat = Forecast(setup_of(gpus=4, model={"optim": {"paged": True}}, trainer={"strategy": "fsdp"})[0])
    assert "refused by FSDP1" in flat.setup.notes[0]
    assert "optimizer" in flat.phases["update"].parts


def test_under_fsdp_whole_units_are_gathered_and_reduced():
    """Counted by hand: embedding and head with their gradients and the buffer to reduce them; layers two at a time."""
    made = Forecast(setup_of(gpus=4, ppo={"sequential_roles": True}, trainer={"strategy": FSDP2})[0])
    units = made.stores["actor"].units
    config = made.setup.actor.config
    assert units.root_trained == 4 * (2 * 256 * 64 + 64)  # float32 embedding, head, norm
    assert units.root == pytest.approx(units.root_trained, rel=0.01)  # and buffers
    assert units.layer == (made.stores["actor"].whole - units.root) // config.num_hidden_layers
    assert units.layer_trained == pytest.approx(units.layer, rel=0.01)
    assert units.head_trained == 4 * 256 * 64
    assert units.at("begin") == 2 * units.root + 2 * units.layer
    assert units.at("reduce") == 2 * units.root_trained + units.root_trained // 4 + units.layer_trained
    assert units.at("bottom") == units.root + units.head_trained + units.layer_trained
    assert made.phases["score"].parts["gathered"] in (units.at("begin"), units.at("forward"))
    critic = made.stores["critic"].units  # its head is a row
    assert critic.root < 0.6 * units.root
    one = Forecast(setup_of()[0])
    assert one.stores["actor"].units is None
    assert all("gathered" not in phase.parts for phase in one.phases.values())


@pytest.mark.parametrize(
    ("text", "count", "name", "gib"),
    [
        ("4xA100-80G", 4, "A100-80G", CARDS["A100-80G"] - CONTEXT),
        ("2 x a100", 2, "A100-80G", CARDS["A100-80G"] - CONTEXT),
        ("RTX 4090", 1, "RTX4090-24G", CARDS["RTX4090-24G"] - CONTEXT),
        ("12GB", 1, "12GB", 12e9 / GIB),
        ("8x11.5GiB", 8, "11.5GiB", 11.5),
    ],
)
def test_cards_are_read_as_people_write_them(text, count, name, gib):
    gpus = parse_gpus(text)
    assert (gpus.count, gpus.name) == (count, name)
    assert gpus.usable == pytest.approx(gib * GIB, abs=1)


def test_a_card_that_is_not_known_says_which_are():
    with pytest.raises(ValueError, match="Did you mean A100-80G"):
        parse_gpus("4xA1000-80G")
    with pytest.raises(ValueError, match="a size works too"):
        parse_gpus("potato")


STAGES = {
    "sft": ("sft", {}),
    "sft, lora, checkpointing": ("sft", {"lora": {"r": 4}, "callbacks": ["GradientCheckpointing"]}),
    "reward": ("reward", {}),
    "reward, lora": ("reward", {"lora": {"r": 4}}),
}


@pytest.mark.parametrize(("stage", "options"), STAGES.values(), ids=STAGES)
def test_a_trace_gives_the_bytes_of_a_real_step_of_the_other_stages(stage, options):
    lora, callbacks = options.get("lora"), options.get("callbacks", [])
    role, section, cls = {"sft": ("actor", "sft", SFTModule), "reward": ("reward", "ranking", RewardModule)}[stage]
    config = {
        "model": {role: "here", section: {"micro_batch_size": 2}, "lora": lora},
        "data": {"batch_size": 8, "max_length": 64},
        "trainer": {"precision": "32-true", "callbacks": callbacks},
    }
    setup = read_stage(config, stage, lambda role, source: big())
    # a frozen trunk is bfloat16 on a GPU, and here
    model = AutoModelForCausalLM.from_config(big(), dtype=setup.actor.dtype, attn_implementation="sdpa")
    module = cls(model, tokenizer=tiny.tokenizer(), lora=lora)
    module.configure_model()
    store = module.view.store.train()
    assert store.pack() is None
    for _, _, layer in layers(store) if callbacks else ():
        _recompute(layer, store, True)
    for parameter in store.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with Tracker() as tracker, kernels():
        tracker.ignore(store)
        loss = module.loss(module.worst(2, 64))[0]
        kept = tracker.live
        loss.backward()
    forecast = Forecast(setup)
    step, held = forecast.step("actor"), forecast.stores["actor"]
    assert step.kept.at(6) == pytest.approx(kept, rel=0.02)
    assert max(peak.at(6) for peak in step.peaks.values()) == pytest.approx(tracker.peak, rel=0.05)
    assert held.weights == pytest.approx(sum(p.nbytes for p in store.parameters()), rel=0.02)
    assert held.trained == sum(p.nbytes for _, p in module.trained[role])
    assert list(forecast.phases) == ["load", "update", "validate", "save"]
    assert f"weights {role}" in forecast.phases["save"].parts


@pytest.mark.parametrize(("name", "title"), [("sft", "texts of 512"), ("reward_model", "pairs of texts of 512")])
def test_the_command_knows_the_stage_by_the_file_or_by_name(name, title, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lit_ppo.plan.levers.WORTH", 1)
    fields = big().to_dict() | {"max_position_embeddings": 1024}
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps({k: v for k, v in fields.items() if not dataclasses.is_dataclass(v)}))
    file = str(Path(__file__).parent.parent / "examples" / f"{name}.yaml")
    options = ["--config", file, "--gpus=0.3GB", f"--model-config={shape}"]
    stage = "sft" if name == "sft" else "reward"
    assert main(["plan", *options]) == 0
    said = capsys.readouterr().out
    assert f"{title} tokens, 4 a rank and step, micro-batches of 4" in said
    assert "trainer.callbacks: [GradientCheckpointing]" in said
    assert "ppo" not in said
    assert main([stage, "plan", *options]) == 0
    assert capsys.readouterr().out == said
    with pytest.raises(SystemExit):
        main(["ppo", "plan", *options])
    assert f"This is a configuration for `lit-ppo {stage} fit`" in capsys.readouterr().err


def test_cards_without_bfloat16_are_not_said_to_fit():
    fields = {"model": {"lora": {"r": 4}, "layout": "shared"}}
    plain = report(Forecast(setup_of(**fields, trainer={"precision": "16-mixed"})[0]), parse_gpus("T4"), None, "run")
    assert "bfloat16" in plain  # the frozen trunk's, unless it is said otherwise
    asked = Forecast(setup_of(**fields, trainer={"precision": "bf16-true"})[0])
    text = report(asked, parse_gpus("T4"), None, "run")
    assert "But T4-16G only emulates bfloat16" in text
    assert "trainer.precision: 16-mixed" in text
    fits, lacks = text.splitlines()[-2:]
    assert fits.startswith("Cards that it fits: RTX3060-12G, RTX4070-12G, A2-16G, RTX4080-16G,")
    assert lacks == "Large enough, but without the bfloat16 that this asks for: T4-16G, V100-16G, V100-32G."
    assert "But " not in report(asked, parse_gpus("A10G"), None, "run")
    full = setup_of(trainer={"precision": "32-true"}, ppo={"kl_coef": 0.0})[0]
    assert "T4-16G" in report(Forecast(full), parse_gpus("T4"), None, "run").splitlines()[-1]


def test_the_hub_is_not_asked_twice(tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    from lit_ppo.cli import hub

    def refused(*args: Any) -> Any:
        asked.append(args)
        raise OSError(111, "Connection refused")

    asked: list[Any] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub.socket, "create_connection", refused)
    hub.unreachable.cache_clear()
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    start = time.perf_counter()
    for _ in range(2):
        assert main(["plan", "--config", "run.yaml"]) == 1
    hub.unreachable.cache_clear()
    assert len(asked) == 1
    assert time.perf_counter() - start < 15, "it retries"
    error = capsys.readouterr().err
    assert "`actor='meta-llama/Llama-3.1-8B-Instruct'` cannot be read" in error
    assert "The hub was not asked: huggingface.co cannot be reached: Connection refused." in error


RUN = """
model:
  actor: meta-llama/Llama-3.1-8B-Instruct
  reward: examples.rewards.brevity
  layout: shared
  lora: {r: 16}
  sampling: {max_new_tokens: 16}
  ppo: {micro_batch_size: 2, rollout_engine: hf}
data: {train: prompts.jsonl, batch_size: 8, max_prompt_length: 48}
trainer: {precision: bf16-true}
"""


def test_the_command_says_what_fits_without_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    fields = big().to_dict()
    Path("shape.json").write_text(json.dumps({k: v for k, v in fields.items() if not dataclasses.is_dataclass(v)}))
    quick = ["plan", "--config", "run.yaml", "--no-levers"]
    assert main([*quick, "--gpus", "12GB", "--model-config", "shape.json"]) == 0
    out = capsys.readouterr().out
    assert "run.yaml on 1 x 12GB" in out
    assert "Fits: 0.1" in out
    for phase in ("load", "rollout", "score", "update", "save"):
        assert f"\n{phase} " in out
    assert main([*quick, "--gpus=0.002GB", "--model-config", "actor=shape.json"]) == 0
    assert "Does not fit" in capsys.readouterr().out
    assert main([*quick, "--model-config", "nowhere.json"]) == 1
    assert "Give the config.json" in capsys.readouterr().err
    assert main(["plan", "--help"]) == 0
    assert "--model-config FILE" in capsys.readouterr().out
