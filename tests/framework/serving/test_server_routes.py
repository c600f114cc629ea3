"""Health, readiness, loads, metrics, tokens, control verbs, OpenAPI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crossdock
import pytest
from crossdock.serving.frontend import Phase
from crossdock.serving.replicas import ReplicaState
from crossdock.testing.text_model import CHAT_TEMPLATE, EOS, write_text_model
from openapi_spec_validator import validate

RunServer = Callable[..., None]


def test_health_lists_each_replica(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        status, health = await server.get("/health")
        assert status == 200
        assert health["status"] == "ok"
        assert [replica["dp_rank"] for replica in health["replicas"]] == [0, 1]
        assert {replica["state"] for replica in health["replicas"]} == {"idle"}
        assert set(health["replicas"][0]) == {"dp_rank", "state", "since"}

    run_server(scenario, num_replicas=2)


def test_a_replica_that_stops_moving_turns_health_red_and_recovers(run_server: RunServer) -> None:
    """Frozen while it has work; an idle one that says nothing for long stays healthy."""

    async def scenario(server: Any) -> None:
        engine = server.frontend.engine
        now = [1000.0]
        for replica in engine.replicas:
            replica.clock = lambda: now[0]
            replica.progress_s = now[0]
        now[0] += 500
        engine.check_progress(60)
        assert (await server.get("/health"))[0] == 200
        server.engine.running.clear()
        call = asyncio.create_task(
            server.post("/v1/completions", {"prompt": [1], "max_tokens": 4, "routed_dp_rank": 1})
        )
        await server.until(lambda: engine.replicas[1].in_flight)
        now[0] += 59
        engine.check_progress(60)
        assert (await server.get("/health"))[0] == 200
        now[0] += 2
        engine.check_progress(60)
        status, health = await server.get("/health")
        assert (status, health["status"]) == (503, "stuck")
        assert [replica["state"] for replica in health["replicas"]] == ["idle", "stuck"]
        # New requests avoid the stuck replica; one pinned to it is told so.
        status, answer = await server.post("/v1/completions", {"prompt": [1], "routed_dp_rank": 1})
        assert (status, "replica 1" in answer["error"]["message"]) == (503, True)
        server.engine.running.set()
        assert (await call)[0] == 200
        assert (await server.get("/health"))[0] == 200

    run_server(scenario, num_replicas=2)


def test_a_long_step_that_goes_on_is_not_stuck(run_server: RunServer) -> None:
    """Progress is the step number, not an output: load reports of a long prefill keep the replica healthy."""

    async def scenario(server: Any) -> None:
        replica = server.frontend.engine.replicas[0]
        fake = server.engine.replicas[0]
        now = [0.0]
        replica.clock = lambda: now[0]
        replica.in_flight["x"] = object()
        replica.change(ReplicaState.RUNNING)
        for step in range(10, 15):
            now[0] += 50
            replica.reported(fake.load(step))
            replica.check_progress(60)
            assert replica.state is ReplicaState.RUNNING
        now[0] += 61
        replica.reported(fake.load(14))
        replica.check_progress(60)
        assert replica.state is ReplicaState.STUCK
        del replica.in_flight["x"]

    run_server(scenario)


@pytest.mark.parametrize(("phase", "ready"), [(Phase.STARTING, 503), (Phase.READY, 200), (Phase.DRAINING, 503)])
def test_ready_says_whether_requests_are_taken(run_server: RunServer, phase: Phase, ready: int) -> None:
    async def scenario(server: Any) -> None:
        async with server.client.get("/ready") as response:
            assert response.status == ready
            assert (ready == 200) or response.headers["Retry-After"]
        assert (await server.get("/health"))[0] == ready

    run_server(scenario, phase=phase)


def test_health_generate_asks_each_replica_for_a_token_and_leaves_no_trace(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.get("/health_generate"))[0] == 200
        for replica in server.engine.replicas:
            (request,) = replica.seen
            assert request.is_health_check
        text = (await (await server.client.get("/metrics")).text()).splitlines()
        assert 'crossdock:generation_tokens_total{model_name="tiny"} 0.0' in text
        probe = {"X-Health-Check": "1"}
        await server.post("/v1/completions", {"prompt": [1], "max_tokens": 2}, headers=probe)
        assert server.engine.replicas[0].seen[-1].is_health_check

    run_server(scenario, num_replicas=2)


def test_metrics_count_tokens_and_reasons(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        await server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4, "n": 2})
        await server.post("/v1/completions", {"prompt": [], "max_tokens": 4})
        text = (await (await server.client.get("/metrics")).text()).splitlines()
        label = '{model_name="tiny"}'
        assert f"crossdock:prompt_tokens_total{label} 6.0" in text
        assert f"crossdock:generation_tokens_total{label} 8.0" in text
        assert 'crossdock:request_success_total{finished_reason="length",model_name="tiny"} 2.0' in text
        assert 'crossdock:http_errors_total{code="400",model_name="tiny"} 1.0' in text
        names = {line.split("{")[0].split(" ")[0] for line in text}
        for name in (
            "time_to_first_token_seconds_count",
            "inter_token_latency_seconds_sum",
            "e2e_request_latency_seconds_bucket",
        ):
            assert f"crossdock:{name}" in names
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total"):
            assert f"crossdock:{name}" in names

    run_server(scenario)


def test_introspection_answers(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        assert (await server.get("/version"))[1] == {"version": crossdock.__version__}
        assert (await server.get("/ping"))[0] == 200
        for path in ("/server_info", "/get_server_info"):
            assert (await server.get(path))[1]["phase"] == "ready"
        for path in ("/model_info", "/get_model_info"):
            assert (await server.get(path))[1]["max_model_len"] == 64
        loads = (await server.get("/v1/loads"))[1]["loads"]
        assert [load["dp_rank"] for load in loads] == [0, 1]
        assert (await server.get("/v1/models"))[1]["data"][0]["max_model_len"] == 64

    run_server(scenario, num_replicas=2)


def test_tokenize_and_detokenize_are_inverse(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        text = "the quick \u6f22 fox"
        _, tokens = await server.post("/tokenize", {"prompt": text, "return_token_strs": True})
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert (await server.post("/detokenize", {"tokens": tokens["tokens"]}))[1] == {"prompt": text}
        _, chat = await server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
        assert chat["count"] > 3
        assert (await server.post("/tokenize", {}))[0] == 400
        assert (await server.post("/detokenize", {"tokens": [512]}))[0] == 400

    run_server(scenario)


@pytest.mark.parametrize("method", ["get", "post"])
def test_control_verbs_reach_every_replica(run_server: RunServer, method: str) -> None:
    async def scenario(server: Any) -> None:
        for path, verb in (
            ("/flush_cache", "flush_cache"),
            ("/reset_prefix_cache", "flush_cache"),
            ("/start_expert_distribution_record", "start_expert_distribution_record"),
            ("/stop_expert_distribution_record", "stop_expert_distribution_record"),
            ("/dump_expert_distribution_record", "dump_expert_distribution_record"),
            ("/start_profile", "start_profile"),
            ("/stop_profile", "stop_profile"),
        ):
            async with getattr(server.client, method)(path) as response:
                answer = await response.json()
            assert response.status == 200
            assert [(reply["rank"], reply["verb"]) for reply in answer["replicas"]] == [(0, verb), (1, verb)]

    run_server(scenario, num_replicas=2)


def test_a_misspelt_field_of_a_record_verb_is_refused_with_the_right_one(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        for verb in ("start", "stop", "dump"):
            status, answer = await server.post(f"/{verb}_expert_distribution_record", {"output_dri": "x"})
            assert status == 400
            assert answer["error"]["param"] == "output_dri"
            assert "did you mean 'output_dir'" in answer["error"]["message"]

    run_server(scenario)


def test_abort_request_ends_a_request_by_the_clients_id(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        server.engine.running.clear()
        body = {"input_ids": [[1], [2]], "rid": "mine", "sampling_params": {"max_new_tokens": 60}}
        call = asyncio.create_task(server.post("/generate", body))
        await server.until(lambda: server.frontend.engine.num_in_flight == 2)
        assert (await server.post("/generate", body))[0] == 400  # the id is taken
        assert (await server.post("/abort_request", {"rid": "other"}))[1] == {"aborted": 0}
        assert (await server.post("/abort_request", {"rid": "mine"}))[1] == {"aborted": 2}
        status, answers = await call
        assert status == 200
        assert [answer["meta_info"]["finish_reason"] for answer in answers] == [{"type": "abort"}] * 2
        assert (await server.post("/abort_request", {}))[0] == 400
        server.engine.running.set()

    run_server(scenario)


def test_generate_takes_ids_and_gives_ids(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        body = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": 4},
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        _, answer = await server.post("/generate", body)
        assert answer["output_ids"] == [5, 6, 7, 5]
        assert answer["meta_info"]["completion_tokens"] == 4
        assert answer["meta_info"]["output_token_logprobs"][0] == [-0.5, 5, None]
        assert len(answer["meta_info"]["output_top_logprobs"][0]) == 2
        _, several = await server.post("/generate", {"input_ids": [[5], [6]], "sampling_params": {"max_new_tokens": 2}})
        assert [one["output_ids"] for one in several] == [[5, 5], [6, 6]]
        events = await server.events("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}})
        assert '"output_ids":[5,6]' in events[-2]

    run_server(scenario)


def test_generate_keeps_the_stop_text_where_it_is_not_to_be_trimmed(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        _, ids = await server.post("/tokenize", {"prompt": "abc"})
        for trimmed, expected in ((False, "ab"), (True, "a")):
            sampling = {"max_new_tokens": 3, "stop": "b", "no_stop_trim": not trimmed}
            _, answer = await server.post("/generate", {"input_ids": ids["tokens"], "sampling_params": sampling})
            assert answer["text"] == expected

    run_server(scenario)


def test_tokenizer_info_has_what_clients_build_prompts_with(run_server: RunServer, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        status, answer = await server.get("/tokenizer_info")
        assert status == 200
        assert (answer["eos_token"], answer["bos_token"]) == (EOS, None)
        assert answer["chat_template"] == CHAT_TEMPLATE
        assert answer["model_max_length"] == 64

    run_server(scenario)
    folder = write_text_model(tmp_path / "ids_only")
    (folder / "tokenizer.json").unlink()

    async def without(server: Any) -> None:
        status, answer = await server.get("/tokenizer_info")
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")

    run_server(without, folder=folder)


def test_the_openapi_document_is_valid_and_lists_every_route(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        _, document = await server.get("/openapi.json")
        validate(document)
        assert document["openapi"].startswith("3.1")
        paths = {
            resource.canonical
            for resource in server.client.app.router.resources()
            if resource.canonical != "/openapi.json"
        }
        assert set(document["paths"]) == paths

    run_server(scenario)


def test_the_openapi_document_with_keys_is_valid(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        _, document = await server.get("/openapi.json", headers={"Authorization": "Bearer k"})
        validate(document)
        assert document["components"]["securitySchemes"]

    run_server(scenario, api_keys=frozenset({"k"}))
