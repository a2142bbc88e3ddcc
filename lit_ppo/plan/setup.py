"""What decides the memory of a run, read from its configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lit_ppo.config import AdamConfig, LoRAConfig, OptimConfig, PPOConfig, RoleConfig, SamplingConfig, from_dict
from lit_ppo.rewards.config import RewardConfig
from lit_ppo.rewards.trunk import read_settings
from lit_ppo.roles.adapters import FrozenAdapter
from lit_ppo.roles.loading import resolve_dtype
from lit_ppo.roles.sources import context_length, model_config
from lit_ppo.roles.spread import named_devices

TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
FAMILIES = ("one", "ddp", "fsdp")
EVERY_ROLE = ("actor", "critic", "reference", "reward")
COUNTED = {"GradientCheckpointing", "QuantizeModules", "QuantizeRewardModel", "OffloadRoles", "OffloadActivations"}
"""Callbacks that change the forecast; the others take no memory, or what they save hangs on the data."""

Shapes = Callable[[str, RoleConfig], Any]
"""From a role and its source to its transformers configuration."""


@dataclass
class Model:
    """One role's model, as it will be loaded."""

    config: Any
    """Its transformers configuration."""
    dtype: torch.dtype
    quantize: str = "none"
    embeddings: str = "none"
    """none or int8."""
    device: str | None = None
    """Of a frozen role that is kept elsewhere; None: the rank's own."""
    offload: bool = False
    """In host memory between the phases that use it."""
    sharded: bool = True
    """Under FSDP, whether a frozen role is cut over the ranks."""


@dataclass
class Setup:
    """One rank of a run."""

    actor: Model
    critic: Model | None
    """Also where it is a view of the actor's trunk (`shared`)."""
    reference: Model | None
    """None: not needed, or the trunk with its adapters off."""
    rewards: dict[str, tuple[Model, RewardConfig]]
    """Reward models; functions take no GPU memory."""
    ppo: PPOConfig
    sampling: SamplingConfig
    optim: AdamConfig
    lora: LoRAConfig | None
    shared: bool
    precision: str
    prompt: int
    """Tokens of the longest prompt."""
    episodes: int
    """Responses of an iteration, on this rank."""
    ranks: int = 1
    family: str = "one"
    flat: bool = False
    """By FSDP1, whose flat parameters have one dtype: what has another is whole on each rank."""
    card: int = 80 * 2**30
    """Bytes of the GPU."""
    checkpointing: int | None = None
    """Every n-th layer is recomputed; None: none is."""
    offload_activations: float | None = None
    """Saved tensors of so many MiB or more wait in host memory; None: none does."""
    offload_optimizer: bool = False
    offload_shards: bool = False
    """Under FSDP, the actor's shards wait in host memory while the whole actor is gathered for a rollout."""
    frozen: list[tuple[FrozenAdapter, RewardConfig]] = field(default_factory=list)
    """Rewards that are adapters of the actor's trunk."""
    notes: list[str] = field(default_factory=list)
    """What the forecast leaves out or had to assume."""
    stage: str = "ppo"
    """Or sft or reward (`lit_ppo.plan.stages`), whose only model stands for the actor here."""

    @property
    def role(self) -> str:
        """What the run calls its actor."""
        return "reward" if self.stage == "reward" else "actor"

    @property
    def texts(self) -> int:
        """Of an example: a pair has two."""
        return 2 if self.stage == "reward" else 1

    @property
    def minibatch(self) -> int:
        """Rows of a minibatch on this rank."""
        return -(-self.episodes // self.ppo.minibatches)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.sampling.max_new_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest text; the reward stage's ends with one that nobody reads."""
        return self.prompt if self.stage == "reward" else self.length

    def rows(self, size: int | None, most: int) -> int:
        """Return the rows of a forward: as many as asked for, or as the budget of tokens allows."""
        budget = self.ppo.micro_batch_tokens
        if size is None and budget is not None:
            size = max(1, budget // (self.longest * self.texts))
        return max(1, min(size or most, most))

    @property
    def in_bf16(self) -> list[str]:
        """What asks for bfloat16: the precision, or the roles that are held in it."""
        if self.precision.startswith("bf16"):
            return [f"trainer.precision: {self.precision}"]
        models = {self.role: self.actor, "critic": self.critic, "reference": self.reference}
        models |= {name: model for name, (model, _) in self.rewards.items()}
        return [n for n, m in models.items() if m is not None and m.dtype == torch.bfloat16 and m.device is None]

    @property
    def micro(self) -> int:
        """Rows of a micro-batch."""
        return self.rows(self.ppo.micro_batch_size, self.minibatch)


def read_setup(
    config: Mapping[str, Any],
    shapes: Shapes = model_config,
    *,
    gpus: int = 1,
    strategy: str | None = None,
    card: int = 80 * 2**30,
) -> Setup:
    """Read a configuration as LightningCLI has it: `model`, `data`, `trainer`.

    Args:
        config: As parsed; options that are not there have their defaults.
        shapes: From role and source to a transformers configuration.
        gpus: Of the run.
        strategy: one, ddp or fsdp; None: as the trainer's.
        card: Bytes of each.

    Raises:
        ValueError: A source whose configuration cannot be read, or a strategy that is not known.
    """
    model, data, trainer = (config.get(part) or {} for part in ("model", "data", "trainer"))
    ppo = from_dict(PPOConfig, model.get("ppo"))
    sampling = from_dict(SamplingConfig, model.get("sampling"))
    optim = from_dict(OptimConfig, model.get("optim"))
    lora = None if model.get("lora") is None else from_dict(LoRAConfig, model["lora"])
    precision = str(trainer.get("precision") or "32-true")
    true = TRUE.get(precision)
    shared = model.get("layout", "separate") == "shared" and ppo.has_critic
    notes: list[str] = []

    def role(name: str, given: Any, *, trained: bool) -> Model:
        return read_model(name, given, shapes, trained=trained, true=true)

    full = lora is None
    actor = role("actor", model["actor"], trained=full)
    actor_source = _as_role(model["actor"])
    critic = reference = None
    rewards: dict[str, tuple[Model, RewardConfig]] = {}
    frozen: list[tuple[FrozenAdapter, RewardConfig]] = []
    for i, given in enumerate(_listed(model.get("reward"))):
        reward = from_dict(RewardConfig, dict(given) if isinstance(given, Mapping) else {"source": given})
        if reward.trunk == "actor":
            frozen.append(
                (FrozenAdapter(f"reward{len(frozen)}", read_settings(reward.source, reward.revision)), reward)
            )
            continue
        if _is_function(reward.source):
            continue
        as_role = {"source": reward.source, "dtype": reward.dtype, "trust_remote_code": reward.trust_remote_code}
        found = role(f"reward {reward.name or i}", as_role, trained=False)
        found.quantize, found.device = reward.quantize, reward.device or elsewhere(reward.device_map)
        if reward.dtype == "auto":
            found.dtype = torch.bfloat16
        rewards[f"reward {reward.name or Path(reward.source).name}"] = found, reward
    if ppo.has_critic:
        given = model.get("critic")
        if shared:
            critic = actor
        else:
            start = next((r.source for m, r in rewards.values() if given is None and _same(m.config, actor.config)), "")
            source = {**actor_source, **({"source": start} if start else {}), **_given(given)}
            critic = role("critic", source, trained=full)
    if ppo.needs_reference and (full or model.get("reference") is not None):
        given = _given(model.get("reference"))
        reference = role("reference", {**actor_source, **given}, trained=False)
        if "dtype" not in given and "source" not in given:
            reference.dtype = actor.dtype
    prompt = data.get("max_prompt_length")
    if prompt is None:
        context = context_length(actor.config.get_text_config()) or 4096
        prompt = max(1, context - sampling.max_new_tokens)
        notes.append(
            f"`data.max_prompt_length` is not set: prompts of {prompt} tokens, all that the context holds, are assumed."
        )
    setup = Setup(
        actor, critic, reference, rewards, ppo, sampling, optim, lora, shared, precision, int(prompt),
        episodes=-(-int(data.get("batch_size") or 512) * sampling.samples_per_prompt // gpus), ranks=gpus,
        card=card, frozen=frozen, notes=notes, **spread(strategy or trainer.get("strategy"), gpus),
    )  # fmt: skip
    return completed(setup, trainer)


def read_model(name: str, given: Any, shapes: Shapes, *, trained: bool, true: torch.dtype | None) -> Model:
    """Read one role's model.

    Args:
        name: Of the role.
        given: What the configuration says: a source, or the options of a `RoleConfig`.
        shapes: From role and source to a transformers configuration.
        trained: Whether an optimizer updates these very weights.
        true: What the trainer's precision makes of every weight, or None.
    """
    options = given if isinstance(given, RoleConfig) else from_dict(RoleConfig, _as_role(given))
    dtype = resolve_dtype(options.dtype, trained=trained, device=torch.device("cuda"), true_dtype=true)
    return Model(
        shapes(name, options), dtype, options.quantize, options.quantize_embeddings,
        options.device or elsewhere(options.device_map),
        sharded=options.sharded is not False and options.device is None and options.device_map is None,
    )  # fmt: skip


def completed(setup: Setup, trainer: Mapping[str, Any]) -> Setup:
    """Take the trainer's callbacks into account, and what the strategy does not do.

    Args:
        setup: All the rest; it is changed.
        trainer: Its options.
    """
    for given in _listed(trainer.get("callbacks")):
        _apply(setup, *_callback(given))
    if setup.flat and setup.optim.paged:
        setup.optim = replace(setup.optim, paged=False)
        setup.notes.append("`optim.paged` is refused by FSDP1, and counted without: use ModelParallelStrategy (FSDP2).")
    return setup


def elsewhere(device_map: Any) -> str | None:
    """Return a device of a map that has none of the run's first GPU; None: some or all may be on it."""
    places = named_devices(device_map)
    return places[0] if places and not {"cuda", "cuda:0"} & set(places) else None


def _apply(setup: Setup, name: str, options: dict[str, Any]) -> None:
    """Take a callback into account."""
    models = {
        setup.role: setup.actor,
        "critic": setup.critic,
        "reference": setup.reference,
        **{n: m for n, (m, _) in setup.rewards.items()},
    }

    def chosen(names: Any) -> list[Model]:
        wanted = _listed(names)
        return [m for n, m in models.items() if m is not None and any(n == w or n.startswith(f"{w} ") for w in wanted)]

    if name == "GradientCheckpointing":
        setup.checkpointing = int(options.get("every_n") or 1)
        if options.get("modules") is not None:
            setup.notes.append("`GradientCheckpointing.modules` is not looked at: all layers are taken.")
    elif name in ("QuantizeModules", "QuantizeRewardModel"):
        for model in chosen(options.get("modules") or "reward"):
            model.quantize = options.get("mode") or "nf4"
    elif name == "OffloadRoles":
        frozen = ["reference", "reward"] if options.get("roles") is None else options["roles"]
        for model in chosen([name for name in _listed(frozen) if name != "actor"]):
            model.offload = True
        setup.offload_shards = "actor" in _listed(frozen) and setup.family == "fsdp"
        setup.offload_optimizer = bool(options.get("optimizer"))
    elif name == "OffloadActivations":
        setup.offload_activations = float(options.get("min_mib") or 1.0)
    elif name not in COUNTED and name in ("FreezeParameters", "WeightAveraging", "EMAWeightAveraging"):
        setup.notes.append(f"`{name}` is not taken into account.")


def config_file(path: str | Path) -> Any:
    """Read a transformers configuration from a JSON file, or from the folder that it is in.

    Raises:
        ValueError: It cannot be read.
    """
    from transformers import AutoConfig

    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        fields = json.loads(file.read_text())
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"`--model-config {path}` cannot be read ({type(error).__name__}: {error}). Give the config.json of a "
            "transformers model, or its folder."
        ) from error


def spread(strategy: Any, gpus: int) -> dict[str, Any]:
    """Return `family` and `flat` of a `Setup`.

    Args:
        strategy: As the trainer's options say it, or None.
        gpus: Of the run.

    Raises:
        ValueError: A strategy that is not known.
    """
    family = _family(strategy, gpus)
    return {"family": family, "flat": family == "fsdp" and "parallel" not in str(strategy).lower()}


def _family(strategy: Any, gpus: int) -> str:
    text = str(strategy["class_path"] if isinstance(strategy, Mapping) else strategy or "auto").lower()
    if gpus == 1:
        return "one"
    for family, words in (("fsdp", ("fsdp", "modelparallel", "model_parallel")), ("ddp", ("ddp", "auto"))):
        if any(word in text for word in words):
            return family
    raise ValueError(f"`--strategy {strategy}` is not known to the forecast: use ddp or fsdp.")


def _callback(given: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(given, str):
        return given.rsplit(".", 1)[-1], {}
    return given["class_path"].rsplit(".", 1)[-1], dict(given.get("init_args") or {})


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _as_role(given: Any) -> dict[str, Any]:
    return {"source": given} if isinstance(given, str) else _given(given)


def _given(given: Any) -> dict[str, Any]:
    """Return the options that say something."""
    if given is None or isinstance(given, str):
        return {} if given is None else {"source": given}
    default = vars(RoleConfig())
    return {k: v for k, v in dict(given).items() if v != default.get(k)}


def _is_function(source: str) -> bool:
    """Whether a reward is a Python function rather than a model."""
    return "/" not in source and not Path(source).exists() and source.count(".") > 0


def _same(a: Any, b: Any) -> bool:
    keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    return all(getattr(a, key, None) == getattr(b, key, None) for key in keys)
