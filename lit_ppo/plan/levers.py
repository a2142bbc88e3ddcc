"""What would save memory: each lever tried on the configuration, ranked by the bytes that it takes off the peak."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lit_ppo.plan.forecast import Forecast
from lit_ppo.plan.setup import Setup
from lit_ppo.plan.stages import SECTIONS

Change = Callable[[dict[str, Any]], None]

WORTH = 64 * 2**20
"""Bytes that a lever must save to be named."""


@dataclass
class Lever:
    """One change of the configuration."""

    line: str
    """The YAML to write."""
    cost: str
    saved: int = 0
    peak: int = 0


def levers(config: dict[str, Any], read: Callable[[dict[str, Any]], Setup], now: Forecast) -> list[Lever]:
    """Try what is not on yet, one at a time.

    Args:
        config: `model`, `data` and `trainer`.
        read: From a configuration to what decides its memory.
        now: The forecast of `config`; its traces are shared.

    Returns:
        The levers that save something, the best first.
    """
    found = []
    for lever, change in _candidates(now.setup):
        changed = copy.deepcopy(config)
        change(changed)
        try:
            setup = read(changed)
        except ValueError:  # two options that exclude each other
            continue
        lever.peak = Forecast(setup, now.traces).peak
        lever.saved = now.peak - lever.peak
        if lever.saved >= WORTH:
            found.append(lever)
    return sorted(found, key=lambda lever: -lever.saved)


def _candidates(s: Setup) -> Iterator[tuple[Lever, Change]]:
    """Yield what can be changed, with a function that changes it."""
    yield from _of_training(s)
    yield from _of_ppo(s) if s.stage == "ppo" else _of_stage(s)


def put(path: str, value: Any) -> Change:
    """Return a function that sets an option.

    Args:
        path: Dotted.
        value: Its new value.
    """

    def change(target: dict[str, Any]) -> None:
        *groups, last = path.split(".")
        for group in groups:
            held = target.get(group)
            target[group] = held = {"source": held} if isinstance(held, str) else dict(held or {})
            target = held
        target[last] = value

    return change


def add(callback: str, **options: Any) -> Change:
    """Return a function that adds a callback with its options."""

    def change(target: dict[str, Any]) -> None:
        trainer = target["trainer"] = dict(target.get("trainer") or {})
        there = trainer.get("callbacks") or []
        there = there if isinstance(there, list) else [there]
        trainer["callbacks"] = [*there, {"class_path": callback, "init_args": options}]

    return change


def _of_training(s: Setup) -> Iterator[tuple[Lever, Change]]:
    """What every stage has: how a batch is cut, the precision, the optimizer."""
    if s.checkpointing is None:
        yield (
            Lever("trainer.callbacks: [GradientCheckpointing]", "about a third more time in the update"),
            add("GradientCheckpointing"),
        )
    cut = f"model.{SECTIONS[s.stage]}.micro_batch_"
    cheap = "nothing but a little speed: the gradient stays the same"
    if s.micro > 1 and s.ppo.micro_batch_tokens is None:
        yield Lever(f"{cut}size: {s.micro // 2}", cheap), put(f"{cut}size", s.micro // 2)
    elif s.micro > 1:
        tokens = s.micro // 2 * s.longest * s.texts
        yield Lever(f"{cut}tokens: {tokens}", cheap), put(f"{cut}tokens", tokens)
    if s.precision == "32-true":
        yield (
            Lever("trainer.precision: bf16-true", "bfloat16 arithmetic, with float32 masters in the optimizer"),
            put("trainer.precision", "bf16-true"),
        )
    bf16 = s.precision == "bf16-true"
    if s.optim.state == "float32":
        yield Lever("model.optim.state: 8bit", "Adam's moments in 8 bits"), put("model.optim.state", "8bit")
    if s.optim.rounding == "master" and bf16:
        yield (
            Lever("model.optim.rounding: stochastic", "noise in the weights in place of float32 copies"),
            put("model.optim.rounding", "stochastic"),
        )
    if not s.optim.paged and not s.flat:
        yield (
            Lever("model.optim.paged: true", "time in each optimizer step: the state passes over PCIe"),
            put("model.optim.paged", True),
        )


def _of_stage(s: Setup) -> Iterator[tuple[Lever, Change]]:
    """What the stages before PPO have besides."""
    if s.lora is None:
        cost = "an adapter: a larger learning rate, a smaller change"
        yield Lever("model.lora: {r: 16}", cost), put("model.lora", {"r": 16})
    elif s.actor.quantize == "none":
        quantized = f"model.{s.role}.quantize"
        yield Lever(f"{quantized}: nf4", "a 4-bit trunk: some accuracy, and more time"), put(quantized, "nf4")
    if s.longest >= 128:
        half = s.longest // 2
        yield Lever(f"data.max_length: {half}", "longer texts are dropped"), put("data.max_length", half)


def _of_ppo(s: Setup) -> Iterator[tuple[Lever, Change]]:
    """What PPO has besides: rollouts, several roles."""
    rollout = min(s.ppo.rollout_batch_size or s.episodes, s.episodes)
    if rollout > 1:
        yield (
            Lever(f"model.ppo.rollout_batch_size: {rollout // 2}", "a slower rollout"),
            put("model.ppo.rollout_batch_size", rollout // 2),
        )
    if s.ppo.rollout_engine != "hf" and s.ppo.rollout_prefill_tokens > 4096:
        yield (
            Lever("model.ppo.rollout_prefill_tokens: 4096", "hardly any time: prompts are read in more forwards"),
            put("model.ppo.rollout_prefill_tokens", 4096),
        )
    if s.critic is not None and not s.ppo.sequential_roles:
        yield (
            Lever("model.ppo.sequential_roles: true", "nothing in the result; hardly any time"),
            put("model.ppo.sequential_roles", True),
        )
    if s.lora is None:

        def adapters(target: dict[str, Any]) -> None:
            target["model"] = {**target["model"], "lora": {"r": 16}, "layout": "shared" if s.critic else "separate"}
            target["model"].pop("critic", None)
            target["model"].pop("reference", None)

        yield (
            Lever("model.layout: shared, model.lora: {r: 16}", "adapters: a larger learning rate, a smaller change"),
            adapters,
        )
    elif s.actor.quantize == "none":
        yield (
            Lever("model.actor.quantize: nf4", "a 4-bit trunk: some accuracy, and a slower rollout"),
            put("model.actor.quantize", "nf4"),
        )
    if s.lora is not None and s.actor.embeddings == "none" and s.family != "fsdp":
        yield (
            Lever("model.actor.quantize_embeddings: int8", "log-probs off by about a hundredth; a slower head"),
            put("model.actor.quantize_embeddings", "int8"),
        )
    if s.reference is not None:
        if s.reference.quantize == "none":
            yield (
                Lever("model.reference.quantize: nf4", "a KL against a 4-bit reference, which does not start at 0"),
                put("model.reference.quantize", "nf4"),
            )
        if not s.reference.offload:
            yield (
                Lever("trainer.callbacks: [OffloadRoles]", "frozen roles pass over PCIe once an iteration"),
                add("OffloadRoles"),
            )
    elif s.rewards and not all(model.offload for model, _ in s.rewards.values()):
        yield (
            Lever("trainer.callbacks: [OffloadRoles]", "frozen roles pass over PCIe once an iteration"),
            add("OffloadRoles"),
        )
    trained = ["actor"] * (s.family == "fsdp") + ["critic"] * (s.critic is not None and not s.shared)
    if trained and not s.shared and not (s.critic is not None and s.critic.offload):
        roles = [*trained, *["reference"] * (s.reference is not None), *["reward"] * bool(s.rewards)]
        yield (
            Lever(
                f"OffloadRoles: {{roles: [{', '.join(roles)}]}}",
                "what trains passes over PCIe too, both ways, once an iteration",
            ),
            add("OffloadRoles", roles=roles),
        )
    if any(model.quantize == "none" for model, _ in s.rewards.values()):

        def quantized(target: dict[str, Any]) -> None:
            add("QuantizeRewardModel")(target)

        yield Lever("model.reward.quantize: nf4", "a small change of the scores"), quantized
    if s.sampling.max_new_tokens >= 64:
        half = s.sampling.max_new_tokens // 2
        yield (
            Lever(f"model.sampling.max_new_tokens: {half}", "shorter responses"),
            put("model.sampling.max_new_tokens", half),
        )
