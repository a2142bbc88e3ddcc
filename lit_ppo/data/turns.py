"""Prompts with answers: finding them in a row, rendering them as chats, and turning both into tokens."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from lit_ppo.data.encode import render, token_ids
from lit_ppo.data.formats import short
from lit_ppo.data.rows import check_message

Messages = list[dict[str, Any]]


@dataclass
class Turns:
    """A text of which parts are answers: a prompt and its answer, or a chat."""

    where: str
    """Its place in the source, for messages."""
    prompt: str
    """What stands before the answer of a plain text; may be empty."""
    answer: str
    """The answer of a plain text."""
    messages: Messages | None
    """The chat, if it is one: its turns of the assistant are the answers."""
    ids: list[int] = field(default_factory=list)
    """Its tokens, once it is tokenized."""
    trained: list[bool] = field(default_factory=list)
    """Which of the tokens are of an answer."""

    @property
    def start(self) -> int:
        """Tokens before the first answer: at least one, as a token is predicted from what stands before it."""
        return self.trained.index(True)


def column(row: Any, name: str, option: str, where: str) -> Any:
    """Return a column of a row.

    Args:
        row: The row.
        name: The column.
        option: Which option names it.
        where: The row's place.

    Raises:
        TypeError: The row is no object.
        ValueError: It has no such column; the nearest is named.
    """
    if not isinstance(row, dict):
        raise TypeError(f"{where} is not an object with columns: {short(row)}.")
    if name not in row:
        near = difflib.get_close_matches(name, [str(key) for key in row], n=1)
        hint = f"Did you mean `{near[0]}`? " if near else ""
        raise ValueError(
            f"{where} has no column `{name}`; it has {', '.join(map(repr, row)) or 'none'}. {hint}Set `{option}` to "
            "the one that is meant."
        )
    return row[name]


def text_or_chat(value: Any, name: str, where: str, *, empty: bool = False) -> str | Messages:
    """Return a column's value if it is a text or a chat.

    Args:
        value: The value.
        name: Of its column.
        where: The row's place.
        empty: Whether an empty text will do.

    Raises:
        ValueError: It is neither, or empty.
    """
    if isinstance(value, str) and (value.strip() or empty):
        return value
    if isinstance(value, list) and value:
        for number, message in enumerate(value):
            check_message(message, f"{where}: message {number} of `{name}`")
        return value
    if not isinstance(value, str | list):
        raise ValueError(f"{where}: `{name}` is neither a string nor a list of chat messages: {short(value)}.")
    raise ValueError(f"{where}: `{name}` is empty. Remove the row or give it a text.")


def join(prompt: str | Messages, answer: str | Messages, where: str, name: str) -> Turns:
    """Put a prompt and its answer together.

    Args:
        prompt: A text, or the chat so far.
        answer: A text, or messages: those that follow the prompt, or the whole chat.
        where: The row's place.
        name: The answer's column.

    Raises:
        ValueError: They do not belong together, or the last turn is not the assistant's.
    """
    if isinstance(prompt, str) and isinstance(answer, str):
        return Turns(where, prompt, answer, None)
    before: Messages = [] if isinstance(prompt, str) else prompt
    if isinstance(answer, str):
        chat = [*before, {"role": "assistant", "content": answer}]
    elif answer[: len(before)] == before:  # the whole chat, as many data sets have it
        chat = answer
    elif answer[0]["role"] == "assistant":
        chat = [*before, *answer]
    else:
        raise ValueError(
            f"{where}: `{name}` is a chat of its own, which does not begin with the messages of the prompt. Give the "
            "assistant's message alone, or the whole chat."
        )
    if isinstance(prompt, str) and prompt:
        asked = [m["content"] for m in chat if m["role"] == "user"]
        if prompt not in asked:
            raise ValueError(
                f"{where}: the prompt is a text, and `{name}` a chat in which no user says it. Give both as texts, or "
                "both as chats."
            )
    if chat[-1]["role"] != "assistant":
        raise ValueError(f"{where}: the last message of `{name}` is of {chat[-1]['role']!r}, not of 'assistant'.")
    if not chat[-1]["content"].strip():
        raise ValueError(f"{where}: the answer in `{name}` is empty. Remove the row or give it a text.")
    return Turns(where, "", "", chat)


def answer_tokens(turns: Turns, tokenizer: Any, template: str | None, prefix: list[int], *, last_only: bool) -> None:
    """Fill in `ids` and `trained`.

    A prompt has the tokens that it has where the policy is asked to go on with it, so that an answer is learned from
    where it will be sampled. An answer ends with the template's own end of a turn, or else with the tokenizer's EOS.

    Args:
        turns: Changed in place.
        tokenizer: A transformers tokenizer.
        template: Jinja text in place of the tokenizer's own chat template.
        prefix: What the tokenizer puts in front of a plain text.
        last_only: Train on the last answer of a chat alone.

    Raises:
        ValueError: The chat template writes an answer elsewhere than behind its own opening of the assistant's turn.
    """
    eos = getattr(tokenizer, "eos_token_id", None)
    if turns.messages is None:
        ids = token_ids(tokenizer, [turns.prompt])[0] if turns.prompt else []
        if ids[: len(prefix)] != prefix:
            ids = prefix + ids
        whole = token_ids(tokenizer, [turns.prompt + turns.answer])[0]
        if whole[: len(prefix)] != prefix:
            whole = prefix + whole
        # Where the answer would change the prompt's last token, its own tokens follow the prompt's.
        rest = whole[len(ids) :] if whole[: len(ids)] == ids else token_ids(tokenizer, [turns.answer])[0]
        rest = rest + ([] if eos is None or rest[-1:] == [eos] else [eos])
        turns.ids, turns.trained = ids + rest, [False] * len(ids) + [True] * len(rest)
    else:
        _chat_tokens(turns, tokenizer, template, eos, last_only=last_only)
    turns.trained[0] = False  # nothing stands before it


def _chat_tokens(turns: Turns, tokenizer: Any, template: str | None, eos: int | None, *, last_only: bool) -> None:
    chat: Messages = turns.messages or []
    answers = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    done, ids, trained = "", list[int](), list[bool]()
    for i in answers[-1:] if last_only else answers:
        before = render(chat[:i], tokenizer, template, turns.where, add_generation_prompt=True) if i else ""
        whole = render(chat[: i + 1], tokenizer, template, turns.where)
        if not whole.startswith(before):
            raise ValueError(
                f"{turns.where}: the chat template does not write the assistant's answer behind the opening that it "
                f"gives a policy (`add_generation_prompt`): {before[-40:]!r} is not in {whole[-80:]!r}. Use another "
                "`chat_template`."
            )
        if not before.startswith(done):
            raise ValueError(
                f"{turns.where}: the chat template writes earlier turns otherwise once later ones follow, so they "
                "cannot be trained on together. Set `answers='last'`."
            )
        answer = whole[len(before) :]
        at = answer.rfind(chat[i]["content"].strip())
        ended = at >= 0 and bool(answer[at + len(chat[i]["content"].strip()) :].strip())
        shown = answer.rstrip() if ended else answer
        context, own = (token_ids(tokenizer, [text])[0] if text else [] for text in (before[len(done) :], shown))
        if not ended and eos is not None:
            own = [*own, eos]
        ids += context + own
        trained += [False] * len(context) + [True] * len(own)
        done = before + shown
    turns.ids, turns.trained = ids, trained


def judged_tokens(turns: Turns, tokenizer: Any, template: str | None) -> list[int]:
    """Return the tokens that a reward model reads: no end is added, and templates write all special tokens.

    The same as `lit_ppo.rewards.model.ModelReward` makes of a prompt and a response.
    """
    if turns.messages is None:
        return token_ids(tokenizer, [turns.prompt + turns.answer], add_special_tokens=True)[0]
    chat = [*turns.messages[:-1], {**turns.messages[-1], "content": turns.messages[-1]["content"].strip()}]
    return token_ids(tokenizer, [render(chat, tokenizer, template, turns.where)])[0]
