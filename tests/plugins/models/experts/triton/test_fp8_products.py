"""The Triton experts' products in float8 against their torch twin: interpreted where there is no GPU, compiled where there is one."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from crossdock.ops.fp8_block import quantise_blocks
from crossdock.ops.fp8_block_torch import FP8_MAX, dequantise_blocks_torch
from crossdock.ops.quantise_rows import quantise_rows
from crossdock_models.experts.triton.kernels.block_order import block_order
from crossdock_models.experts.triton.kernels.fp8_products import (
    FEW_FP8,
    LARGE_FP8,
    MANY_FP8,
    Fp8Tiles,
    choose_fp8_tiles,
    fp8_down,
    fp8_gate_up,
)
from crossdock_models.experts.triton.kernels.fp8_products_torch import dequantised_rows, fp8_swiglu_torch
from crossdock_models.experts.triton.kernels.fp8_swiglu import fp8_swiglu
from crossdock_models.experts.triton.kernels.grouped_swiglu_torch import grouped_swiglu_torch
from crossdock_models.experts.triton.kernels.grouped_weights import GroupedWeights

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP32_TOLERANCE = 2e-5
"""The same products of the same float8 numbers in another order of summation."""
DEVICE_TOLERANCE = 1e-3
"""Tensor cores keep fewer bits while they sum float8 products."""
FLOAT8_STEP = 2.0**-4 + DEVICE_TOLERANCE
"""Half of what lies between neighbours of float8_e4m3fn."""
SMALLEST = 2.0**-9
"""Smallest float8_e4m3fn above zero."""
TWIN_TOLERANCE = 2e-2
"""Norm: numbers between two float8 neighbours fall to either side, and the result is rounded to bf16."""
FLOAT32_TOLERANCE = 5e-2
"""Norm, against weights dequantised and rows left alone: rows and activations carry three bits behind the point."""
SIZES = {"hidden": 384, "inner": 256, "experts": 3, "top_k": 2}
TILES = [
    Fp8Tiles(rows=16, gate_warps=4, gate_stages=1, down_warps=4, down_stages=1, group=2),
    Fp8Tiles(rows=64, gate_warps=4, gate_stages=1, down_warps=4, down_stages=1, group=2),
    Fp8Tiles(rows=128, gate_warps=8, gate_stages=1, down_warps=8, down_stages=1, group=1, halves=True),
]


def routing(rows: int, kind: str) -> torch.Tensor:
    """Local ids [rows, K] with -1 for choices elsewhere."""
    experts, top_k = SIZES["experts"], SIZES["top_k"]
    generator = torch.Generator().manual_seed(rows)
    chosen = [torch.randperm(experts + 1, generator=generator)[:top_k] for _ in range(rows)]
    ids = torch.stack(chosen) if rows else torch.empty(0, top_k, dtype=torch.int64)
    ids = torch.where(ids >= experts, -1, ids)
    if kind != "random":
        ids = torch.full_like(ids, -1)
    if kind == "one_expert":
        ids[:, 0] = experts - 1
    return ids.to(DEVICE)


def make_weights() -> tuple[GroupedWeights, torch.Tensor, torch.Tensor]:
    """Weights in float8, and the same dequantised; scales of experts and blocks differ by up to 30x."""
    generator = torch.Generator().manual_seed(7)
    made: list[torch.Tensor] = []
    plain: list[torch.Tensor] = []
    for rows, columns in ((2 * SIZES["inner"], SIZES["hidden"]), (SIZES["hidden"], SIZES["inner"])):
        blocks = 10.0 ** (0.5 - 1.5 * torch.rand(SIZES["experts"], rows // 128, columns // 128, generator=generator))
        factors = blocks.repeat_interleave(128, 1).repeat_interleave(128, 2) / columns**0.5
        matrices = torch.randn(SIZES["experts"], rows, columns, generator=generator) * factors
        pairs = [quantise_blocks(matrix) for matrix in matrices]
        plain.append(torch.stack([dequantise_blocks_torch(*pair, torch.float32, 0, 0) for pair in pairs]).to(DEVICE))
        made.append(torch.stack([weight.view(torch.uint8) for weight, _ in pairs]).view(torch.float8_e4m3fn).to(DEVICE))
        made.append(torch.stack([scale for _, scale in pairs]).to(DEVICE))
    gate_up, gate_up_scale, down, down_scale = made
    weights = GroupedWeights(gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale)
    return weights, plain[0], plain[1]


def hidden_rows(rows: int) -> torch.Tensor:
    """[rows, H] float32, every block of 128 elements of its own size."""
    generator = torch.Generator().manual_seed(rows + 1)
    factors = 10.0 ** torch.rand(rows, SIZES["hidden"] // 128, generator=generator)
    return (torch.randn(rows, SIZES["hidden"], generator=generator) * factors.repeat_interleave(128, 1)).to(DEVICE)


def stood_in(payload: torch.Tensor) -> torch.Tensor:
    """The same numbers in float32 where kernels are interpreted: the interpreter's own conversion to float8 is wrong where a number rounds up to a power of two."""
    return payload if DEVICE.type == "cuda" else payload.float()


@pytest.mark.parametrize("tiles", TILES, ids=["turned around", "64 rows", "128 rows and halves"])
@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize("kind", ["random", "one_expert", "nowhere"])
@pytest.mark.parametrize("sm_budget", [None, 1])
def test_each_product_in_float8_agrees_with_its_twin(
    tiles: Fp8Tiles, rows: int, kind: str, sm_budget: int | None
) -> None:
    weights, gate_up, down = make_weights()
    ids = routing(rows, kind)
    payload, scales = quantise_rows(hidden_rows(rows))
    order = block_order(ids, SIZES["experts"], tiles.rows, tiles.halves)
    is_here = ids.flatten() >= 0
    live, expert = order.places.long()[is_here], ids.flatten()[is_here]
    row = torch.arange(rows, device=DEVICE).repeat_interleave(SIZES["top_k"])[is_here]
    assert weights.gate_up_scale is not None
    assert weights.down_scale is not None
    # gate and up of every pair
    activated, activated_scales = fp8_gate_up(
        stood_in(payload),
        scales,
        SIZES["top_k"],
        order,
        stood_in(weights.gate_up),
        weights.gate_up_scale,
        tiles,
        sm_budget,
    )
    both = torch.einsum("ph,pnh->pn", dequantised_rows(payload, scales)[row], gate_up[expert])
    want = torch.nn.functional.silu(both[:, : SIZES["inner"]]) * both[:, SIZES["inner"] :]
    want_payload, want_scales = quantise_rows(want)
    is_device = DEVICE.type == "cuda"
    tolerance, rounding = (DEVICE_TOLERANCE, FLOAT8_STEP) if is_device else (FP32_TOLERANCE, FP32_TOLERANCE)
    torch.testing.assert_close(activated_scales[live], want_scales, rtol=tolerance, atol=0)
    got = dequantised_rows(activated[live], activated_scales[live])
    largest = want_scales.repeat_interleave(128, 1) * FP8_MAX
    smallest = largest * tolerance + (largest / FP8_MAX * SMALLEST if is_device else 0)
    assert bool(((got - want).abs() <= rounding * want.abs() + smallest).all())
    # down of the twin's activations
    placed = torch.zeros(activated.shape, dtype=torch.uint8, device=DEVICE)
    placed[live] = want_payload.view(torch.uint8)
    activated_scales[live] = want_scales
    parts = fp8_down(
        stood_in(placed.view(torch.float8_e4m3fn)),
        activated_scales,
        order,
        stood_in(weights.down),
        weights.down_scale,
        tiles,
        torch.float32,
        sm_budget,
    )
    want = torch.einsum("pi,phi->ph", dequantised_rows(want_payload, want_scales), down[expert])
    assert bool(((parts[live] - want).abs() <= tolerance * want.abs().amax(dim=1, keepdim=True)).all())


def test_rows_an_expert_choose_the_tile() -> None:
    chosen = [choose_fp8_tiles(rows) for rows in (0.1, 12, 13, 96, 97, 5000)]
    assert chosen == [FEW_FP8, FEW_FP8, MANY_FP8, MANY_FP8, LARGE_FP8, LARGE_FP8]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 24, 70, 400])
@pytest.mark.parametrize("come_quantised", [False, True])
def test_experts_in_float8_agree_with_twin_and_float32_on_the_device(rows: int, come_quantised: bool) -> None:
    weights, gate_up, down = make_weights()
    ids = routing(rows, "random")
    row_weights = torch.rand(rows, SIZES["top_k"], device=DEVICE)
    x = hidden_rows(rows).to(torch.bfloat16)
    got = fp8_swiglu(*(quantise_rows(x) if come_quantised else (x, None)), ids, row_weights, weights).float()
    twin = fp8_swiglu_torch(x.float(), ids, row_weights, gate_up, down)
    exact = grouped_swiglu_torch(x, ids, row_weights, gate_up, down)
    assert float((got - twin).norm()) <= TWIN_TOLERANCE * float(twin.norm())
    # What float8 loses of this draw: of a single row up to a tenth more than the bound, in the twin too.
    lost = float((twin - exact).norm())
    assert float((got - exact).norm()) <= 1.05 * lost
    assert rows == 1 or lost <= FLOAT32_TOLERANCE * float(exact.norm())
