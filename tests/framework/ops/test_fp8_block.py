"""Block quantisation: there and back, odd sizes, and slices that begin inside a block."""

from __future__ import annotations

import pytest
import torch
from crossdock.ops.fp8_block import BLOCK, dequantise_blocks, num_blocks, quantise_blocks

ROUNDING = 2**-4
"""Half a step of a 3-bit mantissa, relative to the value."""
SUBNORMAL = 2**-10
"""Half the smallest step of float8_e4m3fn."""


@pytest.mark.parametrize(("rows", "cols"), [(0, 5), (1, 1), (127, 129), (128, 128), (192, 320), (129, 64)])
def test_quantised_values_come_back_within_rounding(rows: int, cols: int) -> None:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols))
    quantised, scale = quantise_blocks(weight)
    assert quantised.dtype == torch.float8_e4m3fn
    assert scale.shape == (num_blocks(rows), num_blocks(cols))
    found = dequantise_blocks(quantised, scale, torch.float32)
    largest = float(scale.max()) if scale.numel() else 0.0
    assert bool(((found - weight).abs() <= weight.abs() * ROUNDING + largest * SUBNORMAL).all())


def test_every_element_takes_the_scale_of_its_own_block() -> None:
    weight = torch.ones(200, 300).to(torch.float8_e4m3fn)
    scale = torch.arange(6, dtype=torch.float32).view(2, 3)
    found = dequantise_blocks(weight, scale, torch.float32)
    for row, col in ((0, 0), (127, 127), (128, 128), (199, 299), (0, 256)):
        assert found[row, col] == scale[row // BLOCK, col // BLOCK]


@pytest.mark.parametrize(("rows", "cols"), [((0, 200), (0, 300)), ((100, 190), (250, 300)), ((128, 129), (5, 6))])
def test_a_slice_equals_the_slice_of_the_whole(rows: tuple[int, int], cols: tuple[int, int]) -> None:
    quantised, scale = quantise_blocks(torch.randn(200, 300, generator=torch.Generator().manual_seed(0)))
    whole = dequantise_blocks(quantised, scale, torch.float32)
    part = dequantise_blocks(
        quantised[slice(*rows), slice(*cols)],
        scale[rows[0] // BLOCK : num_blocks(rows[1]), cols[0] // BLOCK : num_blocks(cols[1])],
        torch.float32,
        rows[0] % BLOCK,
        cols[0] % BLOCK,
    )
    assert torch.equal(part, whole[slice(*rows), slice(*cols)])


def test_an_all_zero_block_stays_zero() -> None:
    quantised, scale = quantise_blocks(torch.zeros(10, 10))
    assert bool((dequantise_blocks(quantised, scale, torch.bfloat16) == 0).all())


def test_scales_of_another_slice_are_refused() -> None:
    with pytest.raises(ValueError, match="needs scales"):
        dequantise_blocks(torch.zeros(130, 10).to(torch.float8_e4m3fn), torch.ones(1, 1), torch.float32)
