"""The C product for few rows equals torch's, with one order of additions for every batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from crossdock.native_code import native_code
from crossdock.ops.linear_cpu import linear_cpu, takes

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Relative to the largest value; bf16 results differ by one rounding."""
pytestmark = pytest.mark.skipif(native_code().library is None, reason=f"no native kernels: {native_code().reason}")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 64])
@pytest.mark.parametrize(("width", "out"), [(64, 96), (96, 20), (32, 4)])
def test_it_equals_torch(dtype: torch.dtype, rows: int, width: int, out: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(out, width, generator=generator).to(dtype)
    assert takes(x, weight)
    found, wanted = linear_cpu(x, weight), F.linear(x, weight)
    assert found.dtype is dtype
    assert found.shape == wanted.shape
    if rows:
        assert float((found - wanted).abs().max()) <= TOLERANCE[dtype] * float(wanted.abs().max())


def test_it_says_what_it_does_not_take() -> None:
    x, weight = torch.zeros(2, 64), torch.zeros(8, 64)
    assert takes(x, weight)
    assert not takes(x[:, :40], weight[:, :40].contiguous())
    assert not takes(x, weight[:7])
    assert not takes(x, weight.bfloat16())
    assert not takes(x.double(), weight.double())
    assert not takes(x.t().contiguous().t(), weight)
    torch.set_num_threads(2)
    assert not takes(x, weight)


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(20, 64).to(dtype), torch.randn(32, 64).to(dtype)
        assert torch.equal(linear_cpu(x[7:8], weight)[0], linear_cpu(x, weight)[7])


def test_strided_rows_are_read_right() -> None:
    x, weight = torch.randn(5, 96), torch.randn(8, 32)
    torch.testing.assert_close(linear_cpu(x[:, 32:64], weight), F.linear(x[:, 32:64], weight))


def test_bfloat16_results_are_rounded_to_the_nearest_even() -> None:
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :2] = 1.0
    weight = torch.zeros(8, 32, dtype=torch.bfloat16)
    # Sums that lie on, just above and just below the middle of two neighbours; NaN and infinity pass through.
    weight[:, 0] = torch.tensor([256.0, 258.0, 256.0, 256.0, -256.0, 1.0, float("nan"), float("inf")])
    weight[:, 1] = torch.tensor([1.0, 1.0, 1.0078125, 0.9921875, -1.0, 2.0**-9, 1.0, 1.0])
    wanted = (weight[:, 0].float() + weight[:, 1].float()).to(torch.bfloat16)
    assert wanted[:2].tolist() == [256.0, 260.0]
    found = linear_cpu(x, weight)[0]
    assert torch.equal(found[:6], wanted[:6])
    assert found[6].isnan()
    assert found[7].isinf()
