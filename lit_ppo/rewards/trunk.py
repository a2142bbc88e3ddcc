"""A reward model that is an adapter and a head on the actor's own trunk: no second trunk is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lit_ppo.algo.cut import by_tokens
from lit_ppo.config import RoleConfig
from lit_ppo.data.pairs import texts
from lit_ppo.rewards.base import RewardError, refuse_options
from lit_ppo.rewards.model import ModelReward
from lit_ppo.rewards.pretrained import head_options
from lit_ppo.roles.adapters import FrozenAdapter
from lit_ppo.roles.build import RolePlan
from lit_ppo.roles.loading import empty_model
from lit_ppo.roles.model import RoleView

PREFIX = "base_model.model."
"""Before the names of weights in a PEFT file."""
HEAD = f"{PREFIX}score.weight"
_ITS_OWN = ("quantize", "device", "device_map", "dtype", "attn_implementation", "trust_remote_code")


class TrunkReward(ModelReward):
    """A frozen adapter with a scalar head, computed by the actor's store with that adapter switched on.

    It reads texts as a `ModelReward` does, and scores them as the reward model would that has the same trunk: hidden
    state of the last token, head in float32, and the `reward_bias` that lit-ppo exports.

    Args:
        source: Folder or hub id of a PEFT adapter whose `modules_to_save` is its `score` head.
        options: Fields of `RewardConfig`.

    Raises:
        ValueError: An option that has no effect here.
    """

    def __init__(self, source: str, **options: Any) -> None:
        super().__init__(source, **(options | {"trunk": "actor"}))
        every = set(vars(self.config)) - {"timeout", "options", *_ITS_OWN}
        refuse_options(self.config, every, "a reward on the actor's trunk, which is held as `actor` says")
        self.adapter = "reward"
        """Its adapter's name in the store."""
        self.view: RoleView | None = None
        self.rows: int | None = None
        self.tokens: int | None = None
        self._bias = 0.0

    @property
    def source(self) -> str | None:
        """None: there is no whole model that a critic could start from."""
        return None

    # -- before any weight is loaded

    def check(self) -> None:
        """Check the adapter's files and its tokenizer.

        Raises:
            RewardError: As `ModelReward.check`; or it is no LoRA adapter with one head, or more than that.
        """
        super().check()
        if self._find().adapter is None:
            raise self.fail(
                f"`reward.trunk: actor` needs an adapter, and {self.config.source!r} is a whole model. Leave `trunk` "
                "out, or train the reward model with `lora` and export it without `merge`."
            )
        read_settings(self._path, self.config.revision)
        shapes = self._shapes()
        beside = sorted(name.removeprefix(PREFIX) for name in shapes if ".lora_" not in name and name != HEAD)
        if beside:
            raise self.fail(
                f"the adapter {self.config.source!r} also brings {', '.join(beside[:3])}, which would replace the "
                "actor's own. Train it as LoRA with a `score` head alone, or leave `trunk` out, which loads a model of "
                "its own."
            )
        if HEAD not in shapes:
            raise self.fail(
                f"the adapter {self.config.source!r} has no head (`score.weight`), so its scores would be random. "
                "Export it after `lit-ppo reward fit`, or with PEFT's `modules_to_save=['score']`."
            )

    def check_trunk(self, plan: RolePlan, tokenizer: Any, kwargs: dict[str, Any]) -> None:
        """Check that the adapter belongs on the actor's trunk.

        Args:
            plan: What will be loaded.
            tokenizer: The policy's.
            kwargs: What callbacks ask of the loading of this reward.

        Raises:
            RewardError: There is no such trunk, or it is another one.
        """
        if plan.lora is None:
            raise self.fail(
                "`reward.trunk: actor` needs a trunk that stays as it is, and without `lora` the actor trains the "
                "whole. Give `lora`, or leave `trunk` out."
            )
        if kwargs:
            raise self.fail("a callback quantizes it, but its trunk is the actor's: use `actor.quantize` instead.")
        given, wanted = read_settings(self._path, self.config.revision).base_model_name_or_path, plan.actor
        ours = wanted.source if isinstance(wanted, RoleConfig) else getattr(wanted, "name_or_path", "")
        if given and ours and _place(given) != _place(ours):
            raise self.fail(
                f"its adapter was trained on {given!r}, and the actor is {ours!r}: on another trunk its scores mean "
                "nothing. Train it on the actor's base. (If these are the same weights, moved, correct "
                f"`base_model_name_or_path` in {os.path.join(self.config.source, 'adapter_config.json')}.)"
            )
        model = empty_model(wanted, torch.float32, critic=False) if isinstance(wanted, RoleConfig) else wanted
        self._check_shapes(model)
        vocabulary = tokenizer.get_vocab()
        for token, number in sorted(self.tokenizer.get_vocab().items()):
            if vocabulary.get(token) != number:
                raise self.fail(
                    f"its tokenizer writes {token!r} as {number}, and the actor's as {vocabulary.get(token)}: they do "
                    "not read the same trunk. Save the actor's tokenizer beside the adapter."
                )

    def _check_shapes(self, model: Any) -> None:
        parts = dict(model.named_modules())
        for name, shape in self._shapes().items():
            path, _, part = name.removeprefix(PREFIX).partition(".lora_")
            if name == HEAD:
                expected, got = model.config.get_text_config().hidden_size, shape[-1]
            elif path not in parts:
                raise self.fail(f"its adapter has weights for `{path}`, which {type(model).__name__} does not have.")
            elif part == "A.weight":
                expected, got = _width(parts[path]), shape[-1]
            else:
                continue
            if expected is not None and got != expected:
                raise self.fail(
                    f"`{name.removeprefix(PREFIX)}` reads {got} features, and the actor has {expected} there: the "
                    "adapter is of another base."
                )

    # -- loading

    def frozen(self) -> FrozenAdapter:
        """Return the adapter, for the store to be built with."""
        return FrozenAdapter(self.adapter, read_settings(self._path, self.config.revision), self._adapter_weights)

    def bind(self, actor: RoleView, rows: int | None, tokens: int | None) -> None:
        """Compute with a store, as one of its roles.

        Args:
            actor: The actor, whose store has the adapter.
            rows: Most texts in a forward, or None.
            tokens: Most tokens in a forward, or None; a longer text is alone in one.
        """
        self.view = RoleView(actor.store, "states", self.adapter, actor.computes_on)
        self.model, self._core, self.rows, self.tokens = actor.store, actor.store.base, rows, tokens
        if self.tokenizer is None:
            self._find()
        self._pads, self._limit = True, self._context()

    def load(
        self,
        device: torch.device | str,
        load_kwargs: dict[str, Any] | None = None,
        transforms: Sequence[Callable[[nn.Module], nn.Module]] = (),
    ) -> None:
        """Read the head. The adapter came with the actor's store, which is moved and transformed as the actor."""
        if self.view is None:
            raise self.fail(
                "it scores with the actor's own trunk (`reward.trunk`): only a PPOLightningModule loads it."
            )
        if self._head is None:
            self._head = self._read()[HEAD].float()
            self._bias = float(head_options(self._path, self.config.revision).get("reward_bias") or 0.0)

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the adapter and the head, as they were read."""
        return sorted(self._read().items())

    def _file(self) -> str:
        from transformers.utils import cached_file

        name, revision = "adapter_model.safetensors", self.config.revision
        file = cached_file(self._path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is None:
            raise self.fail(f"{self.config.source!r} has no {name}. Save the adapter with PEFT's `save_pretrained`.")
        return str(file)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights, by their names in the file."""
        from safetensors import safe_open

        with safe_open(self._file(), "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def _read(self) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self._file())

    def _adapter_weights(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._read().items() if name != HEAD}

    # -- forward

    def _batches(self, ids: list[list[int]], batch_size: int) -> Iterator[list[int]]:
        """Yield row numbers: as many as the score phase takes at once, and no more than asked for."""
        for rows in super()._batches(ids, min(batch_size, self.rows or batch_size)):
            if self.tokens is None:
                yield rows
            else:
                for part in by_tokens([len(ids[i]) for i in rows], self.tokens):
                    yield [rows[i] for i in part]

    @torch.no_grad()
    def _forward(self, ids: list[list[int]]) -> Tensor:
        """Score b texts. Returns (b,) float32 on the CPU."""
        assert self.view is not None
        assert self._head is not None
        with torch.autocast(self.view.device.type, enabled=False):
            states, _ = self.view(texts(ids, torch.arange(len(ids)), 0))
        return linear(states.float(), self._head)[:, 0] + self._bias


def read_settings(source: str, revision: str | None) -> Any:
    """Read PEFT's configuration of an adapter, as one without a head that is not trained.

    Args:
        source: Folder or hub id.
        revision: On the hub.

    Raises:
        RewardError: It is not there, or is no LoRA adapter.
    """
    import peft
    from transformers.utils import find_adapter_config_file

    folder = str(Path(source).expanduser())
    try:
        file = find_adapter_config_file(folder, revision=revision)
        described = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RewardError(f"`reward.source={source!r}`: its adapter_config.json cannot be read: {error}") from error
    if described.get("peft_type") != "LORA":
        what = (
            f"an adapter of the kind {described['peft_type']}" if described else "no adapter (no adapter_config.json)"
        )
        raise RewardError(f"`reward.source={source!r}` is {what}. With `trunk: actor` it must be LoRA.")
    settings: Any = peft.LoraConfig.from_pretrained(folder, revision=revision)
    settings.inference_mode, settings.lora_dropout = True, 0.0
    return settings


def _place(source: str) -> str:
    """Return a folder's absolute path, or a hub id as it is."""
    path = Path(source).expanduser()
    return os.path.realpath(path) if path.is_dir() else source.rstrip("/")


def _width(layer: Any) -> int | None:
    """Return the input features of a linear layer; None of another."""
    found = getattr(layer, "in_features", None)
    if found is None and type(layer).__name__ == "Conv1D":
        found = layer.weight.shape[0]
    return None if found is None else int(found)
