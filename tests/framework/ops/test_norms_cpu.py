"""The C kernels for norms and rotations against float64."""

from __future__ import annotations

import pytest
import torch
from crossdock.native_code import native_code
from crossdock.ops.add_rms_norm import add_rms_norm
from crossdock.ops.norm_rotate import norm_rotate
from crossdock.ops.norms_cpu import add_rms_norm_cpu, norm_rotate_cpu, rms_norm_cpu, takes

pytestmark = pytest.mark.skipif(native_code().library is None, reason=native_code().reason)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""bf16: two roundings of values up to 6."""
EPS = 1e-3


def norm(rows: torch.Tensor) -> torch.Tensor:
    wide = rows.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def check(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dim", [16, 48, 512])
def test_addition_and_norm_of_strided_rows(dtype: torch.dtype, rows: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randn(3, rows, 2 * dim, generator=generator).to(dtype)
    residual, update, weight = wide[0, :, :dim], wide[1, :, dim:], torch.randn(dim, generator=generator).to(dtype)
    before = residual.clone()
    total, normed = add_rms_norm_cpu(residual, update, weight, EPS)
    assert torch.equal(total, residual + update)
    check(normed, norm(total) * weight.double(), dtype)
    check(rms_norm_cpu(residual, None, EPS), norm(residual), dtype)
    check(rms_norm_cpu(residual, weight, EPS), norm(residual) * weight.double(), dtype)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("has_norm", [False, True])
def test_norm_and_rotation_of_strided_heads(dtype: torch.dtype, rows: int, has_norm: bool) -> None:
    heads, dim = 3, 32
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, heads + 2, dim, generator=generator).to(dtype)[:, 1 : heads + 1]
    weight = torch.randn(heads, dim, generator=generator).to(dtype) if has_norm else None
    angles = torch.randn(rows, 1, dim // 2, generator=generator)
    rotation = torch.polar(torch.full_like(angles, 1.3), angles)
    wanted = x.double() if weight is None else norm(x) * weight.double()
    pairs = torch.view_as_complex(wanted.unflatten(-1, (-1, 2)).contiguous()) * rotation.to(torch.complex128)
    check(norm_rotate_cpu(x, weight, EPS, rotation), torch.view_as_real(pairs).flatten(-2), dtype)


def test_other_sizes_and_mixed_dtypes_go_through_torch() -> None:
    rows = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))
    assert not takes(rows)
    assert takes(rows[:, :16])
    assert not takes(rows[:, :16], torch.ones(16, dtype=torch.bfloat16))
    total, normed = add_rms_norm(rows, rows, torch.ones(24), EPS)
    check(normed, norm(total), torch.float32)
    turned = norm_rotate(rows.view(4, 1, 24), None, EPS, torch.ones(4, 1, 12, dtype=torch.complex64))
    torch.testing.assert_close(turned.view(4, 24), rows)
