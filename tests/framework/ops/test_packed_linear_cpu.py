"""The C kernel of float32 products: right in every shape, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from crossdock.native_code import native_code
from crossdock.ops.packed_linear_cpu import WORK_A_THREAD, CpuLinear

pytestmark = pytest.mark.skipif(native_code().library is None, reason=f"no C kernels: {native_code().reason}")
TOLERANCE = 1e-4
"""Sums of up to 200 products of unit normals, added one after the other in float32."""
SHAPES = [(1, 1), (5, 3), (32, 16), (33, 17), (96, 64), (100, 200)]
"""Whole blocks of outputs and steps, and one more or less."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 11, 12, 13, 25, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_right(shape: tuple[int, int], rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if has_bias else None
    x = torch.randn(rows, 2 * shape[1] + 1, generator=generator)[:, : shape[1]]
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(CpuLinear(weight, bias)(x).double(), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_alone_has_the_bits_that_it_has_among_others(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = CpuLinear(torch.randn(shape, generator=generator))
    x = torch.randn(300, shape[1], generator=generator)
    everyone = linear(x)
    for first, last in [(0, 1), (299, 300), (7, 9), (3, 16), (150, 280)]:
        assert torch.equal(linear(x[first:last]), everyone[first:last]), (first, last)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(300, 128, generator=generator), torch.randn(64, 128, generator=generator)
    assert x.shape[0] * weight.numel() > 4 * WORK_A_THREAD
    linear, before = CpuLinear(weight), torch.get_num_threads()
    results: list[torch.Tensor] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_groups_are_products_of_their_own() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 40, 24, generator=generator)
    x = torch.randn(5, 3, 30, generator=generator)[..., :24]
    found = CpuLinear(weight)(x)
    for group in range(3):
        assert torch.equal(found[:, group], CpuLinear(weight[group])(x[:, group]))


def test_rows_of_another_width_or_dtype_are_refused() -> None:
    linear = CpuLinear(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="takes \\[n, 3\\]"):
        linear(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="bfloat16"):
        linear(torch.zeros(2, 3, dtype=torch.bfloat16))
