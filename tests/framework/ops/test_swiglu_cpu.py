"""The C kernel of the gated activation: torch's numbers, and bits that do not depend on where an element lies."""

from __future__ import annotations

import pytest
import torch
from crossdock.native_code import native_code
from crossdock.ops.swiglu import swiglu
from crossdock.ops.swiglu_cpu import swiglu_cpu, takes
from crossdock.ops.swiglu_torch import swiglu_torch

pytestmark = pytest.mark.skipif(native_code().library is None, reason=f"no C kernels: {native_code().reason}")
TOLERANCE = 1e-6
"""Relative: the exponential's own error is below 2e-7."""
SIZES = [1, 15, 16, 17, 40, 64]


@pytest.mark.parametrize("inner", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_it_is_the_activation_of_torch(inner: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    wide = 20 * torch.randn(rows, 2 * inner + 3, generator=generator)
    gate_up = wide[:, : 2 * inner]
    assert takes(gate_up)
    torch.testing.assert_close(swiglu(gate_up), swiglu_torch(gate_up), rtol=TOLERANCE, atol=1e-30)


@pytest.mark.parametrize("inner", SIZES)
def test_an_element_has_the_same_bits_in_any_place(inner: int) -> None:
    gate, up = torch.randn(2, generator=torch.Generator().manual_seed(0)).tolist()
    rows = torch.cat((torch.full((3, inner), gate), torch.full((3, inner), up)), dim=1)
    found = swiglu_cpu(rows)
    assert bool((found == found[0, 0]).all())


def test_other_dtypes_and_shapes_are_left_to_torch() -> None:
    assert not takes(torch.zeros(2, 4, dtype=torch.bfloat16))
    assert not takes(torch.zeros(2, 2, 4))
