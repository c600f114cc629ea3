"""What a rank says about its machine before it joins the others."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs
import pytest
import structlog
from crossdock.config import Config, LaunchConfig
from crossdock.native_code import NativeCode
from crossdock.rank_plan import plan_rank
from crossdock.serving import rank_body

MISSING = NativeCode(library=None, reason="no C compiler found (cc, gcc, clang)")


def said(rank: int, device: Literal["cpu", "cuda"], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(rank_body, "native_code", lambda: MISSING)
    plan = plan_rank(Config(), 0)
    plan = attrs.evolve(
        plan,
        place=attrs.evolve(plan.place, rank=rank),
        config=attrs.evolve(plan.config, launch=LaunchConfig(device=device)),
    )
    with structlog.testing.capture_logs() as lines:
        rank_body.say_kernels(plan)
    return [str(line["event"]) for line in lines]


def test_absent_kernels_are_said_once_a_job_and_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = said(0, "cpu", monkeypatch)
    assert line == "compiled CPU kernels are absent, torch operators run instead and are slower"
    assert said(1, "cpu", monkeypatch) == []
    assert said(0, "cuda", monkeypatch) == []


@pytest.mark.parametrize(
    ("rank", "ranks_per_gpu", "has_daemon", "is_said"),
    [(0, 2, False, True), (0, 2, True, False), (1, 2, False, False), (0, 1, False, False)],
)
def test_a_shared_gpu_without_the_mps_daemon_is_said_once_a_job(
    rank: int, ranks_per_gpu: int, has_daemon: bool, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes = tmp_path / "mps"
    if has_daemon:
        pipes.mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    plan = plan_rank(Config(), 0)
    launch = LaunchConfig(device="cuda", ranks_per_gpu=ranks_per_gpu)
    plan = attrs.evolve(
        plan, place=attrs.evolve(plan.place, rank=rank), config=attrs.evolve(plan.config, launch=launch)
    )
    with structlog.testing.capture_logs() as lines:
        rank_body.say_shared_gpu(plan)
    assert [line["ranks_per_gpu"] for line in lines] == ([2] if is_said else [])
