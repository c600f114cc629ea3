"""``/v1/chat/completions`` on a fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossdock.testing.fake_engine import echo_token
from crossdock.testing.text_model import write_text_model

RunServer = Callable[..., None]
PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "the quick brown fox"}]


def test_the_prompt_is_what_the_template_writes(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ]
        status, answer = await server.post(PATH, {"messages": messages, "max_tokens": 1})
        assert status == 200
        prompt = server.engine.replicas[0].seen[-1].prompt_ids
        text = server.frontend.tokenizer.decode(prompt, skip_special_tokens=False)
        assert text == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
        assert answer["usage"]["prompt_tokens"] == len(prompt)

    run_server(scenario)


def test_without_max_tokens_the_answer_fills_the_context(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        _, answer = await server.post(PATH, {"messages": HI})
        assert answer["usage"]["total_tokens"] == 64
        assert answer["choices"][0]["finish_reason"] == "length"

    run_server(scenario)


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        body = {"messages": HI, "max_completion_tokens": 9, "n": 2, "stream_options": {"include_usage": True}}
        _, whole = await server.post(PATH, {key: value for key, value in body.items() if key != "stream_options"})
        events = await server.events(PATH, body)
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        for index in (0, 1):
            own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1]["finish_reason"] == "length"
            assert (
                "".join(choice["delta"]["content"] or "" for choice in own)
                == whole["choices"][index]["message"]["content"]
            )
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]

    run_server(scenario)


def test_logprobs_name_bytes_and_alternatives(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        body = {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
        _, answer = await server.post(PATH, body)
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 3
        for entry in content:
            assert bytes(entry["bytes"]).decode() == entry["token"]
            assert len(entry["top_logprobs"]) == 2
        chunks = [json.loads(event) for event in (await server.events(PATH, body))[:-1]]
        streamed = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert streamed == content
        _, chosen_only = await server.post(PATH, {"messages": HI, "max_tokens": 1, "logprobs": True})
        assert chosen_only["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    run_server(scenario)


def test_tools_reach_a_template_that_writes_them(run_server: RunServer, tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    folder = write_text_model(tmp_path / "tools", chat_template=template)

    async def scenario(server: Any) -> None:
        async def prompt_tokens(**fields: Any) -> int:
            status, answer = await server.post(PATH, {"messages": HI, "max_tokens": 1, **fields})
            assert status == 200, answer
            return int(answer["usage"]["prompt_tokens"])

        tools = [{"type": "function"}]
        plain = await prompt_tokens()
        assert await prompt_tokens(tools=tools, tool_choice="auto") > plain
        assert await prompt_tokens(tools=tools, tool_choice="none") == plain

    run_server(scenario, rule=echo_token, folder=folder)


def test_tools_that_the_template_would_drop_are_refused(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        body = {"messages": HI, "max_tokens": 1, "tools": [{"type": "function"}]}
        status, answer = await server.post(PATH, body)
        assert (status, answer["error"]["param"]) == (400, "tools")
        status, _ = await server.post(PATH, {**body, "tool_choice": "none"})
        assert status == 200
        status, _ = await server.post(PATH, {**body, "tools": []})
        assert status == 200

    run_server(scenario)
