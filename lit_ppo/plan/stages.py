"""SFT and the reward model as the forecast sees them: one model that is trained on whole texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lit_ppo.config import AdamConfig, LoRAConfig, PPOConfig, SamplingConfig, from_dict
from lit_ppo.plan.setup import TRUE, Setup, Shapes, completed, read_model, spread
from lit_ppo.roles.sources import context_length, model_config

SECTIONS = {"ppo": "ppo", "sft": "sft", "reward": "ranking"}
"""Where each stage's configuration says how a batch is cut."""


def read_stage(
    config: Mapping[str, Any],
    stage: str,
    shapes: Shapes = model_config,
    *,
    gpus: int = 1,
    strategy: str | None = None,
    card: int = 80 * 2**30,
) -> Setup:
    """Read the configuration of a stage before PPO, as `lit_ppo.plan.setup.read_setup` reads PPO's.

    Args:
        config: As parsed.
        stage: sft or reward.
        shapes: From role and source to a transformers configuration.
        gpus: Of the run.
        strategy: one, ddp or fsdp; None: as the trainer's.
        card: Bytes of each.
    """
    model, data, trainer = (config.get(part) or {} for part in ("model", "data", "trainer"))
    options = model.get(SECTIONS[stage]) or {}
    lora = None if model.get("lora") is None else from_dict(LoRAConfig, model["lora"])
    precision = str(trainer.get("precision") or "32-true")
    role = "reward" if stage == "reward" else "actor"
    found = read_model(role, model[role], shapes, trained=lora is None, true=TRUE.get(precision))
    known = {f.name for f in fields(AdamConfig)}
    optim = {name: value for name, value in (model.get("optim") or {}).items() if name in known}
    longest, notes = data.get("max_length"), []
    if longest is None:
        longest = context_length(found.config.get_text_config()) or 4096
        notes.append(
            f"`data.max_length` is not set: texts of {longest} tokens, all that the context holds, are assumed."
        )
    if stage == "reward":
        prompt, new = int(longest), 1  # a token that nobody reads follows each text
    else:
        prompt, new = 1, max(1, int(longest) - 1)  # all of it an answer
    ppo = PPOConfig(
        epochs=1,
        advantage="reinforce_pp",
        kl_coef=0.0,
        rollout_engine="hf",
        packing=options.get("packing", True),
        fused_layers=options.get("fused_layers", True),
        micro_batch_size=options.get("micro_batch_size"),
        micro_batch_tokens=options.get("micro_batch_tokens"),
    )
    setup = Setup(
        found, None, None, {}, ppo, SamplingConfig(max_new_tokens=new), from_dict(AdamConfig, optim), lora,
        shared=False, precision=precision, prompt=prompt, episodes=-(-int(data.get("batch_size") or 1) // gpus),
        ranks=gpus, card=card, notes=notes, stage=stage, **spread(strategy or trainer.get("strategy"), gpus),
    )  # fmt: skip
    return completed(setup, trainer)
