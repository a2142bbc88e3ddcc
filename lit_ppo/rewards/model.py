"""Rewards that are sequence-classification models, each with its own tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_ppo.config import from_dict
from lit_ppo.rewards.base import Reward, Samples, refuse_options
from lit_ppo.rewards.config import RewardConfig
from lit_ppo.rewards.pretrained import Pretrained, find_pretrained, load_pretrained
from lit_ppo.roles.model import reward_bias

_POOL_BY_PAD_ID = ("ctrl", "modernbert-decoder")  # decoders whose own pooling needs a pad id that no text contains


class ModelReward(Reward):
    """A frozen model with one label; its logit at the last real token of prompt + response is the score.

    What it reads: a chat is rendered with the model's own template, the response being the assistant's turn (without
    white space around it). Everything else is the prompt's text without the policy's special tokens, followed directly
    by the response, tokenized as one text with the special tokens of the model's own tokenizer. An empty text is read
    as the tokenizer's BOS (else EOS). A text longer than the model's context loses the start of its prompt, but not
    the BOS or CLS token in front of it.

    Decoders (a `score` head) run without their own pooling, which looks for pad ids and so takes the wrong token where
    pad is EOS. Encoders (a `classifier`) pool as they were trained to. Other models run on texts of one length at a
    time, so that there is nothing to mask.

    Args:
        source: A folder, a hub id, or a transformers module. A module is put in eval mode and frozen when loaded.
        tokenizer: The tokenizer of a module; None: its attribute `tokenizer`. A folder or id brings its own.
        options: Fields of `RewardConfig`.

    Raises:
        TypeError: A module that is not a transformers model, or has no tokenizer.
        ValueError: An option that has no effect here.
    """

    def __init__(self, source: str | nn.Module, tokenizer: Any = None, **options: Any) -> None:
        given: Any = None if isinstance(source, str) else source
        config = from_dict(RewardConfig, {**options, "source": source if given is None else ""})
        super().__init__(config, Path(config.source).absolute().name if given is None else type(given).__name__)
        if config.trunk != "own" and not hasattr(type(self), "check_trunk"):
            raise ValueError(f"`reward.trunk={config.trunk!r}` has no effect on a ModelReward: use `TrunkReward`.")
        loading = {"trunk", "quantize", "device_map", "dtype", "attn_implementation", "trust_remote_code", "revision"}
        allowed = set(asdict(config)) - {"timeout", "options"} - (set() if given is None else loading)
        refuse_options(config, allowed, "a reward model" if given is None else "a reward model that is already built")
        self.tokenizer = tokenizer
        self._given = given
        self._path = str(Path(self.config.source).expanduser())
        self._core: Any = None
        self._head: Any = None
        if given is not None:
            self.tokenizer = tokenizer or getattr(given, "tokenizer", None)
            if not hasattr(getattr(given, "config", None), "num_labels"):
                raise TypeError(
                    f"Reward `{self.name}` is a {type(given).__name__}, not a transformers sequence-classification "
                    "model. To score with any other module, pass a Python function that calls it."
                )
            if self.tokenizer is None:
                raise TypeError(f"Reward `{self.name}` has no tokenizer: pass `ModelReward(module, tokenizer)`.")
        elif tokenizer is not None:
            raise TypeError(f"Reward `{self.name}`: a model given by its folder or id uses the tokenizer saved there.")

    @property
    def source(self) -> str | None:
        """The folder or hub id of a whole model, which a critic may start from; None for a module or an adapter."""
        adapter = Path(self._path).is_dir() and not Path(self._path, "config.json").exists()
        return None if self._given is not None or adapter else self._path

    def check(self) -> None:
        """Check the configuration and the tokenizer of a module, folder or hub id.

        Raises:
            RewardError: Files are missing, the model has not one label, its context is shorter than `max_length`, or
                a chat template is asked for that it does not have.
        """
        if self._given is not None:
            self._check_config(self._given.config)
            self._check_template()
            return
        if Path(self._path).is_dir():
            names = sorted(p.name for p in Path(self._path).iterdir())
            if not {"config.json", "adapter_config.json"}.intersection(names):
                raise self.fail(
                    f"the folder {self.config.source!r} has no config.json; it holds {', '.join(names) or 'nothing'}. "
                    "Give the folder that `save_pretrained` wrote model and tokenizer to."
                )
            if not any(name.endswith((".safetensors", ".bin")) for name in names):
                raise self.fail(f"the folder {self.config.source!r} has no weights (*.safetensors), only {names}.")
        self._find()

    def load(
        self,
        device: torch.device | str,
        load_kwargs: dict[str, Any] | None = None,
        transforms: Sequence[Callable[[nn.Module], nn.Module]] = (),
    ) -> None:
        """Load the model, frozen and in eval mode, onto `config.device` or `device`; a second call only moves it.

        A module that is quantized or spread over several devices stays where it is.

        Args:
            device: The rank's device.
            load_kwargs: Further arguments of `from_pretrained`, such as a quantization config.
            transforms: Applied in turn to the loaded model.

        Raises:
            RewardError: As `check`; or the weights cannot be found or do not include the head.
        """
        target = torch.device(self.config.device or device)
        if self.model is None:
            self.check()
            with torch.inference_mode(False):  # weights made inside it could not be used outside
                model = self._given or load_pretrained(self._find(), self.config, target, load_kwargs or {})
                self.model = self._adopt(model)
                for transform in transforms:
                    self.model = self._adopt(transform(self.model))
        if self.config.device_map is None and not _is_placed(self.model):
            self.model.to(target)

    def _adopt(self, model: Any) -> nn.Module:
        """Freeze a model and find out how its scores are read."""
        self._core = model.get_base_model() if hasattr(model, "get_base_model") else model  # what PEFT wrapped
        if self._core.config.model_type in _POOL_BY_PAD_ID:
            raise self.fail(f"{self._core.config.model_type} models are not supported: they pool by the pad id.")
        frozen: nn.Module = model.requires_grad_(False).eval()
        head = getattr(self._core, "score", None)
        self._head = head if isinstance(head, nn.Module) and not self._core.config.is_encoder_decoder else None
        if self._head is not None:
            self._head.float()  # bfloat16 would round the scores to 3 digits
        self._masks = "attention_mask" in inspect.signature(self._core.forward).parameters
        self._pads = self._head is not None or (self._masks and hasattr(self._core, "classifier"))
        self._limit = self._context()
        return frozen

    def score(self, samples: Samples, batch_size: int | None = None) -> Tensor:
        """Score the texts, `batch_size` at a time.

        Args:
            samples: B samples.
            batch_size: None: `config.batch_size`.

        Returns:
            (B,) float32 on the CPU.

        Raises:
            RewardError: Not loaded; the chat template fails; or a token is not in the model's vocabulary.
        """
        if self.model is None:
            raise self.fail("its model is not loaded. Call `load(device)` first.")
        ids = self._encode(samples)
        scores = torch.zeros(len(ids), dtype=torch.float32)
        for rows in self._batches(ids, batch_size or self.config.batch_size):
            scores[rows] = self._forward([ids[i] for i in rows])
        return scores

    # -- loading

    def _find(self) -> Pretrained:
        """Read and check the configuration and the tokenizer of a folder or hub id."""
        found = find_pretrained(self.config)
        self.tokenizer = found.tokenizer
        self._check_config(found.config)
        self._check_template()
        return found

    def _check_config(self, config: Any) -> None:
        if config.num_labels != 1:
            kind = ", ".join(getattr(config, "architectures", None) or ["a model"])
            raise self.fail(
                f"`config.num_labels` is {config.num_labels} ({kind}), and a reward is one number. Use a model trained "
                "with num_labels=1, or score with a Python function that picks the label that you want."
            )
        positions = _positions(config)
        if self.config.max_length is not None and positions is not None and self.config.max_length > positions:
            raise self.fail(f"`max_length={self.config.max_length}` is longer than its context of {positions} tokens.")

    def _check_template(self) -> None:
        if self.config.use_chat_template and not getattr(self.tokenizer, "chat_template", None):
            raise self.fail("`use_chat_template` is set, but its tokenizer has no chat template. Leave it out.")

    def _context(self) -> int | None:
        """Return the longest input in tokens, or None where nothing bounds it."""
        limits = [_positions(self._core.config)]
        for name, part in self._core.named_modules():
            if name.endswith("position_embeddings") and isinstance(part, nn.Embedding) and part.padding_idx is not None:
                limits.append(part.num_embeddings - part.padding_idx - 1)  # RoBERTa counts on from its padding index
        # an explicit length is for the user to choose, within what the model can index
        limits.append(self.config.max_length or getattr(self.tokenizer, "model_max_length", None))
        return min((int(n) for n in limits if n is not None and 0 < n < 2**31), default=None)

    # -- texts

    def _encode(self, samples: Samples) -> list[list[int]]:
        """Return the token ids that the model reads, cut to its context."""
        chats: dict[int, str] = {}
        texts: dict[int, str] = {}
        for i in range(len(samples)):
            use = self.config.use_chat_template
            if use is None:
                use = samples.messages[i] is not None and bool(getattr(self.tokenizer, "chat_template", None))
            if use:
                chats[i] = self._render(samples, i)
            else:
                texts[i] = samples.plain_prompts[i] + samples.responses[i]
        ids: list[list[int]] = [[] for _ in range(len(samples))]
        for part, special in ((chats, False), (texts, True)):  # a template writes its own special tokens
            if part:
                encoded = self.tokenizer(list(part.values()), add_special_tokens=special, verbose=False)["input_ids"]
                for i, row in zip(part, encoded, strict=True):
                    ids[i] = list(row)
        known = self._core.get_input_embeddings().num_embeddings
        for i, row in enumerate(ids):
            if not row:
                ids[i] = [self._first_of("bos_token_id", "eos_token_id", "cls_token_id")]
            if max(ids[i]) >= known:
                raise self.fail(
                    f"its tokenizer makes token {max(ids[i])}, but the model has {known}: they do not belong together. "
                    f"First seen in {samples.describe(i)}."
                )
        long = 0 if self._limit is None else sum(len(row) > self._limit for row in ids)
        self.truncated = long
        if long:
            self.warn_once(
                "cut",
                f"texts longer than its context of {self._limit} tokens lose the start of their prompt "
                f"({long} of {len(ids)} in this batch). Said once.",
            )
        return [self._cut(row) for row in ids]

    def _render(self, samples: Samples, i: int) -> str:
        chat = list(samples.messages[i] or [{"role": "user", "content": samples.plain_prompts[i]}])
        response = samples.responses[i]
        if chat[-1].get("role") == "assistant":  # the policy went on with a turn that the prompt began
            chat[-1] = {**chat[-1], "content": (chat[-1]["content"] + response).strip()}
        else:
            chat.append({"role": "assistant", "content": response.strip()})
        try:
            return str(self.tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception as error:
            raise self.fail(f"its chat template failed on {samples.describe(i)}: {error}") from error

    def _first_of(self, *names: str) -> int:
        for name in names:
            if (token := getattr(self.tokenizer, name, None)) is not None:
                return int(token)
        raise self.fail(f"a text is empty, and its tokenizer has none of {', '.join(names)} to stand for it.")

    def _cut(self, ids: list[int]) -> list[int]:
        if self._limit is None or len(ids) <= self._limit:
            return ids
        front = [getattr(self.tokenizer, name, None) for name in ("bos_token_id", "cls_token_id")]
        kept = 1 if ids[0] in front and self._limit > 1 else 0
        return ids[:kept] + ids[len(ids) - (self._limit - kept) :]

    # -- forward

    def _batches(self, ids: list[list[int]], batch_size: int) -> Iterator[list[int]]:
        """Yield row numbers, texts of like length together."""
        batch: list[int] = []
        for i in sorted(range(len(ids)), key=lambda i: len(ids[i])):
            full = len(batch) == batch_size
            if batch and (full or (not self._pads and len(ids[i]) != len(ids[batch[0]]))):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    @torch.no_grad()
    def _forward(self, ids: list[list[int]]) -> Tensor:
        """Score b texts; they are right-padded, so that positions count from 0. Returns (b,) float32 on the CPU."""
        device = self._core.get_input_embeddings().weight.device
        lengths = torch.tensor([len(row) for row in ids])
        width = int(lengths.max())
        known = self._core.get_input_embeddings().num_embeddings
        pad = getattr(self.tokenizer, "pad_token_id", None)
        pad = pad if pad is not None and pad < known else 0  # never read: the mask is made from the lengths
        inputs = {
            "input_ids": torch.tensor([row + [pad] * (width - len(row)) for row in ids]).to(device),
            "attention_mask": (torch.arange(width) < lengths[:, None]).long().to(device),
        }
        # the model's own dtype holds, whatever precision the trainer runs the policy in
        with torch.autocast(device.type, enabled=False):
            if self._head is None:
                if not self._masks:
                    del inputs["attention_mask"]
                logits = self._core(**inputs, return_dict=True).logits
            else:
                trunk = getattr(self._core, self._core.base_model_prefix)
                hidden = trunk(**inputs, use_cache=False, return_dict=True).last_hidden_state
                last = hidden[torch.arange(len(ids), device=hidden.device), (lengths - 1).to(hidden.device)]
                weight = next(self._head.parameters())
                logits = self._head(last.to(device=weight.device, dtype=weight.dtype))
        return logits.float().reshape(len(ids)).cpu() + reward_bias(self._core.config)


def _positions(config: Any) -> int | None:
    """Return how many positions a model can index, where it says so."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    return positions if positions is not None and positions > 0 else None


def _is_placed(model: nn.Module) -> bool:
    """Whether a module must not be moved: it is quantized, or spread over devices."""
    quantized = any(type(p).__name__ in ("Params4bit", "Int8Params") for p in model.parameters())
    return quantized or len(getattr(model, "hf_device_map", {})) > 1
