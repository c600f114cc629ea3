"""Placement over HTTP: look, plan (in this process, beside the ranks), apply (on the ranks, between their steps), look back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from crossdock.errors import CrossdockError, RequestError
from crossdock.move_plan import move_plan
from crossdock.placement import balancedness, check_fits, plan
from crossdock.placement_io.placement_files import read_placement
from crossdock.serving.frontend import FRONTEND, Frontend
from crossdock.serving.http_io import exact_body, json_response
from crossdock.serving.protocol.placement import (
    ApplyPlacementBody,
    ApplyPlacementResponse,
    PlanPlacementBody,
    PlanPlacementResponse,
)
from crossdock.serving.status_routes import CONTROL_TIMEOUT_S
from crossdock.types.placement import ExpertLoad, Placement, Topology

RELOAD_TIMEOUT_S = 1800.0
"""A checkpoint may be a terabyte on a slow disk."""


async def get_placement(request: web.Request) -> web.Response:
    """The placement in force, and whether experts are moving."""
    return json_response(await _ask(request.app[FRONTEND], "placement"))


async def get_placement_history(request: web.Request) -> web.Response:
    """Rebalances that ended, oldest first, with gain, price and the largest pause."""
    return json_response(await _ask(request.app[FRONTEND], "placement_history"))


async def post_placement_plan(request: web.Request) -> web.Response:
    """Plans for the counts since the last decision, or judges a given plan; applies it when ``dry_run`` is false."""
    frontend = request.app[FRONTEND]
    body = await exact_body(request, PlanPlacementBody)
    if body.plan is not None and body.algo is not None:
        raise RequestError("algo and plan exclude each other: give a planner or a placement", field="algo")
    if body.plan is not None and body.options:
        raise RequestError("options and plan exclude each other: options are a planner's", field="options")
    state, counted = await _ask(frontend, "placement"), await _ask(frontend, "placement_load")
    # A planner may take a second; the event loop goes on meanwhile.
    answer = await asyncio.to_thread(_judged, frontend, state, counted, body)
    if not body.dry_run:
        await _apply(frontend, answer.physical_to_logical_map, "POST /placement/plan")
    return json_response(answer)


async def post_placement_apply(request: web.Request) -> web.Response:
    """Starts to move to a plan: 202, or 409 while a rebalance is under way. ``/placement/history`` tells how it ended."""
    frontend = request.app[FRONTEND]
    body = await exact_body(request, ApplyPlacementBody)
    placement = _given(body.plan, await _ask(frontend, "placement"))
    slots: list[list[int]] = placement.physical_to_logical.tolist()
    reply = await _apply(frontend, slots, body.reason or "POST /placement/apply")
    answer = ApplyPlacementResponse(status="accepted", layers_changed=int(reply["layers"]))
    return json_response(answer, status=202)


async def post_placement_reload(request: web.Request) -> web.Response:
    """All ranks read their experts from the checkpoint again, between two steps; 409 while a rebalance is under way."""
    reply = await _ask(request.app[FRONTEND], "placement_reload", RELOAD_TIMEOUT_S)
    if not reply["accepted"]:
        raise RequestError(str(reply["reason"]), http_status=409)
    return json_response({"status": "reloaded", "slots": reply["slots"]})


async def _ask(frontend: Frontend, verb: str, timeout_s: float = CONTROL_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
    """The answer of the first replica; all give the same."""
    frontend.check_takes_requests()
    replies = await frontend.engine.call(verb, arguments, timeout_s)
    return replies[0].result


async def _apply(frontend: Frontend, slots: list[list[int]], reason: str) -> dict[str, Any]:
    reply = await _ask(frontend, "placement_apply", physical_to_logical_map=slots, reason=reason)
    if not reply["accepted"]:
        raise RequestError(str(reply["reason"]), http_status=409)
    return reply


def _judged(
    frontend: Frontend, state: Mapping[str, Any], counted: Mapping[str, Any], body: PlanPlacementBody
) -> PlanPlacementResponse:
    topology, num_experts = Topology(**state["config"]), int(state["num_logical_experts"])
    current = Placement.from_physical(state["physical_to_logical_map"], num_experts)
    load = ExpertLoad(counts=counted["load"])
    new = _planned(frontend, load, topology, current, body) if body.plan is None else _given(body.plan, state)
    most, held = int(new.replica_counts.max()), int(state["max_replicas"])
    if most > held:
        field = "algo" if body.plan is None else "plan"
        raise RequestError(
            f"{field}: an expert has {most} replicas and the maps hold {held} (eplb.max_replicas)", field=field
        )
    now, planned = (balancedness(one, load.total, topology) for one in (current, new))
    moves = [move for layer in move_plan(current, new, topology) for move in layer.moves]
    sent = sum(move.kind in ("same_node", "cross_node") for move in moves)
    return PlanPlacementResponse(
        dry_run=body.dry_run,
        passes=int(counted["passes"]),
        balancedness_now=float(now.mean()),
        balancedness_now_worst=float(now.min()),
        balancedness_planned=float(planned.mean()),
        balancedness_planned_worst=float(planned.min()),
        layers_changed=int((current.physical_to_logical != new.physical_to_logical).any(axis=1).sum()),
        moved_slots=len(moves),
        moved_bytes=sent * int(state["expert_bytes"]),
        physical_to_logical_map=new.physical_to_logical.tolist(),
        notes=list(new.notes),
    )


def _planned(
    frontend: Frontend, load: ExpertLoad, topology: Topology, current: Placement, body: PlanPlacementBody
) -> Placement:
    configured = dict(frontend.info.get("config", {}).get("eplb_algo", {}))
    name = str(configured.pop("name", "crossdock"))
    algo, options = (name, configured) if body.algo is None else (body.algo, {})
    try:
        return plan(algo, load, topology, current, **{**options, **body.options})
    except CrossdockError as error:
        raise RequestError(f"no plan by {algo!r}: {error}", field="algo") from error


def _given(value: dict[str, Any] | list[Any], state: Mapping[str, Any]) -> Placement:
    """A placement of the body, when it fits what is served."""
    topology, layers = Topology(**state["config"]), len(state["layers"])
    num_experts = int(state["num_logical_experts"])
    try:
        placement = read_placement(json.dumps(value), num_logical_experts=num_experts, num_layers=layers)
        check_fits(placement, topology, num_layers=layers, num_experts=num_experts)
    except CrossdockError as error:
        raise RequestError(f"plan: {error}", field="plan") from error
    return placement
