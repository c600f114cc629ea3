"""The stored matrix product in all its forms against float64."""

from __future__ import annotations

import pytest
import torch
from crossdock.ops.packed_linear import FEW_ROWS, PackedLinear

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2}
"""Sums of 64 products of unit normals; bf16 rounds a result of about 20 to 0.06."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, FEW_ROWS, FEW_ROWS + 1, 70])
@pytest.mark.parametrize("shape", [(96, 64), (7, 10), (0, 64), (5, 0)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_right(dtype: torch.dtype, rows: int, shape: tuple[int, int], has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if has_bias else None
    x = torch.randn(rows, 2 * shape[1], generator=generator).to(dtype)[:, : shape[1]]
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = PackedLinear(weight, bias)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(PackedLinear(weight, bias).in_float32(x), found.float())
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=0)


def test_a_bias_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        PackedLinear(torch.zeros(4, 3), torch.zeros(3))
