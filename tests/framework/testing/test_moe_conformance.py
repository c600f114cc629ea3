"""The suites of the MoE path find faults that are put in on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from crossdock.groups import resolve_sizes
from crossdock.rows import Rows
from crossdock.testing import dispatcher_conformance, experts_conformance, picker_conformance
from crossdock.testing.conformance import Check, Outcome, PluginCase, run_check
from crossdock.testing.world import OneProcessWorld
from crossdock.types.dispatch import Received
from crossdock.types.experts import ExpertTensors
from crossdock_dispatchers.allgatherv.dispatcher import AllGatherV
from crossdock_eplb_algos.expert_location.dynamic.picker import DynamicPicker
from crossdock_models.experts.torch.experts import TorchExperts


class OneRankPool:
    """A pool of one rank in this process, where faults can be put in; larger ones are never reached."""

    def __init__(self, world_size: int) -> None:
        assert world_size == 1, "the fault was not found on one rank"

    def run(self, function: Callable[..., Any], *args: object, timeout_s: float = 60.0) -> list[Any]:
        return OneProcessWorld(resolve_sizes(ranks=1)).run(function, *args, timeout_s=timeout_s)


def outcome(suite: tuple[Check, ...], name: str, point: str, plugin: str) -> Outcome:
    check = next(check for check in suite if check.name == name)
    case = PluginCase(point=point, name=plugin, pool_of=OneRankPool)  # type: ignore[arg-type]
    result = run_check(check, case)
    assert "was not found on one rank" not in result.message
    return result.outcome


def doubled(rows: Rows) -> Rows:
    return Rows(rows.partial * 2, rows.layout, rows.owed, rows.comms)


def without_last_row(rows: Rows) -> Rows:
    return Rows(rows.partial[:-1], rows.layout, rows.owed, rows.comms)


def with_poison(rows: Rows) -> Rows:
    return Rows(torch.empty_like(rows.partial), rows.layout, rows.owed, rows.comms)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (doubled, "every_row_gets_the_weighted_sum_of_its_experts"),
        (doubled, "constants_1_and_10_weighted_7_to_3_give_3_7"),
        (without_last_row, "identity_experts_return_the_input"),
        (with_poison, "unused_buffer_rows_are_never_read"),
    ],
)
def test_a_dispatcher_with_a_wrong_combine_fails(
    fault: Callable[[Rows], Rows], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AllGatherV.combine_end
    monkeypatch.setattr(AllGatherV, "combine_end", lambda self, pending: fault(original(self, pending)))
    assert outcome(dispatcher_conformance.CHECKS, check, "dispatcher", "allgatherv") is Outcome.FAILED


def test_a_dispatcher_that_forgets_pairs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    original = AllGatherV.dispatch_end

    def forgetful(self: AllGatherV, pending: Any) -> Received:
        received = original(self, pending)
        assert received.local_topk_ids is not None
        ids = received.local_topk_ids.clone()
        ids[:, -1] = -1
        return attrs.evolve(received, local_topk_ids=ids)

    monkeypatch.setattr(AllGatherV, "dispatch_end", forgetful)
    found = outcome(
        dispatcher_conformance.CHECKS, "every_row_gets_the_weighted_sum_of_its_experts", "dispatcher", "allgatherv"
    )
    assert found is Outcome.FAILED


def test_experts_that_ignore_weights_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TorchExperts.run

    def unweighted(self: TorchExperts, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
        return original(self, layer, attrs.evolve(received, row_weights=None), sm_budget)

    monkeypatch.setattr(TorchExperts, "run", unweighted)
    checks = experts_conformance.CHECKS
    assert outcome(checks, "it_gives_the_weighted_sum_of_swiglu_experts", "experts", "torch") is Outcome.FAILED


@pytest.mark.parametrize("kept", [("gate_up", "down"), ("gate_up_scale",)])
def test_experts_that_keep_old_tensors_after_a_refresh_fail(
    kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copied weight, or a copied scale only: then nothing but quantised models go wrong."""
    original = TorchExperts.attach

    def copying(self: TorchExperts, tensors: ExpertTensors) -> None:
        own = {name: each.clone() if name in kept else each for name, each in tensors.tensors.items()}
        original(self, ExpertTensors(layer=tensors.layer, tensors=own))

    monkeypatch.setattr(TorchExperts, "attach", copying)
    check = "after_a_swap_of_two_experts_and_refresh_the_outputs_are_swapped"
    assert outcome(experts_conformance.CHECKS, check, "experts", "torch") is Outcome.FAILED


def test_a_picker_that_names_slots_of_other_experts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicPicker, "pick", lambda self, layer, ids, live_rows: ids)
    checks = picker_conformance.CHECKS
    assert outcome(checks, "a_pick_is_a_replica_of_the_expert", "expert_location", "dynamic") is Outcome.FAILED


def test_a_picker_that_differs_between_ranks_with_the_same_rows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DynamicPicker.pick

    def by_random(self: DynamicPicker, layer: int, ids: torch.Tensor, live_rows: int) -> torch.Tensor:
        monkeypatch.setattr(self._spread, "_by_row", False)
        return original(self, layer, ids, live_rows)

    monkeypatch.setattr(DynamicPicker, "pick", by_random)
    checks = picker_conformance.CHECKS
    assert outcome(checks, "ranks_with_the_same_rows_pick_the_same", "expert_location", "dynamic") is Outcome.FAILED
