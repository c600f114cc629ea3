"""The conformance kit for experts on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from crossdock.testing.conformance import Check, Outcome, PluginCase, run_check
from crossdock.testing.experts_conformance import CHECKS
from crossdock.testing.world import RankPool

CASES = [
    pytest.param(
        "deep_gemm",
        {"masked_rows": masked_rows},
        id=f"deep_gemm-masked-{masked_rows}",
        marks=pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="deep_gemm is not installed"),
    )
    for masked_rows in (256, 0)
]
CASES += [pytest.param("triton", {}, id="triton"), pytest.param("torch", {}, id="torch")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_experts_conform_on_a_gpu(
    name: str, options: dict[str, object], check: Check, rank_pool: Callable[[int], RankPool]
) -> None:
    case = PluginCase(point="experts", name=name, options=options, pool_of=rank_pool, device="cuda")
    result = run_check(check, case)
    if result.outcome is Outcome.NOT_CHECKED:
        pytest.skip(result.message)
    assert result.outcome is Outcome.PASSED, result.message
