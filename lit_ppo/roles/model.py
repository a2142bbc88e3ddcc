"""A Hugging Face model as PPO's roles see it: log-probs and values of response tokens, nothing wider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_ppo.experience import Rollout
from lit_ppo.roles.adapters import active_adapter, adapter_aware, tuner_layers
from lit_ppo.roles.fused_head import HeadSpec
from lit_ppo.roles.logprobs import token_logprobs, values_from


class RoleModel(nn.Module):
    """A parameter store: one transformers model, perhaps with adapters and a value head. Roles are views of it.

    Its forward is the only way in, so that a sharding strategy can gather what it needs around it.

    Args:
        model: A causal LM (log-probs), or a one-label sequence classifier (values).
        value_head: A linear layer with one output, for values from a causal LM's trunk.
    """

    def __init__(self, model: nn.Module, value_head: nn.Module | None = None) -> None:
        super().__init__()
        self.model: Any = model
        self.value_head = value_head
        self._tuners = tuner_layers(model) if hasattr(model, "peft_config") else []

    @property
    def base(self) -> Any:
        """The transformers model, without PEFT's wrapper (its adapted layers stay in place)."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move and convert, but leave float32 buffers float32.

        Rotary frequencies are such. Rounded to bfloat16, as `Trainer(precision="bf16-true")` would have them, they
        are off by a whole turn after some hundred positions.
        """
        before = [(m, n, b) for m in self.modules() for n, b in m._buffers.items() if b is not None]
        result = super()._apply(fn, recurse)
        for owner, name, buffer in before:
            now = owner._buffers[name]
            if now is not None and buffer.dtype == torch.float32 != now.dtype:
                owner._buffers[name] = buffer.to(now.device)
        return result

    def checkpoint_wrapper_hook(self, checkpoint: Any) -> Any:
        """Adapt a checkpoint function to this store (read by `lit_ppo.callbacks.GradientCheckpointing`)."""
        return adapter_aware(checkpoint, self._tuners) if self._tuners else checkpoint

    def using(self, adapter: str | None) -> Any:
        """Return a context in which the given adapter, or with None the bare trunk, is on."""
        return active_adapter(self._tuners, adapter)

    def forward(
        self,
        output: str,
        adapter: str | None,
        rollout: Rollout,
        *,
        temperature: float = 1.0,
        suppress: Tensor | None = None,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model once over prompt and response.

        Args:
            output: "logprobs" or "values".
            adapter: The adapter to compute with; None is the bare trunk.
            rollout: B rows, P prompt and R response positions.
            temperature: Divides the logits.
            suppress: (S,) int64 ids left out of the distribution.
            entropy: Also return entropies.

        Returns:
            (B, R) float32 log-probs or values, 0 off the mask, and (B, R) entropies or None. Position t of a value is
            the state *before* response token t is emitted.
        """
        with self.using(adapter):
            mask = rollout.mask
            hidden = self._hidden(rollout)[mask]
            if output == "values":
                head = self.value_head if self.value_head is not None else value_head_of(self.base)
                return _spread(values_from(hidden, head), mask), None
            logprobs, entropies = token_logprobs(
                hidden,
                rollout.ids[mask],
                self.base.get_output_embeddings(),
                temperature=temperature,
                suppress=suppress,
                spec=HeadSpec.of(self.base.config),
                entropy=entropy,
            )
            return _spread(logprobs, mask), None if entropies is None else _spread(entropies, mask)

    def _hidden(self, rollout: Rollout) -> Tensor:
        """Return (B, R, H): the states that predict each response token."""
        width = rollout.prompts.ids.shape[1]
        ids = torch.cat([rollout.prompts.ids, rollout.ids[:, :-1]], dim=1)
        mask = torch.cat([rollout.prompts.mask, rollout.mask[:, :-1]], dim=1)
        hidden = decoder_of(self.base)(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        return hidden[:, width - 1 :]

    @torch.no_grad()
    def check_head(self, role: str) -> None:
        """Compare the log-probs computed here with the model's own logits on a few tokens.

        Architectures may do more to their logits after the head than `HeadSpec` knows; training on other log-probs than
        those that are sampled would be silently wrong.

        Args:
            role: For the error.

        Raises:
            ValueError: They differ.
        """
        base = self.base
        device = base.get_input_embeddings().weight.device
        ids = torch.arange(1, 5, device=device)[None] % base.config.get_text_config().vocab_size
        hidden = decoder_of(base)(input_ids=ids, use_cache=False).last_hidden_state
        ours = HeadSpec.of(base.config)(base.get_output_embeddings()(hidden).float())
        theirs = base(input_ids=ids, use_cache=False).logits.float()
        if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max())):
            raise ValueError(
                f"`{role}` is a {type(base).__name__}, whose logits are not its output embedding applied to its last "
                "hidden state, scaled and capped as its config says: they are changed in another way, so its log-probs "
                "would be wrong. This architecture is not supported yet."
            )


@dataclass
class RoleView:
    """One role: a store and the adapter it computes with. Callable; moves data to its own device and back.

    Attributes:
        store: Holds the weights; shared between roles in the shared-trunk layout.
        output: "logprobs" or "values".
        adapter: Name of the adapter that is on; None for the bare model.
        computes_on: Where; None: where its weights are (which FSDP may keep on the CPU in between).
    """

    store: Any
    output: str
    adapter: str | None = None
    computes_on: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Where the store computes."""
        return next(self.store.parameters()).device if self.computes_on is None else self.computes_on

    def __call__(self, rollout: Rollout, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return the role's (B, R) output on the rollout's device; see `RoleModel.forward`."""
        home = rollout.ids.device
        if self.device != home:
            rollout = rollout.to(self.device)
        result, extra = self.store(self.output, self.adapter, rollout, **options)
        return result.to(home), None if extra is None else extra.to(home)


def decoder_of(model: Any) -> Any:
    """Return the part of a transformers model that turns ids into hidden states."""
    return model.get_decoder() if hasattr(model, "lm_head") or hasattr(model, "embed_out") else model.base_model


def value_head_of(model: Any) -> nn.Module:
    """Return the scalar head of a sequence classifier.

    Raises:
        ValueError: It has none with one output.
    """
    head = getattr(model, "score", None)
    if head is None or head.weight.shape[0] != 1:
        raise ValueError(
            f"{type(model).__name__} has no `score` head with one output, so it cannot be a critic. "
            "Use a decoder-only sequence classifier saved with num_labels=1."
        )
    return head


def _spread(x: Tensor, mask: Tensor) -> Tensor:
    """Put (N,) values back at the True positions of a (B, R) mask, 0 elsewhere; differentiable."""
    return torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_scatter(mask, x)
