"""Placement over HTTP on a fake engine: plans are made beside the ranks, and only what fits reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
from crossdock.types.link import Control

RunServer = Callable[..., None]
SLOTS = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 3]]
LOAD = [[100.0, 10.0, 10.0, 10.0], [10.0, 10.0, 10.0, 10.0]]


@attrs.define(eq=False)
class FakeRanks:
    """Answers the placement verbs as ranks do, and remembers what they were told to do."""

    is_busy: bool = False
    max_replicas: int = 3
    applied: list[Mapping[str, Any]] = attrs.Factory(list)

    def __call__(self, control: Control) -> Mapping[str, Any]:
        if control.verb == "placement":
            return {
                "physical_to_logical_map": SLOTS,
                "num_logical_experts": 4,
                "max_replicas": self.max_replicas,
                "layers": [1, 2],
                "expert_bytes": 1000,
                "config": {"num_gpus": 2, "num_nodes": 1, "num_physical_experts": 6, "num_groups": 1},
                "can_move": True,
                "is_moving": self.is_busy,
                "progress": "",
            }
        if control.verb == "placement_load":
            return {"passes": 7, "load": LOAD}
        if control.verb == "placement_history":
            return {"entries": [{"step": 3, "outcome": "applied"}]}
        if self.is_busy:
            return {"accepted": False, "reason": "a rebalance is under way"}
        if control.verb == "placement_reload":
            return {"accepted": True, "slots": 6}
        assert control.verb == "placement_apply"
        self.applied.append(control.arguments)
        return {"accepted": True, "layers": 2}


def test_the_placement_and_its_history_are_shown(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        server.engine.verb = FakeRanks()
        status, answer = await server.get("/placement")
        assert status == 200
        assert answer["physical_to_logical_map"] == SLOTS
        assert (await server.get("/placement/history"))[1] == {"entries": [{"step": 3, "outcome": "applied"}]}

    run_server(scenario)


def test_a_dry_run_says_what_a_plan_wins_and_costs_and_changes_nothing(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        ranks = server.engine.verb = FakeRanks()
        status, answer = await server.post("/placement/plan", {"algo": "global"})
        assert status == 200
        assert answer["dry_run"] is True
        assert answer["passes"] == 7
        # Layer 0: 50 + 5 + 10 on GPU 0, 10 + 50 + 5 on GPU 1. Layer 1: 10 + 10 + 5 on GPU 0, 5 + 5 + 5 on GPU 1.
        assert answer["balancedness_now"] == pytest.approx((1.0 + 0.8) / 2)
        assert answer["balancedness_now_worst"] == pytest.approx(0.8)
        assert answer["balancedness_planned"] > answer["balancedness_now"]
        assert answer["moved_bytes"] <= answer["moved_slots"] * 1000
        assert sorted(set(answer["physical_to_logical_map"][0])) == [0, 1, 2, 3]
        assert ranks.applied == []

    run_server(scenario)


def test_a_given_plan_is_judged_and_applied_on_demand(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        ranks = server.engine.verb = FakeRanks()
        new = [[0, 1, 2, 3, 1, 0], [0, 1, 2, 3, 2, 3]]
        body = {"plan": {"physical_to_logical_map": new}, "dry_run": False}
        status, answer = await server.post("/placement/plan", body)
        assert status == 200
        assert answer["layers_changed"] == 1
        assert ranks.applied[0]["physical_to_logical_map"] == new
        status, answer = await server.post("/placement/apply", {"plan": answer, "reason": "looks good"})
        assert status == 202
        assert answer == {"status": "accepted", "layers_changed": 2}
        assert ranks.applied[1] == {"physical_to_logical_map": new, "reason": "looks good"}

    run_server(scenario)


def test_a_reload_says_how_many_slots_were_read(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        server.engine.verb = FakeRanks()
        assert await server.post("/placement/reload", {}) == (200, {"status": "reloaded", "slots": 6})

    run_server(scenario)


def test_a_second_rebalance_gets_409_with_the_reason(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        server.engine.verb = FakeRanks(is_busy=True)
        for path, body in (("/placement/apply", {"plan": SLOTS}), ("/placement/reload", {})):
            status, answer = await server.post(path, body)
            assert status == 409
            assert "under way" in answer["error"]["message"]

    run_server(scenario)


def test_what_cannot_be_used_gets_400_and_the_field(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        ranks = server.engine.verb = FakeRanks()
        cases = [
            ("/placement/apply", {"plan": [[0, 1, 2, 3]]}, "plan"),
            ("/placement/apply", {"plan": [[0, 1, 2, 2, 0, 1], [0, 1, 2, 3, 2, 3]]}, "plan"),
            ("/placement/apply", {"plan": {"nothing": 1}}, "plan"),
            ("/placement/apply", {}, "plan"),
            ("/placement/plan", {"algo": "gloabl"}, "algo"),
            ("/placement/plan", {"algo": "global", "options": {"wrong": 1}}, "algo"),
            ("/placement/plan", {"algo": "global", "plan": SLOTS}, "algo"),
            ("/placement/plan", {"options": {"effort": "fast"}, "plan": SLOTS}, "options"),
        ]
        for path, body, field in cases:
            status, answer = await server.post(path, body)
            assert status == 400, (path, body, answer)
            assert answer["error"]["param"] == field, (path, body, answer)
        assert ranks.applied == []

    run_server(scenario)


def test_a_plan_with_more_replicas_than_the_maps_hold_is_refused_before_it_is_tried(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        ranks = server.engine.verb = FakeRanks(max_replicas=1)
        for body, field in (({"plan": SLOTS}, "plan"), ({"algo": "global", "dry_run": False}, "algo")):
            status, answer = await server.post("/placement/plan", body)
            assert status == 400
            assert answer["error"]["param"] == field
            assert "replicas and the maps hold 1 (eplb.max_replicas)" in answer["error"]["message"]
        assert ranks.applied == []

    run_server(scenario)


def test_a_misspelt_field_is_refused_with_the_right_one_and_moves_nothing(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        ranks = server.engine.verb = FakeRanks()
        for path, body, field, meant in (
            ("/placement/plan", {"algo": "global", "dryrun": False}, "dryrun", "dry_run"),
            ("/placement/plan", {"alg": "global"}, "alg", "algo"),
            ("/placement/apply", {"plan": SLOTS, "reson": "x"}, "reson", "reason"),
        ):
            status, answer = await server.post(path, body)
            assert status == 400
            assert answer["error"]["param"] == field
            assert (
                f"{field}: there is no such field (did you mean '{meant}'?); fields are" in answer["error"]["message"]
            )
        assert ranks.applied == []

    run_server(scenario)


def test_numbers_of_ranks_are_metrics(run_server: RunServer) -> None:
    async def scenario(server: Any) -> None:
        from crossdock.types.link import Outputs
        from crossdock.types.request import ReplicaLoad

        load = ReplicaLoad(
            attn_dp_rank=0,
            running=0,
            waiting=0,
            tokens=0,
            attention_pairs=0,
            kv_usage=0.0,
            step=1,
            gauges={"eplb_balancedness_100": 0.75},
        )
        await server.frontend.engine.receive(Outputs(outputs=(), load=load))
        async with server.client.get("/metrics") as response:
            text = await response.text()
        assert 'crossdock:eplb_balancedness_100{engine="0",model_name="tiny"} 0.75' in text

    run_server(scenario)
