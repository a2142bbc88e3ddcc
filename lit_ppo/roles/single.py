"""A run of one model: what SFT and the reward model train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lit_ppo.config import LoRAConfig, RoleConfig
from lit_ppo.roles.adapters import VALUE, add_adapters
from lit_ppo.roles.build import RolePlan, Source, check_source, load_role, read_config, sourceless
from lit_ppo.roles.loading import critic_from, empty_model
from lit_ppo.roles.model import RoleModel, RoleView
from lit_ppo.roles.names import trained_parameters
from lit_ppo.roles.quantized import check_frozen, check_quantize
from lit_ppo.roles.sources import first_line


@dataclass
class OneRole:
    """The model of a run that has only one."""

    role: str
    view: RoleView

    def all(self) -> dict[str, RoleView]:
        """Return the role by its name."""
        return {self.role: self.view}

    def saved(self) -> dict[str, RoleView]:
        """Return the same: it is trained, and kept in checkpoints."""
        return self.all()

    def pack(self) -> str | None:
        """Have the model run without padding; if it cannot, return why."""
        return self.view.store.pack()

    def pad(self) -> None:
        """Have the model run padded."""
        self.view.store.pad()

    def trained(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Return the named parameters of its optimizer group."""
        return {self.role: trained_parameters(self.view)}


def plan_role(role: str, source: Source, lora: LoRAConfig | None, seed: int) -> RolePlan:
    """Check the source of a run's only model; read its configuration only.

    Args:
        role: Its name.
        source: Folder, hub id, RoleConfig or transformers model.
        lora: Adapters, or None for full fine-tuning.
        seed: Of adapters and heads.

    Raises:
        ValueError: A source that is missing or does not exist.
    """
    if abs(seed) >= 2**63:
        raise ValueError(f"`seed={seed}` does not fit into 63 bits, as torch's generators need.")
    found = check_source(role, source)
    if found is None or sourceless(found):
        raise ValueError(f"`{role}` is missing: give a folder, a Hugging Face id, or a transformers model.")
    config = read_config(role, found)
    if isinstance(found, RoleConfig):
        check_quantize(f"{role}.quantize", found.quantize, config)
        check_frozen(role, found, lora)
    return RolePlan(
        actor=found,
        critic=None,
        reference=None,
        layout="separate",
        lora=lora,
        has_critic=False,
        has_reference=False,
        config=config,
        seed=seed,
    )


def check_scorer(role: str, plan: RolePlan) -> None:
    """Check, on the meta device, that a source can have a scalar head on its last token.

    Args:
        role: Its name.
        plan: From `plan_role`.

    Raises:
        ValueError: It cannot.
    """
    source, classifies = plan.actor, (getattr(plan.config, "architectures", None) or [""])[0].endswith("Classification")
    if classifies and plan.config.num_labels != 1:
        raise ValueError(
            f"`{role}` is a classifier of {plan.config.num_labels} labels, and a reward is one number. Start from a "
            "language model, or from a reward model saved with num_labels=1."
        )
    try:
        model = source if isinstance(source, nn.Module) else empty_model(source, torch.float32, critic=True)
    except ValueError as error:
        raise ValueError(f"`{role}`: a {plan.config.model_type} cannot be a scorer: {first_line(error)}") from error
    if is_language_model(source):
        return  # a language model, which gets a head
    head = getattr(model, "score", None)
    if head is None or head.weight.shape[0] != 1:
        raise ValueError(
            f"`{role}` is a {type(model).__name__}, which has no `score` head with one output on its last token. Use a "
            "decoder, such as the model that was fine-tuned, or a reward model saved with num_labels=1."
        )


def build_scorer(role: str, plan: RolePlan, device: torch.device) -> RoleView:
    """Load a sequence classifier with one label, on the CPU; a language model gets a head that outputs 0.

    Args:
        role: Its name.
        plan: From `plan_role`.
        device: Where it will compute; decides a dtype that is left to `auto`.
    """
    source = plan.actor
    if is_language_model(source):
        source = critic_from(source)
    if plan.lora is not None and isinstance(source, nn.Module):
        source.requires_grad_(False)  # before the transforms: only what is frozen may be quantized
    model = load_role(role, source, plan, device, trained=plan.lora is None)
    if plan.lora is None:
        return RoleView(RoleModel(model.requires_grad_(True)), "values")
    model.score.float()
    wrapped = add_adapters(model, plan.lora, [VALUE], plan.seed)
    wrapped.get_base_model().score.requires_grad_(True)
    return RoleView(RoleModel(wrapped), "values", VALUE)


def is_language_model(source: Any) -> bool:
    """Whether a source is a transformers model with a language model's head."""
    return isinstance(source, nn.Module) and getattr(source, "get_output_embeddings", lambda: None)() is not None
