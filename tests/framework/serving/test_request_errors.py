"""Bad requests: 400 with the field and the rule, in one shape, and the server goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crossdock.serving.frontend import Phase
from crossdock.testing.text_model import write_text_model

RunServer = Callable[..., None]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [""]}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": ["a", 1]}, "prompt", "mixed"),
    ({"prompt": [[1], 2]}, "prompt", "mixed"),
    ({"prompt": 5}, "prompt", "`str | array"),
    ({"prompt": [512]}, "prompt", "0 to 511"),
    ({"prompt": [-1]}, "prompt", "0 to 511"),
    ({"prompt": [1], "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"prompt": [1], "max_tokens": -1}, "max_tokens", ">= 0"),
    ({"prompt": [1], "max_tokens": "5"}, "max_tokens", "`int"),
    ({"prompt": [1], "max_tokens": 2.5}, "max_tokens", "`int"),
    ({"prompt": [1], "max_tokens": True}, "max_tokens", "`int"),
    ({"prompt": [1], "temperature": -0.1}, "temperature", ">= 0"),
    ({"prompt": [1], "temperature": 2.1}, "temperature", "<= 2"),
    ({"prompt": [1], "temperature": "hot"}, "temperature", "`float"),
    ({"prompt": [1], "top_p": 0}, "top_p", "> 0"),
    ({"prompt": [1], "top_p": 1.5}, "top_p", "<= 1"),
    ({"prompt": [1], "top_k": -2}, "top_k", ">= -1"),
    ({"prompt": [1], "min_p": 2}, "min_p", "<= 1"),
    ({"prompt": [1], "n": 0}, "n", ">= 1"),
    ({"prompt": [1], "n": 129}, "n", "<= 128"),
    ({"prompt": [1], "presence_penalty": 3}, "presence_penalty", "<= 2"),
    ({"prompt": [1], "repetition_penalty": 0}, "repetition_penalty", "> 0"),
    ({"prompt": [1], "logprobs": -1}, "logprobs", ">= 0"),
    ({"prompt": [1], "logprobs": 21}, "logprobs", "<= 20"),
    ({"prompt": [1], "logprobs": 100_000}, "logprobs", "<= 20"),
    ({"prompt": [1], "stop": ""}, "stop", "length >= 1"),
    ({"prompt": [1], "stop": ["a", ""]}, "stop[1]", "length >= 1"),
    ({"prompt": [1], "stop": ["x"] * 17}, "stop", "length <= 16"),
    ({"prompt": [1], "stop_token_ids": [512]}, "stop_token_ids", "512"),
    ({"prompt": [1], "seed": 2**63}, "seed", "<="),
    ({"prompt": [1], "logit_bias": {"999": 1}}, "logit_bias", "999"),
    ({"prompt": [1], "logit_bias": {"a": 1}}, "logit_bias", "'a'"),
    ({"prompt": [1], "logit_bias": {"1": 101}}, "logit_bias[...]", "<= 100"),
    ({"prompt": [1], "min_tokens": 20}, "min_tokens", "16"),
    ({"prompt": [1], "best_of": 3}, "best_of", "equal n"),
    ({"prompt": [1], "suffix": "x"}, "suffix", "not supported"),
    ({"prompt": [1], "stream_options": {"include_usage": True}}, "stream_options", "stream true"),
    ({"prompt": [1], "routed_dp_rank": 7}, "routed_dp_rank", "no replica"),
    ({"prompt": [1], "model": 5}, "model", "`str"),
    ({"prompt": [1], "priority": 2**31}, "priority", "<="),
    ({"prompt": [1], "guided_choice": ["a"]}, "guided_choice", "not supported"),
    ({"prompt": [1], "response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"prompt": [1], "prompt_logprobs": 0}, "prompt_logprobs", "echo with logprobs"),
    ({"prompt": [1], "use_beam_search": True}, "use_beam_search", "not supported"),
    ({"prompt": [1], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
    ({"prompt": [1], "top_logprobs": 0}, "top_logprobs", "use logprobs"),
    ({"prompt": [1], "data_parallel_rank": 0}, "data_parallel_rank", "routed_dp_rank"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "required"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", "`array`"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": 3}]}, "messages[0].role", "`str`"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "unknown role robot"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens", ">= 1"),
    ({"messages": HI, "max_completion_tokens": -4}, "max_completion_tokens", ">= 1"),
    ({"messages": HI, "top_logprobs": 3}, "top_logprobs", "logprobs true"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice", "not supported"),
    ({"messages": HI, "tool_choice": {"type": "function"}}, "tool_choice", "not supported"),
    ({"messages": HI, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"messages": HI, "functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"messages": HI, "echo": True}, "echo", "/v1/completions"),
    ({"messages": HI, "modalities": ["text", "audio"]}, "modalities", "only text"),
    ({"messages": HI, "continue_final_message": True}, "continue_final_message", "not supported"),
    ({"messages": HI, "structured_outputs": {"json": {}}}, "structured_outputs", "not constrained"),
    ({"messages": HI, "chat_template": "{{ messages }}"}, "chat_template", "checkpoint's own"),
]
BAD_GENERATES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input_ids", "exactly one"),
    ({"input_ids": [1], "text": "a"}, "input_ids", "exactly one"),
    ({"input_ids": []}, "input_ids", "empty"),
    ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num", "return_logprob"),
    ({"input_ids": [1], "sampling_params": {"temperature": 5}}, "sampling_params.temperature", "<= 2"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens", "at least 1"),
    ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "sampling_params.regex", "not constrained"),
    ({"input_ids": [1], "lora_path": "x"}, "lora_path", "no adapters"),
    ({"input_ids": [1], "logprob_start_len": 0}, "logprob_start_len", "echo and logprobs"),
]


def check_error(status: int, body: Any, *, expected: int, param: str | None, rule: str) -> None:
    assert status == expected, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == expected
    assert error["param"] == param
    assert rule in error["message"], error["message"]


@pytest.mark.parametrize(
    ("path", "cases"), [(COMPLETIONS, BAD_COMPLETIONS), (CHAT, BAD_CHATS), ("/generate", BAD_GENERATES)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_value_is_400_with_field_and_rule_and_the_next_request_works(
    run_server: RunServer, path: str, cases: list[tuple[dict[str, Any], str, str]], stream: bool
) -> None:
    async def scenario(server: Any) -> None:
        for body, param, rule in cases:
            if stream and param == "stream_options":
                continue
            status, answer = await server.post(path, {**body, "stream": stream})
            check_error(status, answer, expected=400, param=param, rule=rule)
            assert answer["error"]["type"] == "BadRequestError"
        status, _ = await server.post(COMPLETIONS, {"prompt": [1], "max_tokens": 1})
        assert status == 200
        assert server.frontend.engine.num_in_flight == 0

    run_server(scenario)


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe", b"null", b'"x"', b"[" * 100_000, b'{"prompt": NaN}'])
def test_a_body_that_is_no_json_object_is_400(run_server: RunServer, raw: bytes) -> None:
    async def scenario(server: Any) -> None:
        for path in (COMPLETIONS, CHAT, "/generate", "/tokenize", "/detokenize", "/abort_request"):
            async with server.client.post(path, data=raw) as response:
                check_error(response.status, await response.json(), expected=400, param=None, rule="JSON")

    run_server(scenario)


@pytest.mark.parametrize("prompt", [62, 63, 64, 65])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 10_000_000_000])
def test_the_context_limit_is_exact_and_named(run_server: RunServer, prompt: int, max_tokens: int | None) -> None:
    """Context 64: what fits runs to the limit, what does not is refused with all three numbers."""

    async def scenario(server: Any) -> None:
        body: dict[str, Any] = {"prompt": [7] * prompt}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        status, answer = await server.post(COMPLETIONS, body)
        room = 64 - prompt
        if room >= (1 if max_tokens is None else max_tokens):
            assert status == 200
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == (room if max_tokens is None else max_tokens)
            return
        assert status == 400
        message = answer["error"]["message"]
        assert str(prompt) in message
        assert "64" in message
        assert max_tokens is None or str(max_tokens) in message
        assert "-" not in message.replace("max_tokens", "")

    run_server(scenario)


def test_another_models_name_is_a_wrong_field_and_an_unknown_path(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        for path, body in ((COMPLETIONS, {"prompt": [1]}), (CHAT, {"messages": HI})):
            status, answer = await server.post(path, {**body, "model": "other"})
            check_error(status, answer, expected=400, param="model", rule="'tiny'")
        status, answer = await server.get("/v1/models/other")
        check_error(status, answer, expected=404, param="model", rule="'tiny'")

    run_server(scenario)


def test_a_body_in_another_encoding_than_it_says_is_400(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        headers = {"Content-Encoding": "gzip"}
        async with server.client.post(COMPLETIONS, data=b'{"prompt": [1]}', headers=headers) as response:
            check_error(response.status, await response.json(), expected=400, param=None, rule="gzip")

    run_server(scenario)


def test_unknown_paths_methods_and_sizes_have_the_same_shape(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        status, answer = await server.get("/v2/nothing")
        check_error(status, answer, expected=404, param=None, rule="/v2/nothing")
        async with server.client.get(COMPLETIONS) as response:
            check_error(response.status, await response.json(), expected=405, param=None, rule="POST")
            assert response.headers["Allow"] == "POST"
        async with server.client.post(COMPLETIONS, data=b" " * 9 * 2**20) as response:
            check_error(response.status, await response.json(), expected=413, param=None, rule=str(8 * 2**20))

    run_server(scenario)


def test_a_body_of_more_than_a_mebibyte_is_read(run_server: RunServer) -> None:
    """aiohttp's own limit is 1 MiB; by count these ids are too long for the context, which is a 400 and no 413."""

    async def scenario(server: Any) -> None:
        status, answer = await server.post(COMPLETIONS, {"prompt": [7] * 600_000})
        check_error(status, answer, expected=400, param="prompt", rule="600000")

    run_server(scenario)


def test_unknown_keys_are_ignored(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        status, _ = await server.post(COMPLETIONS, {"prompt": [1], "max_tokens": 1, "later_key": {"a": 1}})
        assert status == 200
        status, _ = await server.post(CHAT, {"messages": HI, "max_tokens": 1, "parallel_tool_calls": True})
        assert status == 200

    run_server(scenario)


def test_fields_of_other_servers_that_ask_for_nothing_are_no_error(run_server: RunServer) -> None:
    """Some clients fill in every field they know."""
    nothing: dict[str, Any] = {"guided_json": None, "bad_words": [], "use_beam_search": False, "length_penalty": 1.0}

    async def scenario(server: Any) -> None:
        body = {"prompt": [1], "max_tokens": 1, "response_format": {"type": "text"}, "prompt_logprobs": None, **nothing}
        assert (await server.post(COMPLETIONS, body))[0] == 200
        chat = {"messages": HI, "max_tokens": 1, "echo": False, "best_of": 1, "documents": [], "functions": None}
        assert (await server.post(CHAT, {**chat, **nothing}))[0] == 200
        usage = {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": False}}
        assert "usage" not in (await server.events(CHAT, {**chat, **usage}))[-2].replace('"usage":null', "")

    run_server(scenario)


@pytest.mark.parametrize(
    ("template", "reason"),
    [(None, "no chat template"), ("{% if %}", "error in line"), ("{{ messages[9].role.x }}", "messages")],
)
def test_chat_without_a_usable_template_is_400_and_completions_work(
    run_server: RunServer, tmp_path: Path, template: str | None, reason: str
) -> None:
    folder = write_text_model(tmp_path / "plain", chat_template=template)

    async def scenario(server: Any) -> None:
        status, answer = await server.post(CHAT, {"messages": HI})
        check_error(status, answer, expected=400, param="messages", rule=reason)
        status, _ = await server.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1})
        assert status == 200

    run_server(scenario, folder=folder)


def test_a_folder_without_a_tokenizer_serves_token_ids_only(run_server: RunServer, tmp_path: Path) -> None:
    folder = write_text_model(tmp_path / "bare")
    (folder / "tokenizer.json").unlink()

    async def scenario(server: Any) -> None:
        status, answer = await server.post(COMPLETIONS, {"prompt": "hi"})
        check_error(status, answer, expected=400, param="prompt", rule="tokenizer.json")
        status, answer = await server.post("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}})
        assert (status, answer["output_ids"]) == (200, [5, 6, 5, 6])

    run_server(scenario, folder=folder)


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.DRAINING, Phase.FAILED])
def test_requests_outside_of_service_are_503_with_retry_after(run_server: RunServer, phase: Phase) -> None:
    async def scenario(server: Any) -> None:
        for path in (COMPLETIONS, CHAT, "/generate"):
            async with server.client.post(path, json={}) as response:
                assert response.headers["Retry-After"]
                check_error(response.status, await response.json(), expected=503, param=None, rule="try again")

    run_server(scenario, phase=phase)


def test_a_full_queue_is_429_with_retry_after_and_nothing_is_half_sent(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        server.engine.running.clear()
        async with server.client.post(COMPLETIONS, json={"prompt": [1], "n": 5}) as response:
            assert response.headers["Retry-After"]
            check_error(response.status, await response.json(), expected=429, param=None, rule="limit is 4")
        assert server.frontend.engine.num_in_flight == 0
        assert not server.frontend.engine.replicas[0].in_flight
        server.engine.running.set()
        status, _ = await server.post(COMPLETIONS, {"prompt": [1], "n": 4, "max_tokens": 1})
        assert status == 200

    run_server(scenario, max_in_flight=4)


def test_an_engine_failure_ends_open_requests_at_once_and_mid_stream(run_server: RunServer, long_model: Path) -> None:
    async def scenario(server: Any) -> None:
        server.freeze_at(10)
        response = await server.client.post(COMPLETIONS, json={"prompt": [70], "max_tokens": 5000, "stream": True})
        await response.content.readany()
        server.frontend.engine.fail("rank 1 (pid 5) was killed by SIGKILL")
        text = await response.text()
        events = [line for line in text.split("\n\n") if line]
        assert events[-1] == "data: [DONE]"
        assert '"code":503' in events[-2]
        assert "SIGKILL" in events[-2]
        async with server.client.post(COMPLETIONS, json={"prompt": [1]}) as after:
            check_error(after.status, await after.json(), expected=503, param=None, rule="SIGKILL")
        status, health = await server.get("/health")
        assert (status, health["status"]) == (503, "failed")

    run_server(scenario, folder=long_model)


def test_api_keys_guard_everything_but_probes(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        body = {"prompt": [1], "max_tokens": 1}
        status, answer = await server.post(COMPLETIONS, body)
        check_error(status, answer, expected=401, param=None, rule="Bearer")
        status, _ = await server.post(COMPLETIONS, body, headers={"Authorization": "Bearer wrong"})
        assert status == 401
        status, _ = await server.post(COMPLETIONS, body, headers={"Authorization": "Bearer k2"})
        assert status == 200
        for path in ("/health", "/ready", "/version", "/ping"):
            assert (await server.get(path))[0] == 200

    run_server(scenario, api_keys=frozenset({"k1", "k2"}))


def test_the_clients_request_id_comes_back_with_every_answer(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        for path, body in ((COMPLETIONS, {"prompt": [1]}), (COMPLETIONS, {"prompt": []}), ("/nothing", {})):
            async with server.client.post(path, json=body, headers={"X-Request-Id": "abc-1"}) as response:
                assert response.headers["X-Request-Id"] == "abc-1"
        async with server.client.post(
            COMPLETIONS, json={"prompt": [1], "stream": True}, headers={"X-Request-Id": "s"}
        ) as response:
            assert response.headers["X-Request-Id"] == "s"
        async with server.client.get("/health", headers={"X-Request-Id": "x" * 500}) as response:
            assert len(response.headers["X-Request-Id"]) == 32

    run_server(scenario)
