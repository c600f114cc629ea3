"""Feeds an engine one workload after another and notes when tokens came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
from crossdock.batch_build import HostBatch
from crossdock.engine_seams import InFlight
from crossdock.scheduled import Scheduled, StepTokens
from crossdock.step_work import StepWork
from crossdock.types.link import AddRequests, Incoming, Outgoing, Outputs, Parked, Stop, Wake
from crossdock.types.request import EngineRequest, SamplingParams
from crossdock.types.step import StepPlan


@attrs.frozen(kw_only=True)
class Workload:
    """Equal requests that are there from the start: greedy, ends ignored."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int

    def requests(self) -> tuple[EngineRequest, ...]:
        sampling = SamplingParams(max_new_tokens=self.new_tokens, temperature=0.0, ignore_eos=True)
        return tuple(
            EngineRequest(rid=f"{self.name}-{i}", prompt_ids=prompt, sampling=sampling)
            for i, prompt in enumerate(self.prompts)
        )


def random_workload(name: str, count: int, length: int, new_tokens: int, vocab: int, seed: int) -> Workload:
    """``count`` prompts of random tokens."""
    prompts = np.random.default_rng(seed).integers(0, vocab, (count, length)).tolist()
    return Workload(name=name, prompts=tuple(tuple(prompt) for prompt in prompts), new_tokens=new_tokens)


class BenchLink:
    """A ``RankLink``; a rank without requests (an attention-TP peer) has no workloads."""

    def __init__(
        self,
        workloads: Sequence[Workload],
        on_begin: Callable[[str], None],
        on_result: Callable[[str, dict[str, float]], None],
    ) -> None:
        self._workloads = list(workloads)
        self._on_begin = on_begin
        self._on_result = on_result
        self._running: set[str] = set()
        self._parked: int | None = None
        self._arrivals: list[tuple[float, str, int]] = []
        self._name, self._begun_s = "", 0.0

    def poll(self, timeout_s: float | None) -> Sequence[Incoming]:
        if self._running:
            return ()
        wake = [] if self._parked is None else [Wake(step=self._parked)]
        self._parked = None
        if not self._workloads:
            return [*wake, Stop()]
        workload = self._workloads.pop(0)
        requests = workload.requests()
        self._name, self._running = workload.name, {request.rid for request in requests}
        self._arrivals.clear()
        self._on_begin(self._name)
        self._begun_s = time.perf_counter()
        return [*wake, AddRequests(requests=requests)]

    def send(self, message: Outgoing) -> None:
        if isinstance(message, Parked):
            self._parked = message.step
        if not isinstance(message, Outputs):
            return
        now_s = time.perf_counter()
        for output in message.outputs:
            assert output.error is None, output.error
            self._arrivals.append((now_s, output.rid, len(output.token_ids)))
            if output.finish_reason is not None:
                self._running.discard(output.rid)
        if not self._running and self._arrivals:
            self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        first: dict[str, float] = {}
        for at_s, rid, _ in self._arrivals:
            first.setdefault(rid, at_s)
        all_started_s = max(first.values())
        after = sum(count for at_s, _, count in self._arrivals if at_s > all_started_s)
        result = {
            "decode_tok_s": after / max(now_s - all_started_s, 1e-9),
            "first_token_ms": (min(first.values()) - self._begun_s) * 1e3,
            "total_s": now_s - self._begun_s,
        }
        self._on_result(self._name, result)


class TimedRunner:
    """A ``StepRunner`` that times another's steps on both sides: how long the host waits for the device, and how long the device computes."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._ended_s = 0.0
        self._steps: list[tuple[float, float, float]] = []

    @property
    def recorder(self) -> Any:
        return self._runner.recorder

    @property
    def executor(self) -> Any:
        return self._runner.executor

    def build(self, work: StepWork, plan: StepPlan) -> HostBatch:
        batch: HostBatch = self._runner.build(work, plan)
        return batch

    def launch(self, plan: StepPlan, batch: HostBatch, scheduled: Scheduled | None, *, is_counted: bool) -> InFlight:
        self._runner.timeline.times_passes = True
        in_flight: InFlight = self._runner.launch(plan, batch, scheduled, is_counted=is_counted)
        return in_flight

    def collect(self, in_flight: InFlight) -> StepTokens:
        before_s = time.perf_counter()
        tokens: StepTokens = self._runner.collect(in_flight)
        now_s = time.perf_counter()
        self._steps.append((now_s - self._ended_s, now_s - before_s, self._runner.timeline.last_pass.seconds()))
        self._ended_s = now_s
        return tokens

    def take(self) -> dict[str, float]:
        """Medians in milliseconds since the last call, the first step left out."""
        steps, self._steps = self._steps[1:], []
        if not steps:
            return {}
        wall, waited, device = (sorted(column)[len(column) // 2] * 1e3 for column in zip(*steps, strict=True))
        return {
            "step_ms": round(wall, 3),
            "device_ms": round(device, 3),
            "host_ms": round(wall - waited, 3),
            "device_idle_ms": round(wall - device, 3),
        }
