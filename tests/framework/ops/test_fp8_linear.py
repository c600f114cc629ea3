"""Products with block-quantised weights: the kernel against the readable truth."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from crossdock.ops.fp8_block import quantise_blocks
from crossdock.ops.fp8_linear import (
    Fp8Linear,
    LinearTiles,
    block_product,
    fp8_linear_fused,
    has_block_product,
    padded_scale,
)
from crossdock.ops.fp8_linear_torch import fp8_linear_torch
from torch.nn import functional

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = LinearTiles(rows=16, columns=32, group=2, warps=4, stages=2)
EXACT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
"""Other orders of additions, and one rounding of the result."""
QUANTISED_TOLERANCE = 0.06
"""Norm of the error: rows of 3 bits; twice what random normal rows give, because the interpreter halves a few values near powers of two."""

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)


def case(num_rows: int, out_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight, scale = quantise_blocks(torch.randn(out_features, 256, generator=generator) / 16)
    rows = torch.randn(num_rows, 256, generator=generator).to(dtype)
    return rows.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "out_features"), [(0, 128), (1, 100), (17, 256), (33, 160)])
def test_rows_in_their_own_dtype_give_the_twins_result(num_rows: int, out_features: int, dtype: torch.dtype) -> None:
    rows, weight, scale = case(num_rows, out_features, dtype)
    got = fp8_linear_fused(rows, weight, scale, quantised=False, tiles=SMALL)
    want = fp8_linear_torch(rows, weight, scale)
    assert got.shape == want.shape
    assert torch.allclose(got.float(), want.float(), rtol=EXACT_TOLERANCE[dtype], atol=EXACT_TOLERANCE[dtype])


@needs_triton
@pytest.mark.parametrize(("num_rows", "out_features"), [(1, 128), (33, 160)])
def test_quantised_rows_give_the_twins_result_within_their_bits(num_rows: int, out_features: int) -> None:
    rows, weight, scale = case(num_rows, out_features, torch.float32)
    got = fp8_linear_fused(rows, weight, scale, quantised=True, tiles=SMALL)
    want = fp8_linear_torch(rows, weight, scale)
    assert float((got - want).norm() / want.norm()) <= QUANTISED_TOLERANCE


def test_scales_of_another_matrix_are_an_error_with_both_shapes() -> None:
    _, weight, scale = case(1, 256, torch.float32)
    with pytest.raises(ValueError, match=r"\(2, 2\), found \(1, 2\)"):
        Fp8Linear(weight, scale[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not has_block_product(DEVICE), reason="torch's block-scaled product needs a Hopper GPU")
@pytest.mark.parametrize("num_rows", [0, 1, 16, 17, 128, 500])
@pytest.mark.parametrize("out_features", [2112, 7168])
def test_any_number_of_rows_gives_the_twins_result_on_a_gpu(num_rows: int, out_features: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, scale = quantise_blocks(torch.randn(out_features, 1536, generator=generator) / 40)
    rows = torch.randn(num_rows, 1536, generator=generator).to(DEVICE, torch.bfloat16)
    weight, scale = weight.to(DEVICE), scale.to(DEVICE)
    bias = torch.randn(out_features, generator=generator).to(DEVICE, torch.bfloat16)
    got = Fp8Linear(weight, scale, bias)(rows).float() - bias.float()
    want = fp8_linear_torch(rows, weight, scale).float()
    assert got.shape == want.shape
    if num_rows:
        assert float((got - want).norm() / want.norm()) <= QUANTISED_TOLERANCE


def picky_scaled_mm(a: Any, b: Any, scale_a: Any, recipe_a: Any, scale_b: Any, recipe_b: Any) -> torch.Tensor:
    """torch's product by block with what it was seen to insist on, on an H200 with torch 2.11."""
    num_rows, width = a.shape
    blocks = -(-width // 128)
    assert (recipe_a, recipe_b) == (functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128)
    assert num_rows % 4 == 0
    assert (tuple(scale_a.shape), scale_a.stride()) == ((num_rows, blocks), (1, num_rows))
    assert tuple(scale_b.shape) == (-(-blocks // 4) * 4, -(-b.shape[1] // 128))
    rows = a.float() * scale_a.repeat_interleave(128, dim=1)
    return fp8_linear_torch(rows, b.t(), scale_b.t()[:, :blocks]).to(torch.bfloat16)


@pytest.mark.parametrize("num_rows", [1, 4, 17])
@pytest.mark.parametrize("width", [128, 640])
def test_torchs_product_gets_rows_by_fours_and_scales_as_it_wants_them(
    num_rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "scaled_mm", picky_scaled_mm)
    generator = torch.Generator().manual_seed(8)
    weight, scale = quantise_blocks(torch.randn(144, width, generator=generator) / width**0.5)
    rows = torch.randn(num_rows, width, generator=generator)
    got = block_product(rows, weight, padded_scale(scale))
    want = fp8_linear_torch(rows, weight, scale)
    assert got.shape == want.shape
    assert float((got.float() - want).norm() / want.norm()) <= QUANTISED_TOLERANCE
