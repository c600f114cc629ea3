"""The receipt: counters, and a schema that a receipt satisfies."""

from __future__ import annotations

import json
from typing import Any

import attrs
import jsonschema
import pytest
from crossdock.compatibility import check_selection
from crossdock.config_load import load_config, set_layer
from crossdock.observe.receipt import FaultEntry, RebalanceEntry, ReceiptCounters, make_receipt, receipt_schema
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan

PLAN = StepPlan(
    step=1,
    eplb_pass=0,
    live_tokens=(3, 0),
    padded_tokens=(3, 0),
    padding_mode=PaddingMode.SUM_LEN,
    forward_mode=ForwardMode.PREFILL,
    dispatch_mode=DispatchMode.NORMAL,
    overlap=False,
    overlap_reason="too_few_tokens",
    graph_reason="prefill",
)


def receipt(counters: ReceiptCounters) -> dict[str, Any]:
    config = load_config([set_layer(["parallel.ranks=2", "observer.names=['prometheus']"])]).config
    return make_receipt(config, check_selection(config), counters)


def test_every_mode_and_every_reason_is_counted() -> None:
    counters = ReceiptCounters()
    counters.count_step(PLAN)
    counters.count_step(
        attrs.evolve(PLAN, forward_mode=ForwardMode.DECODE, bucket=8, overlap=True, padding_mode=PaddingMode.MAX_LEN)
    )
    counters.count_step(attrs.evolve(PLAN, park=True))
    counts = receipt(counters)["counts"]
    assert counts == {
        "padding": {"sum_len": 1, "max_len": 1},
        "dispatch": {"normal": 2},
        "forward": {"prefill": 1, "decode": 1},
        "graph": {"graph": 1, "eager": 1, "reasons": {"prefill": 1}},
        "overlap": {"on": 1, "off": 1, "reasons": {"too_few_tokens": 1}},
        "parked": 1,
    }


def test_a_receipt_satisfies_its_schema_and_is_json() -> None:
    counters = ReceiptCounters()
    counters.count_step(PLAN)
    counters.set_capacity("kv_tokens", 1024)
    counters.add_rebalance(
        RebalanceEntry(step=5, outcome="applied", reason="gain 2 s, price 1 s", predicted_gain_s=2.0)
    )
    counters.add_fault(FaultEntry(step=7, rank=1, message="rank 1 ended"))
    made = receipt(counters)
    assert json.loads(json.dumps(made)) == made
    jsonschema.Draft202012Validator.check_schema(receipt_schema())
    jsonschema.validate(made, receipt_schema())
    assert made["groups"]["world"] == [[0, 1]]
    assert made["capabilities"]["dispatcher"]["needs_full_ep"] is False
    assert {entry["name"] for entry in made["plugins"] if entry["point"] == "observer"} == {"prometheus"}
    (location,) = (entry for entry in made["plugins"] if entry["point"] == "expert_location")
    assert location["passed_over"][0]["code"] == "rank_invariant_picks_needed"


def test_the_schema_refuses_an_unknown_count() -> None:
    made = receipt(ReceiptCounters())
    made["counts"]["graph"]["reasons"] = {"x": "many"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, receipt_schema())
