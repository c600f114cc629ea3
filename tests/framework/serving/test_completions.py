"""``/v1/completions`` on a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crossdock.serving.prompts import text_prompts
from crossdock.serving.tokenizer import load_tokenizer
from crossdock.testing.fake_engine import echo_token, fixed_tokens, seeded_token
from crossdock.testing.text_model import byte_level_tokenizer, write_text_model
from crossdock.types.request import EngineRequest
from tokenizers import processors

RunServer = Callable[..., None]
PATH = "/v1/completions"


def test_a_prompt_of_token_ids_is_completed(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        status, body = await server.post(PATH, {"model": "tiny", "prompt": [70, 71, 72], "max_tokens": 3})
        assert status == 200
        assert body["object"] == "text_completion"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["text"] == server.frontend.tokenizer.decode([70, 71, 72])
        assert body["usage"]["prompt_tokens"] == 3
        assert body["usage"]["completion_tokens"] == 3
        assert body["usage"]["total_tokens"] == 6

    run_server(scenario)


def test_priority_reaches_the_scheduler_and_special_tokens_can_be_left_out(
    run_server: RunServer, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer()
    begin = tokenizer.token_to_id("<|system|>")
    tokenizer.post_processor = processors.TemplateProcessing("<|system|> $A", special_tokens=[("<|system|>", begin)])
    folder = write_text_model(tmp_path / "begins", tokenizer=tokenizer)
    seen: list[EngineRequest] = []

    def rule(request: EngineRequest, place: int) -> int:
        seen.append(request)
        return echo_token(request, place)

    async def scenario(server: Any) -> None:
        for fields in ({"priority": -3}, {"add_special_tokens": False}):
            status, _ = await server.post(PATH, {"prompt": "hi", "max_tokens": 1, **fields})
            assert status == 200
        first, second = seen
        assert (first.priority, second.priority) == (-3, 0)
        assert first.prompt_ids == (begin, *second.prompt_ids)

    run_server(scenario, rule=rule, folder=folder)


def test_a_text_prompt_is_tokenised_and_echoed_by_the_fake(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        text = "the quick brown fox"
        count = len((await text_prompts([text], "prompt", server.frontend.tokenizer))[0].ids)
        _, body = await server.post(PATH, {"prompt": text, "max_tokens": count})
        assert body["choices"][0]["text"] == text

    run_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_a_list_of_prompts_are_in_index_order(run_server: RunServer, stream: bool) -> None:
    """The last prompt finishes first; index = prompt number x n + sample."""

    async def scenario(server: Any) -> None:
        # A stop token ends the outputs of the prompts that hold it, so lengths differ and the last one ends first.
        prompts = [[65] * 1, [66] * 20, [67, 300]]
        body = {"prompt": prompts, "max_tokens": 9, "n": 2, "stop_token_ids": [300]}
        if stream:
            chunks = [json.loads(event) for event in (await server.events(PATH, body))[:-1]]
            texts = ["", "", "", "", "", ""]
            for chunk in chunks:
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
            first_finished = next(
                choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
            )
            assert first_finished in (4, 5)
        else:
            _, answer = await server.post(PATH, body)
            assert [choice["index"] for choice in answer["choices"]] == list(range(6))
            texts = [choice["text"] for choice in answer["choices"]]
        decode = server.frontend.tokenizer.decode
        expected = [decode([65] * 9), decode([66] * 9), decode([67])]
        assert texts == [expected[0], expected[0], expected[1], expected[1], expected[2], expected[2]]

    run_server(scenario, num_replicas=2)


def test_stream_pieces_joined_are_the_whole_text(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        body = {"prompt": "a rank sends tokens", "max_tokens": 30, "seed": 5}
        _, whole = await server.post(PATH, body)
        events = await server.events(PATH, body)
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) <= {None}

    run_server(scenario, rule=seeded_token)


def test_a_stream_never_splits_a_character(run_server: RunServer, text_model: Any) -> None:
    """A four-byte emoji, a combined emoji and a CJK sign, one byte a token; the output ends inside a character."""
    text = "\U0001f600 \U0001f469\u200d\U0001f680 \u6f22"
    symbols = _byte_ids(text.encode() + "\u6f22".encode()[:2], text_model)

    async def scenario(server: Any) -> None:
        body = {"prompt": [70], "max_tokens": len(symbols)}
        _, whole = await server.post(PATH, body)
        pieces = [json.loads(event)["choices"][0]["text"] for event in (await server.events(PATH, body))[:-1]]
        assert "".join(pieces) == whole["choices"][0]["text"] == text + "\ufffd"
        assert all("\ufffd" not in piece for piece in pieces[:-1])

    run_server(scenario, rule=fixed_tokens(symbols))


def _byte_ids(data: bytes, folder: Any) -> list[int]:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    by_byte = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    return [by_byte[bytes([value])] for value in data]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"), [("lo w", "hel"), (["xyz", "wor"], "hello "), ("hello", ""), ("zzz", "hello world")]
)
def test_a_stop_string_over_token_borders_ends_the_text_before_it(
    run_server: RunServer, text_model: Any, stream: bool, stop: Any, expected: str
) -> None:
    ids = _byte_ids(b"hello world", text_model)

    async def scenario(server: Any) -> None:
        body = {"prompt": [70], "max_tokens": len(ids), "stop": stop}
        if stream:
            chunks = [json.loads(event) for event in (await server.events(PATH, body))[:-1]]
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            last = chunks[-1]["choices"][0]
        else:
            _, answer = await server.post(PATH, body)
            last = answer["choices"][0]
            text = last["text"]
        assert text == expected
        assert last["finish_reason"] == ("length" if stop == "zzz" else "stop")
        if stop != "zzz":
            assert last["stop_reason"] == ("wor" if isinstance(stop, list) else stop)
            await server.until(lambda: not server.engine.replicas[0].requests)

    run_server(scenario, rule=fixed_tokens(ids))


def test_the_stop_text_can_be_included(run_server: RunServer, text_model: Any) -> None:
    ids = _byte_ids(b"hello world", text_model)

    async def scenario(server: Any) -> None:
        body = {"prompt": [70], "max_tokens": 11, "stop": "lo", "include_stop_str_in_output": True}
        _, answer = await server.post(PATH, body)
        assert answer["choices"][0]["text"] == "hello"

    run_server(scenario, rule=fixed_tokens(ids))


def test_a_stop_string_does_not_end_the_text_before_min_tokens(run_server: RunServer, text_model: Any) -> None:
    ids = _byte_ids(b"ab ab ab", text_model)

    async def scenario(server: Any) -> None:
        _, answer = await server.post(PATH, {"prompt": [70], "max_tokens": 8, "stop": "b", "min_tokens": 4})
        assert answer["choices"][0]["text"] == "ab a"

    run_server(scenario, rule=fixed_tokens(ids))


def test_the_token_that_ends_the_text_is_not_in_it(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        _, answer = await server.post(PATH, {"prompt": [70, 71, 72], "max_tokens": 9, "stop_token_ids": [72]})
        choice = answer["choices"][0]
        assert choice["text"] == server.frontend.tokenizer.decode([70, 71])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 72)
        assert answer["usage"]["completion_tokens"] == 3

    run_server(scenario)


def test_logprobs_have_one_entry_a_token(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        _, answer = await server.post(PATH, {"prompt": [70, 71], "max_tokens": 4, "logprobs": 3})
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 4
        assert all(len(top) == 3 for top in logprobs["top_logprobs"])
        assert logprobs["text_offset"] == [0, 1, 2, 3]
        _, chosen_only = await server.post(PATH, {"prompt": [70], "max_tokens": 1, "logprobs": 0})
        assert chosen_only["choices"][0]["logprobs"]["top_logprobs"] == [None]

    run_server(scenario)


def test_echo_scores_the_prompt_with_max_tokens_0(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        body = {"prompt": [70, 71, 72], "max_tokens": 0, "echo": True, "logprobs": 1}
        _, answer = await server.post(PATH, body)
        choice = answer["choices"][0]
        assert choice["text"] == server.frontend.tokenizer.decode([70, 71, 72])
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        events = await server.events(PATH, body)
        assert json.loads(events[0])["choices"][0]["text"] == choice["text"]

    run_server(scenario)


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True, "later": 1}, True)],
)
def test_usage_comes_once_at_the_end_of_a_stream_where_it_was_asked_for(
    run_server: RunServer, options: Any, has_usage: bool
) -> None:
    async def scenario(server: Any) -> None:
        body = {"prompt": [70, 71], "max_tokens": 3, "n": 2}
        if options is not None:
            body["stream_options"] = options
        chunks = [json.loads(event) for event in (await server.events(PATH, body))[:-1]]
        with_usage = [chunk for chunk in chunks if chunk["usage"] is not None]
        assert len(with_usage) == (1 if has_usage else 0)
        if has_usage:
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"]["completion_tokens"] == 6
            assert chunks[-1]["usage"]["prompt_tokens"] == 2

    run_server(scenario)


def test_continuous_usage_is_in_each_chunk(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        body = {"prompt": [70], "max_tokens": 3, "stream_options": {"continuous_usage_stats": True}}
        chunks = [json.loads(event) for event in (await server.events(PATH, body))[:-1]]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]

    run_server(scenario)


def test_continuous_usage_counts_tokens_that_complete_no_character(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        # The four bytes of one character, a token each.
        body = {"prompt": "\U0001f600", "max_tokens": 4, "stream_options": {"continuous_usage_stats": True}}
        chunks = [json.loads(event) for event in (await server.events(PATH, body))[:-1]]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4]
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["", "", "", "\U0001f600"]

    run_server(scenario)


def test_seeds_decide_and_their_absence_varies(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        async def text(path: str, **fields: Any) -> str:
            _, answer = await server.post(path, {"max_tokens": 8, **fields})
            choice = answer["choices"][0]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])

        for path, prompt in (
            (PATH, {"prompt": [70]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            first, again, other = [await text(path, seed=seed, **prompt) for seed in (1, 1, 2)]
            assert first == again != other
            assert await text(path, seed=0, **prompt) == await text(path, seed=0, **prompt)
            assert await text(path, seed=-5, **prompt) == await text(path, seed=-5, **prompt)
            assert len({await text(path, **prompt) for _ in range(4)}) == 4
        _, samples = await server.post(PATH, {"prompt": [70], "max_tokens": 8, "n": 3, "seed": 1})
        assert len({choice["text"] for choice in samples["choices"]}) == 3

    run_server(scenario, rule=seeded_token)


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_aborts_every_sample(run_server: RunServer, stream: bool) -> None:
    async def scenario(server: Any) -> None:
        replica = server.engine.replicas[0]
        server.engine.running.clear()
        body = {"prompt": [70], "max_tokens": 60, "n": 3, "stream": stream}
        call = asyncio.create_task(server.post(PATH, body))
        await server.until(lambda: len(server.frontend.engine.replicas[0].in_flight) == 3)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await server.until(lambda: server.frontend.engine.num_in_flight == 0)
        server.engine.running.set()
        await server.until(lambda: len(replica.aborted) == 3 or not replica.seen)
        assert not replica.requests
        assert not server.frontend.active
        assert not server.frontend.engine.replicas[0].in_flight
        metrics = server.frontend.metrics.text().decode()
        assert 'request_success_total{finished_reason="abort",model_name="tiny"} 3.0' in metrics

    run_server(scenario)


def test_hanging_up_in_the_middle_of_a_stream_aborts(run_server: RunServer, long_model: Path) -> None:
    async def scenario(server: Any) -> None:
        replica = server.engine.replicas[0]
        server.freeze_at(10)
        response = await server.client.post(PATH, json={"prompt": [70], "max_tokens": 1000, "stream": True})
        await response.content.readany()
        response.close()
        server.engine.running.set()
        await server.until(lambda: len(replica.aborted) == 1)
        assert not replica.requests

    run_server(scenario, folder=long_model)
