"""Balancedness to log, metrics and observers."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
import torch
from crossdock.comm import local_comms
from crossdock.engine_seams import AgreedStep
from crossdock.eplb.load_report import LoadReport
from crossdock.observe.recorder_window import LoadWindow
from crossdock.types.step import DispatchMode, ForwardMode, PaddingMode, StepPlan, StepRecord


class Listener:
    def __init__(self) -> None:
        self.loads: list[tuple[str, tuple[float, ...]]] = []

    def on_load(self, forward_mode: str, balancedness_per_layer: tuple[float, ...]) -> None:
        self.loads.append((forward_mode, balancedness_per_layer))


def agreed(number: int, *, tokens: int = 4, probe: int = 0) -> AgreedStep:
    plan = StepPlan(
        step=number,
        eplb_pass=number,
        live_tokens=(tokens,),
        padded_tokens=(tokens,),
        padding_mode=PaddingMode.MAX_LEN,
        forward_mode=ForwardMode.DECODE,
        dispatch_mode=DispatchMode.NORMAL,
        overlap=False,
        overlap_reason="",
    )
    return AgreedStep(plan=plan, records=(StepRecord(num_tokens=tokens, is_health_check=probe),))


def reported(report: str, steps: list[AgreedStep]) -> tuple[list[dict[str, Any]], dict[str, float], Listener]:
    window = LoadWindow(2, 4, 2, torch.device("cpu"))
    window.push(torch.tensor([[3, 0, 1, 0], [2, 0, 1, 1]], dtype=torch.int32))
    gauges: dict[str, float] = {}
    listener = Listener()
    actor = LoadReport(
        window=window,
        world=local_comms().world,
        report=report,  # type: ignore[arg-type]
        every=2,
        gauges=gauges,
        observers=(listener,),  # type: ignore[arg-type]
    )
    with structlog.testing.capture_logs() as lines:
        for step in steps:
            actor.after_step(step)
            assert not actor.is_busy
    return [dict(line) for line in lines], gauges, listener


@pytest.mark.parametrize(("report", "logs", "measures"), [("log", 1, 0), ("prometheus", 0, 1), ("both", 1, 1)])
def test_it_reports_where_it_should_every_so_many_passes(report: str, logs: int, measures: int) -> None:
    lines, gauges, listener = reported(report, [agreed(0), agreed(1), agreed(2)])
    assert len(lines) == logs
    assert len(listener.loads) == measures
    if logs:
        assert lines[0]["mean_10"] == pytest.approx((2 / 3 + 1.0) / 2, abs=1e-4)
        assert lines[0]["worst_layer"] == pytest.approx(2 / 3, abs=1e-4)
    if measures:
        assert gauges["eplb_balancedness_1000"] == pytest.approx((2 / 3 + 1.0) / 2)
        assert listener.loads[0][0] == "decode"


def test_idle_steps_and_probes_do_not_bring_a_report_nearer() -> None:
    lines, _, _ = reported("log", [agreed(0), agreed(1, tokens=0), agreed(2, probe=1)])
    assert lines == []
