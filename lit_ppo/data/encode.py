"""From rows to a batch: chat templates, special tokens, length limits, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_ppo.data.rows import Prompt, parse_rows, read_rows
from lit_ppo.experience import Prompts


def encode(
    rows: Sequence[str | dict[str, Any]],
    tokenizer: Any,
    *,
    index: Tensor | None = None,
    prompt_column: str = "prompt",
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
) -> Prompts:
    """Turn rows into one batch of prompts, a prompt a row, in their order.

    Args:
        rows: Strings, or dicts with the prompt (a string or a list of chat messages) under `prompt_column`.
        tokenizer: A transformers tokenizer; it is not changed.
        index: (B,) int64, number of each row in its iteration; None: 0, 1, 2, ...
        prompt_column: Where a dict keeps its prompt.
        chat_template: Jinja text used in place of the tokenizer's own chat template.
        add_generation_prompt: End a chat with the opening of the assistant's turn.

    Returns:
        Prompts on the CPU, left-padded to the longest.

    Raises:
        ValueError: No rows, a row without a usable prompt, a chat without a template, or an `index` of another length.
    """
    prompts = tokenize(
        parse_rows(read_rows(rows, "rows"), "rows", prompt_column), tokenizer, chat_template, add_generation_prompt
    )
    if index is not None and len(index) != len(prompts):
        raise ValueError(f"`index` has {len(index)} numbers for {len(prompts)} rows. Give one for each row.")
    return collate(prompts, torch.arange(len(prompts)) if index is None else index, pad_id(tokenizer))


def tokenize(
    prompts: Sequence[Prompt], tokenizer: Any, chat_template: str | None = None, add_generation_prompt: bool = True
) -> list[Prompt]:
    """Return the prompts with `text` and `ids` filled in.

    A string gets the special tokens that the tokenizer puts in front (a BOS), once, and none of those it puts behind
    (an EOS or [SEP] would end the text that the policy is to continue). A chat is rendered by its template, which
    writes all special tokens itself.

    Raises:
        ValueError: A chat without a template, a template that fails, a prompt without a single token, or a tokenizer
            that reads the text itself otherwise when it adds special tokens.
    """
    texts = [
        p.text
        if p.messages is None
        else render(p.messages, tokenizer, chat_template, p.where, add_generation_prompt=add_generation_prompt)
        for p in prompts
    ]
    bare: list[list[int]] = token_ids(tokenizer, texts, add_special_tokens=False)
    for prompt, ids in zip(prompts, bare, strict=True):
        if not ids:
            raise ValueError(
                f"{prompt.where}: the prompt {prompt.text!r} has no tokens. Remove the row or give it text."
            )
    plain = next((i for i, prompt in enumerate(prompts) if prompt.messages is None), None)
    prefix = [] if plain is None else front(tokenizer, texts[plain])
    done = []
    for prompt, text, ids in zip(prompts, texts, bare, strict=True):
        if prompt.messages is None and ids[: len(prefix)] != prefix:
            ids = prefix + ids
        done.append(replace(prompt, text=text, ids=ids))
    return done


def token_ids(tokenizer: Any, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
    """Return the tokens of texts."""
    # verbose=False: no warning about the model's context, which is checked where the model is known
    encoded = tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def front(tokenizer: Any, text: str) -> list[int]:
    """Return the special tokens that a tokenizer puts in front of a text."""
    return _prefix(*(token_ids(tokenizer, [text], add_special_tokens=special)[0] for special in (False, True)))


def _prefix(bare: list[int], whole: list[int]) -> list[int]:
    """Return what stands before `bare` in `whole`."""
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    raise ValueError(
        f"The tokenizer turns a text into {bare[:9]} without special tokens and into {whole[:9]} with them, so it "
        "cannot be told where they stand. Give the prompts as chats, whose template writes all special tokens."
    )


def render(
    messages: list[dict[str, Any]],
    tokenizer: Any,
    template: str | None,
    where: str,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Return the text that a chat template makes of messages.

    Raises:
        ValueError: There is no template, or it refuses them.
    """
    if template is None and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"{where} is a chat, and the tokenizer has no chat template. Set `chat_template` to Jinja text, take the "
            "tokenizer of an instruction-tuned model, or give plain strings."
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        )
    except Exception as error:
        raise ValueError(f"{where}: the chat template refused the messages: {error}") from error


def limit(prompts: Sequence[Prompt], tokenizer: Any, longest: int | None, overlong: str, name: str) -> list[Prompt]:
    """Drop or cut the prompts that have more than `longest` tokens, and say once how many there were.

    A cut, of strings and of rendered chats alike, keeps the last tokens and a BOS at the start.

    Raises:
        ValueError: No prompt is left.
    """
    if longest is None:
        return list(prompts)
    kept = []
    for prompt in prompts:
        if len(prompt.ids) <= longest:
            kept.append(prompt)
        elif overlong == "cut":
            head = prompt.ids[:1] if longest > 1 and prompt.ids[0] == getattr(tokenizer, "bos_token_id", None) else []
            tail = prompt.ids[len(head) - longest :]
            kept.append(replace(prompt, text=tokenizer.decode(tail), ids=head + tail))
    over = sum(len(prompt.ids) > longest for prompt in prompts)
    if not kept:
        raise ValueError(
            f"All {over:,} prompts of `{name}` are longer than `max_prompt_length={longest}` tokens. Raise it, or set "
            "`overlong='cut'` to keep their ends."
        )
    if over:
        done = "cut at the start" if overlong == "cut" else "dropped"
        rank_zero_warn(
            f"{over:,} of {len(prompts):,} prompts of `{name}` are longer than `max_prompt_length={longest}` tokens: "
            f"{done}."
        )
    return kept


def pad_id(tokenizer: Any) -> int:
    """Return the id to pad with: the pad token, else the EOS, else 0 (masks come from lengths, so any will do)."""
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((i for i in ids if isinstance(i, int)), 0)


def collate(prompts: Sequence[Prompt], index: Tensor, pad: int) -> Prompts:
    """Left-pad tokenized prompts into one batch.

    Args:
        prompts: B prompts; none at all gives a batch of shape (0, 0).
        index: (B,) int64, number of each in its iteration.
        pad: Id under the padding.
    """
    width = max((len(p.ids) for p in prompts), default=0)
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[width - len(prompt.ids) :] = torch.tensor(prompt.ids)
    return Prompts(
        ids=ids,
        lengths=torch.tensor([len(p.ids) for p in prompts], dtype=torch.long),
        index=index,
        text=[p.text for p in prompts],
        messages=[p.messages for p in prompts],
        columns=[dict(p.columns) for p in prompts],
    )
