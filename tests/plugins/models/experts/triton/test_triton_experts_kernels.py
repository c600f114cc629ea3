"""The Triton experts' kernels against their torch twins: interpreted where there is no GPU (fp32 only), compiled where there is one."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from crossdock_models.experts.triton.kernels.block_order import block_order, max_blocks
from crossdock_models.experts.triton.kernels.block_order_torch import block_order_torch
from crossdock_models.experts.triton.kernels.few_rows import MOST_ROWS, FewTile, are_few, few_rows_swiglu
from crossdock_models.experts.triton.kernels.grouped_large import LargeTiles, large_down, large_gate_up
from crossdock_models.experts.triton.kernels.grouped_swiglu import grouped_swiglu
from crossdock_models.experts.triton.kernels.grouped_swiglu_torch import grouped_swiglu_torch
from crossdock_models.experts.triton.kernels.grouped_weights import GroupedWeights
from crossdock_models.experts.triton.kernels.sum_choices import sum_choices
from crossdock_models.experts.triton.kernels.tiles import FEW, LARGE, MANY, SOME, Tiles

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
FP32_TOLERANCE = 2e-5
"""Two chained products of a few hundred terms in another order of summation."""
BF16_TOLERANCE = 2e-2
"""The activated rows and the parts are rounded to bf16 once each."""
SMALL = Tiles(
    rows=16,
    gate_columns=16,
    down_columns=32,
    inner=16,
    group=2,
    gate_warps=4,
    gate_stages=1,
    down_warps=4,
    down_stages=1,
)
"""Small tiles keep the interpreter quick and leave remainders in every direction."""


def routing(rows: int, experts: int, top_k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Local ids with -1 for choices elsewhere, and weights."""
    generator = torch.Generator().manual_seed(rows + experts)
    ids = torch.empty(rows, top_k, dtype=torch.int64)
    for row in ids:
        row.copy_(torch.randperm(experts + 2, generator=generator)[:top_k])
    ids = torch.where(ids >= experts, -1, ids)
    if kind == "one_expert":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = experts - 1
    elif kind == "nowhere":
        ids = torch.full_like(ids, -1)
    return ids.to(DEVICE), torch.rand(rows, top_k, generator=generator).to(DEVICE)


def assert_ordered(ids: torch.Tensor, num_experts: int, block_rows: int, halves: bool) -> None:
    """The order of the kernels is that of the twin."""
    order = block_order(ids, num_experts, block_rows, halves)
    blocks = max_blocks(ids.numel(), num_experts, block_rows)
    pairs, experts, places = block_order_torch(ids, num_experts, block_rows, blocks, halves)
    filled = (pairs.view(blocks, block_rows) < ids.numel()).sum(dim=1)
    assert torch.equal(order.pairs, pairs)
    assert torch.equal(order.places, places)
    assert torch.equal(order.block_experts, experts)
    assert order.num_blocks.tolist() == [
        int((filled > 0).sum()),
        int((filled > (block_rows // 2 if halves else 0)).sum()),
    ]


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 50])
@pytest.mark.parametrize("kind", ["random", "one_expert", "nowhere"])
@pytest.mark.parametrize("halves", [False, True])
def test_pairs_are_ordered_by_expert_in_whole_blocks(rows: int, kind: str, halves: bool) -> None:
    assert_ordered(routing(rows, 5, 3, kind)[0], 5, 16, halves)


@pytest.mark.parametrize("sm_budget", [None, 2])
@pytest.mark.parametrize("rows", [0, 1, 9, 17])
@pytest.mark.parametrize("kind", ["random", "one_expert", "nowhere"])
def test_rows_come_back_as_the_weighted_sum_of_their_experts(rows: int, kind: str, sm_budget: int | None) -> None:
    ids, weights = routing(rows, 3, 2, kind)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 40, generator=generator).to(DEVICE)
    experts = GroupedWeights(
        gate_up=(torch.randn(3, 2 * 24, 40, generator=generator) / 40**0.5).to(DEVICE),
        down=(torch.randn(3, 40, 24, generator=generator) / 24**0.5).to(DEVICE),
    )
    if DEVICE.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    got = grouped_swiglu(x, ids, weights, experts, SMALL, sm_budget)
    want = grouped_swiglu_torch(x, ids, weights, experts.gate_up, experts.down)
    tolerance = FP32_TOLERANCE if DEVICE.type == "cpu" else BF16_TOLERANCE  # Triton's fp32 dot is tf32 on a device
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("kind", ["random", "one_expert", "nowhere"])
def test_a_few_rows_need_no_order(rows: int, kind: str) -> None:
    ids, weights = routing(rows, 3, 2, kind)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 40, generator=generator).to(DEVICE)
    gate_up = (torch.randn(3, 2 * 24, 40, generator=generator) / 40**0.5).to(DEVICE)
    down = (torch.randn(3, 40, 24, generator=generator) / 24**0.5).to(DEVICE)
    tile = FewTile(gate_columns=16, gate_inner=32, gate_warps=4, down_columns=16, down_inner=16, down_warps=4)
    got = few_rows_swiglu(x, ids, weights, gate_up, down, tile)
    want = grouped_swiglu_torch(x, ids, weights, gate_up, down)
    torch.testing.assert_close(got, want, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


def test_one_row_of_many_experts_takes_the_unordered_way_to_the_same_sum() -> None:
    ids, weights = routing(1, 16, 3, "random")
    assert are_few(ids, 16)
    assert not are_few(ids, 11)
    assert not are_few(ids.expand(MOST_ROWS + 1, -1), 1000)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 40, generator=generator).to(DEVICE)
    experts = GroupedWeights(
        gate_up=(torch.randn(16, 2 * 24, 40, generator=generator) / 40**0.5).to(DEVICE),
        down=(torch.randn(16, 40, 24, generator=generator) / 24**0.5).to(DEVICE),
    )
    want = grouped_swiglu_torch(x, ids, weights, experts.gate_up, experts.down)
    got = grouped_swiglu(x, ids, weights, experts)
    torch.testing.assert_close(got, want, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("sm_budget", [None, 1])
def test_programs_that_walk_over_tiles_give_the_same_rows(rows: int, sm_budget: int | None) -> None:
    """An inner size that no column tile divides: what a descriptor brings from past the end is not stored."""
    ids, weights = routing(rows, 3, 2, "random")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 64, generator=generator).to(DEVICE, DTYPE)
    experts = GroupedWeights(
        gate_up=(torch.randn(3, 2 * 48, 64, generator=generator) / 8).to(DEVICE, DTYPE),
        down=(torch.randn(3, 64, 48, generator=generator) / 7).to(DEVICE, DTYPE),
    )
    tiles = LargeTiles(rows=32, gate_columns=32, down_columns=64, inner=16, group=2, warps=4)
    order = block_order(ids, 3, tiles.rows, halves=True)
    activated = large_gate_up(x, 2, order, experts.gate_up, tiles, sm_budget)
    got = sum_choices(large_down(activated, order, experts.down, tiles, sm_budget), order, weights)
    want = grouped_swiglu_torch(x, ids, weights, experts.gate_up, experts.down)
    tolerance = FP32_TOLERANCE if DEVICE.type == "cpu" else BF16_TOLERANCE
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_experts", [5, 8, 19])
@pytest.mark.parametrize("halves", [False, True])
def test_pairs_of_several_segments_keep_the_input_order(num_experts: int, halves: bool) -> None:
    """More pairs than every program counts by itself; more segments than experts and fewer."""
    assert_ordered(routing(900, num_experts, 3, "random")[0], num_experts, 16, halves)


def test_fp8_weights_are_read_with_the_scale_of_their_block() -> None:
    """Scales that differ by 100x between experts and blocks: one read from a neighbour would show."""
    generator = torch.Generator().manual_seed(4)
    hidden_size, inner_size = 256, 192
    shape = {"gate_up": (2, 2 * inner_size, hidden_size), "down": (2, hidden_size, inner_size)}
    quantised = {
        # Small integers: float8 holds them exactly, in the interpreter too.
        name: torch.randint(-3, 4, size, generator=generator).float().to(torch.float8_e4m3fn)
        for name, size in shape.items()
    }
    scales = {
        "gate_up": 10.0 ** (-3 + 2 * torch.rand(2, 4, 2, generator=generator)),
        "down": 10.0 ** (-3 + 2 * torch.rand(2, 2, 2, generator=generator)),
    }
    expanded_gate = scales["gate_up"].repeat_interleave(128, 2)
    expanded_gate = torch.cat(
        [half.repeat_interleave(128, 1)[:, :inner_size] for half in expanded_gate.chunk(2, dim=1)], dim=1
    )
    expanded_down = scales["down"].repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :, :inner_size]
    experts = GroupedWeights(
        gate_up=quantised["gate_up"].to(DEVICE),
        down=quantised["down"].to(DEVICE),
        gate_up_scale=scales["gate_up"].contiguous().to(DEVICE),
        down_scale=scales["down"].contiguous().to(DEVICE),
    )
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    ids, weights = routing(5, 2, 2, "random")
    x = torch.randn(5, hidden_size, generator=generator).to(DEVICE, dtype)
    tiles = Tiles(
        rows=16,
        gate_columns=64,
        down_columns=64,
        inner=128,
        group=1,
        gate_warps=4,
        gate_stages=1,
        down_warps=4,
        down_stages=1,
    )
    got = grouped_swiglu(x, ids, weights, experts, tiles).float()
    gate_up = quantised["gate_up"].float() * expanded_gate
    down = quantised["down"].float() * expanded_down
    want = grouped_swiglu_torch(x, ids, weights, gate_up.to(DEVICE), down.to(DEVICE))
    tolerance = FP32_TOLERANCE if DEVICE.type == "cpu" else BF16_TOLERANCE
    assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [FEW, SOME, MANY, LARGE, None])
@pytest.mark.parametrize("rows", [1, 32, 127, 512])
def test_every_tile_of_the_table_is_right_on_the_device(tiles: Tiles | None, rows: int) -> None:
    ids, weights = routing(rows, 16, 4, "random")
    x = torch.randn(rows, 1024, device=DEVICE).to(torch.bfloat16)
    experts = GroupedWeights(
        gate_up=(torch.randn(16, 2 * 768, 1024, device=DEVICE) / 32).to(torch.bfloat16),
        down=(torch.randn(16, 1024, 768, device=DEVICE) / 28).to(torch.bfloat16),
    )
    got = grouped_swiglu(x, ids, weights, experts, tiles).float()
    want = grouped_swiglu_torch(x, ids, weights, experts.gate_up, experts.down)
    assert float((got - want).abs().max()) <= BF16_TOLERANCE * float(want.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 64, 300])
def test_float32_fits_into_shared_memory_at_every_number_of_rows_an_expert(rows: int) -> None:
    ids, weights = routing(rows, 4, 2, "random")
    x = torch.randn(rows, 256, device=DEVICE)
    experts = GroupedWeights(
        gate_up=torch.randn(4, 2 * 192, 256, device=DEVICE) / 16, down=torch.randn(4, 256, 192, device=DEVICE) / 14
    )
    got = grouped_swiglu(x, ids, weights, experts)
    want = grouped_swiglu_torch(x, ids, weights, experts.gate_up, experts.down)
    torch.testing.assert_close(got, want, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)
