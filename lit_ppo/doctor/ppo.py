"""Known mistakes that only PPO can make: a policy without a leash, texts that a reward model reads in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lit_ppo.config import RoleConfig
from lit_ppo.doctor import Line
from lit_ppo.doctor.config import Run
from lit_ppo.rewards import TrunkReward


def kl(run: Run) -> Iterator[Line]:
    """A policy without a leash, and a reference that only draws a chart."""
    ppo = run.module.ppo
    if not ppo.needs_reference:
        what = "the KL to the start is neither penalised nor charted (`ppo.kl_coef: 0`): nobody sees the policy drift"
        yield Line("info", what, "model.ppo.log_kl: true", "kl_coef")
    elif ppo.log_kl and not ppo.kl_coef and not ppo.kl_loss_coef:
        yield Line("info", "the reference is loaded and run for the KL's chart alone (`ppo.log_kl`)", "", "log_kl")
    elif ppo.log_kl:
        yield Line("info", "`ppo.log_kl` changes nothing: the KL is penalised, and so charted", "", "log_kl")


def reward_inputs(run: Run) -> Iterator[Line]:
    """Texts longer than a reward model reads."""
    new = run.module.sampling_config.max_new_tokens
    longest = _longest_texts(run.data)
    for reward in run.reward_models:
        limit = _context(reward, run.plan)
        if limit is None or reward.tokenizer is None or not longest:
            continue
        width = max(len(ids) for ids in reward.tokenizer(longest, verbose=False)["input_ids"])
        if width + new > limit:
            what = (
                f"reward `{reward.name}` reads {limit} tokens, and the longest prompt has {width} of them before the "
                f"response of up to {new}: the start of such prompts would be cut"
            )
            fix = f"data.max_prompt_length: {limit - new}" if limit > new else f"sampling.max_new_tokens: {limit // 2}"
            yield Line("warn", what, fix, "max_prompt_length" if limit > new else "max_new_tokens")


def engines(run: Run) -> Iterator[Line]:
    """Rollout engines that are slow, or that the strategy excludes."""
    if run.sharded and run.module.ppo.rollout_engine == "graph":
        what = "`ppo.rollout_engine: graph` captures layers that a sharding strategy hooks into"
        yield Line("error", what, "model.ppo.rollout_engine: auto", "ppo.rollout_engine")
    if run.on_cuda and run.module.ppo.rollout_engine == "hf":
        what = "`ppo.rollout_engine: hf` is several times slower than graph on CUDA"
        yield Line("info", what, "model.ppo.rollout_engine: auto", "rollout_engine")


OF_PPO: tuple[Callable[[Run], Iterator[Line]], ...] = (kl, reward_inputs, engines)


def _context(reward: Any, plan: Any) -> int | None:
    """Return what a reward model reads, by its configuration; one on the actor's trunk reads what the actor does."""
    from lit_ppo.roles.sources import context_length, model_config

    if isinstance(reward, TrunkReward) and plan is not None:
        limits = [reward.config.max_length, context_length(plan.config.get_text_config())]
        return min((n for n in limits if n), default=None)
    if reward.source is None:
        return None
    given = reward.config
    source = RoleConfig(
        source=str(Path(given.source).expanduser()), trust_remote_code=given.trust_remote_code, revision=given.revision
    )
    limits = [given.max_length, context_length(model_config("reward", source).get_text_config())]
    return min((n for n in limits if n), default=None)


def _longest_texts(data: Any, count: int = 8) -> list[str]:
    """Return the texts of the longest prompts, the policy's tokens counted."""
    ready = [prompt for prompts in getattr(data, "_ready", {}).values() for prompt in prompts]
    ready.sort(key=lambda prompt: -len(prompt.ids))
    return [prompt.text for prompt in ready[:count]]
