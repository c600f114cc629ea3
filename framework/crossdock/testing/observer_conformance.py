"""What must hold for an observer: it takes every event in any order, and returns nothing."""

from __future__ import annotations

import tempfile
from typing import Any

from crossdock.observe.observers import make_observer
from crossdock.testing.conformance import NotCheckable, PluginCase, check_of
from crossdock.types.observer import ObserverSpec, StepEvent

SAMPLE_STEP = StepEvent(
    rank=0,
    attn_dp_rank=0,
    step=1,
    forward_mode="decode",
    padding_mode="max_len",
    dispatch_mode="normal",
    graph=False,
    overlap=False,
    local_tokens=2,
    all_tokens=(2, 0),
    attention_pairs=(10, 0),
    sync_wait_s=0.0,
    duration_s=0.01,
    is_health_check=False,
)


def _observer(case: PluginCase, folder: str) -> Any:
    """``Any``, because what its methods return is looked at, which the protocol says nobody does."""
    spec = ObserverSpec(rank=0, attn_dp_rank=0, num_ranks=2, output_folder=folder)
    observer = make_observer(case.name, case.options, spec)
    if observer is None:
        raise NotCheckable("the observer has nothing to observe on rank 0")
    return observer


def check_it_takes_every_event_and_returns_nothing(case: PluginCase) -> None:
    with tempfile.TemporaryDirectory() as folder:
        observer = _observer(case, folder)
        answers: list[object] = [
            observer.on_fault(1, "rank 1 ended"),
            observer.on_rebalance({"step": 1, "outcome": "applied", "moved_slots": 2}),
            observer.on_load("decode", (1.0, 0.5)),
            observer.on_step(SAMPLE_STEP),
            observer.on_load("prefill", ()),
        ]
    assert answers == [None] * len(answers), "an observer returns nothing: nobody looks at it"


CHECKS = (check_of(check_it_takes_every_event_and_returns_nothing),)
