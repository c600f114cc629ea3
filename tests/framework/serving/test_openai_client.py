"""The official client, unmodified, against the server; answers fit its own types strictly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

RunServer = Callable[..., None]
HI: Any = [{"role": "user", "content": "the quick brown fox"}]


def _client(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0)


def test_models_completions_and_chat_work(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        async with _client(server) as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            assert (await client.models.retrieve("tiny")).id == "tiny"
            text = "stop strings may begin"
            completion = await client.completions.create(model="tiny", prompt=text, max_tokens=40, logprobs=2)
            Completion.model_validate(completion.model_dump(), strict=True)
            assert completion.choices[0].text.startswith(text)
            assert completion.usage is not None
            chat = await client.chat.completions.create(
                model="tiny", messages=HI, max_completion_tokens=5, logprobs=True, top_logprobs=1, seed=3
            )
            ChatCompletion.model_validate(chat.model_dump(), strict=True)
            assert chat.choices[0].finish_reason == "length"

    run_server(scenario)


def test_streams_work(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        async with _client(server) as client:
            texts = {0: "", 1: ""}
            stream = await client.completions.create(
                model="tiny",
                prompt=["the quick", "brown fox"],
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
            )
            last = None
            async for chunk in stream:
                # The client's type has no null reason for completions; the interface itself streams null until the end.
                assert {choice.finish_reason for choice in chunk.choices} <= {None, "length"}
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                last = chunk
            assert last is not None
            assert last.usage is not None
            assert last.choices == []
            assert texts[0].startswith("the quick")
            assert texts[1].startswith("brown fox")
            chat = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=8, stream=True)
            roles = []
            async for part in chat:
                ChatCompletionChunk.model_validate(part.model_dump(), strict=True)
                roles.append(part.choices[0].delta.role)
                assert part.usage is None
            assert roles[0] == "assistant"
            assert set(roles[1:]) == {None}

    run_server(scenario)


def test_errors_become_the_clients_exceptions(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        async with _client(server) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(model="tiny", prompt="", max_tokens=1)
            assert refused.value.param == "prompt"
            with pytest.raises(openai.BadRequestError) as unknown:
                await client.completions.create(model="other", prompt="x")
            assert unknown.value.param == "model"

    run_server(scenario)
