"""Prompts of a request as token ids: texts, ids and chat messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import attrs

from crossdock.errors import RequestError
from crossdock.serving.generation import PromptTokens
from crossdock.serving.model_facts import ModelFacts
from crossdock.serving.protocol.requests import ChatMessage
from crossdock.serving.tokenizer import TextTokenizer

LONG_TEXT_CHARACTERS = 20_000
"""Longer texts are tokenised in a thread: the library releases the lock, the event loop stays free."""


async def prompt_tokens(
    prompt: object, field: str, tokenizer: TextTokenizer | None, *, add_special_tokens: bool = True
) -> tuple[PromptTokens, ...]:
    """Prompts of any of the four forms as ids.

    Raises:
        RequestError: absent, empty, mixed, or text without a tokenizer.
    """
    if prompt is None:
        raise RequestError(f"{field}: this field is required", field=field)
    if isinstance(prompt, str):
        return await text_prompts([prompt], field, tokenizer, add_special_tokens=add_special_tokens)
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"{field}: must not be empty", field=field)
    if all(isinstance(item, str) for item in prompt):
        return await text_prompts(prompt, field, tokenizer, add_special_tokens=add_special_tokens)
    if all(isinstance(item, int) for item in prompt):
        prompt = [prompt]
    if not all(isinstance(item, list) for item in prompt):
        raise RequestError(f"{field}: texts, token ids and lists of token ids cannot be mixed", field=field)
    if not all(prompt):
        raise RequestError(f"{field}: a list of token ids must not be empty", field=field)
    return tuple(PromptTokens(ids=tuple(ids)) for ids in prompt)


async def text_prompts(
    texts: Sequence[str], field: str, tokenizer: TextTokenizer | None, *, add_special_tokens: bool = True
) -> tuple[PromptTokens, ...]:
    """Texts as ids. Raises ``RequestError`` for an empty text, or when the model has no tokenizer."""
    if tokenizer is None:
        message = f"{field}: this model folder has no tokenizer.json, so text cannot be used; send token ids"
        raise RequestError(message, field=field)
    if not all(texts):
        raise RequestError(f"{field}: a text must not be empty", field=field)
    if sum(map(len, texts)) > LONG_TEXT_CHARACTERS:
        ids = await asyncio.to_thread(tokenizer.encode_batch, texts, add_special_tokens=add_special_tokens)
    else:
        ids = [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    if not all(ids):
        raise RequestError(f"{field}: a text gives no tokens", field=field)
    return tuple(PromptTokens(ids=tuple(one), text=text) for one, text in zip(ids, texts, strict=True))


def check_prompts(prompts: Sequence[PromptTokens], field: str, model: ModelFacts) -> None:
    """Raises ``RequestError`` for an id outside the vocabulary."""
    for prompt in prompts:
        if max(prompt.ids) >= model.vocab_size or min(prompt.ids) < 0:
            wrong = next(token for token in prompt.ids if not 0 <= token < model.vocab_size)
            message = f"{field}: token id {wrong} is outside the vocabulary (0 to {model.vocab_size - 1})"
            raise RequestError(message, field=field)


def message_values(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates want them: contents given in text parts are joined.

    Raises:
        RequestError: a part that is not text.
    """
    values: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        value = {name: found for name, found in attrs.asdict(message, recurse=False).items() if found is not None}
        if isinstance(message.content, list):
            value["content"] = "".join(_part_text(part, place) for part in message.content)
        values.append({"content": "", **value})
    return values


def _part_text(part: dict[str, Any], place: int) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        field = f"messages[{place}].content"
        raise RequestError(f"{field}: only parts of type 'text' are supported, found {part.get('type')!r}", field=field)
    return text
