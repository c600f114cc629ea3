"""Products of many rows an expert on Hopper: against the torch twins, with every mix of whole, half and missing blocks."""

from __future__ import annotations

import attrs
import pytest
import torch
from crossdock.ops.fp8_block import quantise_blocks
from crossdock.ops.fp8_block_torch import dequantise_blocks_torch
from crossdock.ops.quantise_rows import quantise_rows
from crossdock_models.experts.triton.kernels.fp8_products_torch import fp8_swiglu_torch
from crossdock_models.experts.triton.kernels.grouped_swiglu import grouped_swiglu
from crossdock_models.experts.triton.kernels.grouped_swiglu_torch import grouped_swiglu_torch
from crossdock_models.experts.triton.kernels.grouped_weights import GroupedWeights
from crossdock_models.experts.triton.kernels.hopper_products import (
    Factor,
    hopper_products,
    is_hopper,
    takes_hopper,
)
from crossdock_models.experts.triton.kernels.sum_choices import sum_choices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not is_hopper(0), reason="needs a GPU of compute capability 9"),
]

EXPERTS, HIDDEN, INNER = 5, 512, 384
BF16_TOLERANCE = 5e-3
"""Norm: activated rows, parts and the sum are rounded to bf16 once each."""
FP8_TOLERANCE = 2e-2
"""Norm: numbers between two float8 neighbours fall to either side."""


@attrs.frozen(kw_only=True, eq=False)
class Weights:
    """One form of both matrices, and what they stand for."""

    gate_up: Factor
    down: Factor
    plain_gate_up: torch.Tensor
    plain_down: torch.Tensor


def make_weights(form: str) -> Weights:
    """``bf16``, or ``fp8`` with scales that differ between blocks."""
    generator = torch.Generator().manual_seed(3)
    factors: list[Factor] = []
    plain: list[torch.Tensor] = []
    for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        blocks = 10.0 ** (0.5 - torch.rand(EXPERTS, rows // 128, columns // 128, generator=generator))
        spread = blocks.repeat_interleave(128, 1).repeat_interleave(128, 2) / columns**0.5
        matrices = torch.randn(EXPERTS, rows, columns, generator=generator) * spread
        if form == "bf16":
            factors.append(Factor(values=matrices.cuda().to(torch.bfloat16)))
            plain.append(factors[-1].values.float())
            continue
        pairs = [quantise_blocks(matrix) for matrix in matrices]
        values = torch.stack([weight.view(torch.uint8) for weight, _ in pairs]).view(torch.float8_e4m3fn)
        factors.append(Factor(values=values.cuda(), scales=torch.stack([scale for _, scale in pairs]).cuda()))
        plain.append(torch.stack([dequantise_blocks_torch(*pair, torch.float32, 0, 0) for pair in pairs]).cuda())
    return Weights(gate_up=factors[0], down=factors[1], plain_gate_up=plain[0], plain_down=plain[1])


def routing(counts: list[int]) -> torch.Tensor:
    """One choice a row: ``counts`` rows of each expert and some that stay elsewhere, shuffled."""
    ids = torch.cat([torch.full((count,), expert) for expert, count in enumerate(counts)] + [torch.full((9,), -1)])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].view(-1, 1).cuda()


COUNTS = {
    "nowhere": [0, 0, 0, 0, 0],
    "one row": [0, 0, 1, 0, 0],
    "only half blocks": [64, 1, 0, 63, 5],
    "whole and half": [128, 127, 129, 192, 193],
    "many of one expert": [0, 9000, 0, 0, 0],
    "many": [1000, 999, 1500, 64, 65],
}


@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("sm_budget", [None, 3])
def test_many_rows_on_hopper_agree_with_the_twin(form: str, counts: list[int], sm_budget: int | None) -> None:
    weights, ids = make_weights(form), routing(counts)
    row_weights = torch.rand(ids.shape, device="cuda")
    rows = torch.randn(len(ids), HIDDEN, device="cuda", dtype=torch.bfloat16)
    left = Factor(values=rows)
    if form == "fp8":
        payload, scales = quantise_rows(rows)
        left = Factor(values=payload, scales=scales)
    twin, tolerance = (fp8_swiglu_torch, FP8_TOLERANCE) if form == "fp8" else (grouped_swiglu_torch, BF16_TOLERANCE)
    want = twin(rows.float(), ids, row_weights, weights.plain_gate_up, weights.plain_down)
    results: list[torch.Tensor] = []
    for _ in range(2):
        parts, order = hopper_products(left, ids, weights.gate_up, weights.down, torch.bfloat16, sm_budget)
        results.append(sum_choices(parts, order, row_weights))
    assert torch.equal(results[0], results[1])
    assert float((results[0].float() - want).norm()) <= tolerance * float(want.norm())


def test_sizes_that_fill_no_tiles_take_another_way() -> None:
    weight = torch.empty(1, 256, 128, device="cuda", dtype=torch.bfloat16)
    assert takes_hopper(weight, 256, 128)
    assert not takes_hopper(weight, 384, 128)
    assert not takes_hopper(weight, 256, 192)
    assert not takes_hopper(weight.float(), 256, 128)


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_a_captured_call_gives_the_same_bits_for_new_rows(form: str) -> None:
    weights = make_weights(form)
    experts = GroupedWeights(
        gate_up=weights.gate_up.values,
        down=weights.down.values,
        gate_up_scale=weights.gate_up.scales,
        down_scale=weights.down.scales,
    )
    ids, row_weights = routing([200, 300, 10, 0, 400]), torch.rand(919, 1, device="cuda")
    rows = torch.randn(919, HIDDEN, device="cuda", dtype=torch.bfloat16)
    grouped_swiglu(rows, ids, row_weights, experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_swiglu(rows, ids, row_weights, experts)
    rows.copy_(torch.randn_like(rows))
    ids.copy_(ids.flip(0))
    graph.replay()
    assert torch.equal(out, grouped_swiglu(rows, ids, row_weights, experts))
