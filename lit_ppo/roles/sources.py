"""Where models and tokenizers come from. Everything here is cheap: configurations and tokenizers, never weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_ppo.config import RoleConfig


def model_config(role: str, config: RoleConfig) -> Any:
    """Read the transformers configuration of a role's source.

    Args:
        role: Its name, for the error.
        config: Names the source.

    Raises:
        ValueError: The source is neither a folder with a `config.json` nor reachable on the hub.
    """
    from transformers import AutoConfig

    source = config.source
    if source is not None and Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        inside = ", ".join(sorted(p.name for p in Path(source).iterdir())[:8]) or "nothing"
        adapter = (Path(source) / "adapter_config.json").is_file()
        raise ValueError(
            f"`{role}={source!r}` is a folder without a config.json (it holds {inside}). "
            + (
                "It is a PEFT adapter: merge it into its base first (`PeftModel.merge_and_unload`, `save_pretrained`)."
                if adapter
                else "Give the folder that `save_pretrained` wrote."
            )
        )
    if source is not None and Path(source).is_file():
        raise ValueError(f"`{role}={source!r}` is a file. Give the folder that `save_pretrained` wrote.")
    if source is not None and not Path(source).exists() and (source[:1] in "./~" or source.count("/") > 1):
        raise ValueError(
            f"`{role}={source!r}` cannot be read: there is no such folder. Check the spelling, or give a Hugging Face "
            "id (owner/name)."
        )
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code, revision=config.revision)
    except (OSError, ValueError) as error:
        if source is not None and Path(source).is_dir():
            raise ValueError(
                f"`{role}={source!r}` has a config.json that cannot be read: {first_line(error)}"
            ) from error
        raise ValueError(
            f"`{role}={source!r}` cannot be read: there is no such folder here, and as a Hugging Face id it gave: "
            f"{first_line(error)} Check the spelling; offline, give the folder that `save_pretrained` wrote."
        ) from error


def check_architecture(role: str, config: Any, *, critic: bool) -> None:
    """Refuse an architecture that cannot have a role.

    Args:
        role: Its name, for the error.
        config: A transformers configuration; one that comes with code of its own is believed.
        critic: Whether a sequence classifier is needed, else a causal language model.

    Raises:
        ValueError: Transformers has no such class.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if critic else MODEL_FOR_CAUSAL_LM_MAPPING
    there = any(type(c) in known for c in (config, config.get_text_config()))
    if hasattr(config, "auto_map") or (there and not config.is_encoder_decoder):
        return
    name = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(
            f"`{role}` is an encoder-decoder model ({name}), whose prompts and responses are two texts. PPO here is "
            "for decoders, in which a response goes on with its prompt. Give a causal language model."
        )
    if critic:
        raise ValueError(
            f"`{role}` is a {name} model, of which transformers has no sequence classifier for the critic to be. Use "
            "`layout: shared` with `lora`, whose critic is a head on the actor's trunk, or an advantage without a "
            "critic (`ppo.advantage`: grpo, rloo, reinforce_pp)."
        )
    raise ValueError(f"`{role}` is a {name} model, which generates no text. Give a causal language model.")


def load_tokenizer(source: str, *, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """Load a tokenizer.

    Raises:
        ValueError: There is none at `source`.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, revision=revision)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(
            f"No tokenizer could be loaded from {source!r}: {first_line(error)} "
            "Save one beside the model (`tokenizer.save_pretrained`), or pass `tokenizer=`."
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, ended by a full stop."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
    return line if line.endswith((".", "!", "?")) else line + "."


def context_length(config: Any) -> int | None:
    """Return how many tokens a model can read, or None where its configuration does not say."""
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def token_ids(tokens: list[int | str] | None, tokenizer: Any, option: str, vocab_size: int) -> list[int]:
    """Turn ids and token texts into ids.

    Args:
        tokens: Ids, or tokens as the vocabulary spells them.
        tokenizer: Knows the vocabulary.
        option: The option's name, for the error.
        vocab_size: Of the model.

    Raises:
        ValueError: A token that is not in the vocabulary, or an id out of its range.
    """
    ids = []
    vocabulary = tokenizer.get_vocab() if any(isinstance(t, str) for t in tokens or []) else {}
    for token in tokens or []:
        found = vocabulary.get(token) if isinstance(token, str) else token
        if found is None or not 0 <= found < vocab_size:
            raise ValueError(
                f"`{option}` names {token!r}, which is not one of the model's {vocab_size} tokens. "
                "Write an id, or the token as the tokenizer's vocabulary spells it."
            )
        ids.append(int(found))
    return ids
