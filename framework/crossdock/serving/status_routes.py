"""How the server is: health, readiness, version, metrics, loads, receipt."""

from __future__ import annotations

import contextlib
import uuid

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import crossdock
from crossdock.serving.frontend import FRONTEND, Frontend, Phase
from crossdock.serving.generation import GenerationPlan, PromptTokens
from crossdock.serving.http_io import json_response
from crossdock.serving.protocol.responses import HealthResponse, LoadsResponse, ReplicaHealth, ReplicaLoadEntry
from crossdock.serving.receipts import collected_receipt
from crossdock.serving.replicas import Replica, ReplicaState
from crossdock.serving.request_ids import request_id
from crossdock.types.request import SamplingParams

RETRY_AFTER = {"Retry-After": "5"}
CONTROL_TIMEOUT_S = 30.0


async def get_health(request: web.Request) -> web.Response:
    """``ok`` or ``degraded`` (200), or why not (503); from the progress of each replica's step loop, not from outputs."""
    body = health(request.app[FRONTEND])
    is_well = body.status in ("ok", "degraded")
    return json_response(body, status=200 if is_well else 503, headers=None if is_well else RETRY_AFTER)


def health(frontend: Frontend) -> HealthResponse:
    """The answer of ``/health``."""
    states = [replica.state for replica in frontend.engine.replicas]
    replicas = [
        ReplicaHealth(dp_rank=replica.attn_dp_rank, state=replica.state.value, since=replica.since)
        for replica in frontend.engine.replicas
    ]
    if frontend.phase is Phase.STARTING:
        return HealthResponse(status="starting", replicas=replicas)
    if frontend.phase is Phase.FAILED or all(state is ReplicaState.FAILED for state in states):
        return HealthResponse(status="failed", replicas=replicas)
    if ReplicaState.STUCK in states:
        return HealthResponse(status="stuck", replicas=replicas)
    if frontend.phase is Phase.DRAINING:
        return HealthResponse(status="draining", replicas=replicas)
    return HealthResponse(status="degraded" if ReplicaState.FAILED in states else "ok", replicas=replicas)


async def get_health_generate(request: web.Request) -> web.Response:
    """Generates one token on each replica, marked as a probe: 200 when all of them answer."""
    frontend = request.app[FRONTEND]
    frontend.check_takes_requests()
    for replica in frontend.engine.replicas:
        plan = _probe_plan(replica)
        with frontend.running(plan.request_id, request_id()):
            async with contextlib.aclosing(frontend.deltas(plan)) as batches:
                async for _ in batches:
                    pass
    return json_response(health(frontend))


async def get_ready(request: web.Request) -> web.Response:
    """200 while requests are taken, else 503."""
    phase = request.app[FRONTEND].phase
    is_ready = phase is Phase.READY
    return json_response(
        {"status": phase.value}, status=200 if is_ready else 503, headers=None if is_ready else RETRY_AFTER
    )


async def get_ping(request: web.Request) -> web.Response:
    """The HTTP server answers."""
    return json_response({})


async def get_version(request: web.Request) -> web.Response:
    """The program's version."""
    return json_response({"version": crossdock.__version__})


async def get_metrics(request: web.Request) -> web.Response:
    """Prometheus' exposition format."""
    metrics = request.app[FRONTEND].metrics
    return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def get_loads(request: web.Request) -> web.Response:
    """The last load report of each replica and what is in flight to it."""
    return json_response(
        LoadsResponse(loads=[_load_entry(replica) for replica in request.app[FRONTEND].engine.replicas])
    )


async def get_server_info(request: web.Request) -> web.Response:
    """Resolved config, plugins, versions and process map."""
    frontend = request.app[FRONTEND]
    first = frontend.engine.ready.get(0)
    receipt = {} if first is None else first.receipt
    chosen = {name: receipt.get(name) for name in ("plugins", "groups", "versions", "capacity", "hardware")}
    return json_response({**frontend.info, "phase": frontend.phase.value, **chosen})


async def get_receipt(request: web.Request) -> web.Response:
    """What really ran: the receipt of rank 0's replica, and the counts of every replica."""
    return json_response(await collected_receipt(request.app[FRONTEND]))


def _probe_plan(replica: Replica) -> GenerationPlan:
    return GenerationPlan(
        request_id=f"health-{uuid.uuid4().hex}",
        prompts=(PromptTokens(ids=(0,)),),
        n=1,
        sampling=(SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),),
        routed_dp_rank=replica.attn_dp_rank,
        is_health_check=True,
    )


def _load_entry(replica: Replica) -> ReplicaLoadEntry:
    load = replica.load
    return ReplicaLoadEntry(
        dp_rank=replica.attn_dp_rank,
        num_running_reqs=0 if load is None else load.running,
        num_waiting_reqs=0 if load is None else load.waiting,
        num_tokens=replica.tokens,
        attention_pairs=replica.attention_pairs,
        kv_cache_usage=0.0 if load is None else load.kv_usage,
        in_flight=len(replica.in_flight),
        step=-1 if load is None else load.step,
    )
