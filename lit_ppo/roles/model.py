"""A Hugging Face model as PPO's roles see it: log-probs and values of response tokens, nothing wider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_ppo.experience import Prompts, Rollout
from lit_ppo.roles.adapters import active_adapter, adapter_aware, tuner_layers
from lit_ppo.roles.fused_head import HeadSpec
from lit_ppo.roles.logprobs import token_logprobs, values_from
from lit_ppo.roles.packed import Layout, attach, packed_states


class RoleModel(nn.Module):
    """A parameter store: one transformers model, perhaps with adapters and a value head. Roles are views of it.

    Its forward is the only way in, so that a sharding strategy can gather what it needs around it.

    Args:
        model: A causal LM (log-probs), or a one-label sequence classifier (values).
        value_head: A linear layer with one output, for values from a causal LM's trunk.
        frozen: Names of adapters that are neither trained nor saved.
        home: Where a model that accelerate has put on its devices takes its input; it is not moved then.
    """

    def __init__(
        self,
        model: nn.Module,
        value_head: nn.Module | None = None,
        frozen: tuple[str, ...] = (),
        home: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.value_head, self.frozen, self.home = value_head, frozen, home
        self.packs = False
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
            output: "logprobs", "values", or "states".
            adapter: The adapter to compute with; None is the bare trunk.
            rollout: B rows, P prompt and R response positions.
            temperature: Divides the logits.
            suppress: (S,) int64 ids left out of the distribution.
            entropy: Also return entropies.

        Returns:
            (B, R) float32 log-probs or values, 0 off the mask, and (B, R) entropies or None. Position t of a value is
            the state *before* response token t is emitted. For "states" (N, H): the hidden states that predict the N
            response tokens, row by row.
        """
        layout, shape = Layout.of(rollout), rollout.ids.shape
        with self.using(adapter):
            hidden = self._hidden(rollout, layout)
            if output == "states":
                return hidden, None
            if output == "values":
                head, bias = self.value_head, 0.0
                if head is None:
                    head, bias = value_head_of(self.base), reward_bias(self.base.config)
                return _spread(values_from(hidden, head) + bias, layout.cells, shape), None
            logprobs, entropies = token_logprobs(
                hidden,
                rollout.ids.flatten().index_select(0, layout.cells),
                self.base.get_output_embeddings(),
                temperature=temperature,
                suppress=suppress,
                spec=HeadSpec.of(self.base.config),
                entropy=entropy,
            )
            return (
                _spread(logprobs, layout.cells, shape),
                None if entropies is None else _spread(entropies, layout.cells, shape),
            )

    def _hidden(self, rollout: Rollout, layout: Layout) -> Tensor:
        """Return (N, H): the states that predict each response token."""
        decoder = decoder_of(self.base)
        if self.packs:
            ids = torch.cat([rollout.prompts.ids, rollout.ids], dim=1)
            own = self.base.config.get_text_config()._attn_implementation
            return packed_states(decoder, ids, layout, own).to(ids.device).index_select(0, layout.states)
        ids = torch.cat([rollout.prompts.ids, rollout.ids[:, :-1]], dim=1)
        mask = torch.cat([rollout.prompts.mask, rollout.mask[:, :-1]], dim=1)
        hidden: Tensor = decoder(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=(mask.long().cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        return hidden.to(ids.device).flatten(0, 1).index_select(0, layout.padded_states)

    def pack(self) -> str | None:
        """Run without padding from now on, if the model can.

        Returns:
            Why it cannot, or None.
        """
        reason = attach(self.base)
        self.packs = reason is None
        return reason

    def pad(self) -> None:
        """Run padded from now on."""
        self.packs = False

    @torch.no_grad()
    def packing_fails(self) -> str | None:
        """Compare a packed forward with a padded one, and with one whose first sequence has other tokens.

        Some architectures mix neighbouring tokens outside their attention, or ask of it what ours does not know.

        Returns:
            What is wrong, or None if nothing is, or if there is no packing.
        """
        if not self.packs:
            return None
        device, vocab = self.base.get_input_embeddings().weight.device, self.base.config.get_text_config().vocab_size
        batches = [probe(first, vocab).to(device) for first in (3, 4)]
        layout = Layout.of(batches[0])
        own = layout.cells >= batches[0].ids.shape[1]  # those of the second sequence
        try:
            packed, other = (self._hidden(batch, layout).double() for batch in batches)
        except NotImplementedError as reason:
            return str(reason)
        self.packs = False
        padded = self._hidden(batches[0], layout).double()
        self.packs = True
        leak = float((packed - other)[own].norm() / packed[own].norm())
        error = float((packed - padded).norm() / padded.norm())
        half = self.base.dtype.itemsize < 4 or torch.is_autocast_enabled(device.type)
        if not (leak < 0.01 and error < (0.1 if half else 0.02)):  # far above rounding, far below a mistake
            return (
                f"a packed forward of {type(self.base).__name__} differs from a padded one by {error:.1%}, and a "
                f"sequence by {leak:.1%} when its neighbour changes"
            )
        return None

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
        output: "logprobs", "values" or "states".
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


def probe(first: int, vocab: int) -> Rollout:
    """Return two short sequences to try a model with.

    Args:
        first: What the first sequence is made from.
        vocab: Ids stay below it.
    """
    prompts = torch.tensor([[first, 5 * first, 7 * first], [0, 0, 11]]) % vocab
    ids = torch.tensor([[13 * first, 17 * first, 0, 0], [19, 23, 29, 31]]) % vocab
    lengths, index = torch.tensor([2, 4]), torch.arange(2)
    made = Prompts(prompts, torch.tensor([3, 1]), index, text=[""] * 2, messages=[None] * 2, columns=[{}, {}])
    return Rollout(made, ids, lengths, lengths > 2, torch.zeros(2, 4))


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


def reward_bias(config: Any) -> float:
    """Return what is added to a reward model's logits: transformers gives its heads no bias (`RewardModule`)."""
    return float(getattr(config, "reward_bias", None) or 0.0)


def _spread(x: Tensor, cells: Tensor, shape: torch.Size) -> Tensor:
    """Put (N,) values into the given cells of a (B, R) grid, 0 elsewhere; differentiable."""
    # A copy, because FSDP2 hangs its backward on what a forward returns, which must not be a view.
    return x.new_zeros(shape.numel()).index_copy(0, cells, x).view(shape).clone()
