"""Norm and gated activation against their formulas."""

from __future__ import annotations

import pytest
import torch
from crossdock.ops.rms_norm import rms_norm
from crossdock.ops.swiglu import swiglu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""bf16: two roundings of values up to 4."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("has_weight", [False, True])
def test_the_norm_divides_by_the_root_mean_square(dtype: torch.dtype, rows: int, has_weight: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3, 24, generator=generator).to(dtype)[:, :2]
    weight = torch.randn(24, generator=generator).to(dtype) if has_weight else None
    wide = x.double()
    wanted = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    wanted = wanted * weight.double() if weight is not None else wanted
    found = rms_norm(x, weight, 1e-3)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        rms_norm(torch.zeros(2, 8), torch.ones(4), 1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_swiglu_is_silu_of_the_first_half_times_the_second(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 20, generator=torch.Generator().manual_seed(rows)).to(dtype)
    before = x.clone()
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(
        swiglu(x).double(), gate / (1 + (-gate).exp()) * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert torch.equal(x, before)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="odd"):
        swiglu(torch.zeros(1, 3))
