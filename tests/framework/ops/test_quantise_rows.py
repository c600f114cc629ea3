"""Rows quantised by blocks: the kernel against the readable truth, and both against the rows they stand for."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from crossdock.ops.quantise_rows import quantise_rows, quantise_rows_by_column, quantise_rows_fused
from crossdock.ops.quantise_rows_torch import quantise_rows_torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8_TOLERANCE = 2.0**-4
"""Three bits of a float8_e4m3 value."""

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)


def random_rows(num_rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(num_rows, hidden_size, generator=generator) * 10.0 ** torch.randint(
        -3, 3, (num_rows, 1), generator=generator
    )
    return rows.to(DEVICE, dtype)


def representable_rows(num_rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Float8 values times a power of two a block: the interpreter loses the carry when rounding reaches the next power of two."""
    generator = torch.Generator().manual_seed(6)
    values = (torch.randn(num_rows, hidden_size, generator=generator) * 100).clamp(-440, 440)
    blocks = values.to(torch.float8_e4m3fn).float().unflatten(1, (-1, 128))
    blocks[..., 0] = 448.0
    powers = 2.0 ** torch.randint(-6, 3, blocks.shape[:2], generator=generator)
    return (blocks * powers[..., None]).flatten(1).to(DEVICE, dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_dequantised_rows_are_the_rows_within_three_bits(num_rows: int) -> None:
    rows = random_rows(num_rows, 384, torch.float32)
    payload, scales = quantise_rows(rows)
    assert payload.dtype is torch.float8_e4m3fn
    assert scales.shape == (num_rows, 3)
    back = payload.float() * scales.repeat_interleave(128, dim=1)
    largest = rows.abs().unflatten(1, (3, 128)).amax(dim=2).repeat_interleave(128, dim=1)
    assert bool(((back - rows).abs() <= FP8_TOLERANCE * largest).all())


def test_scales_by_column_are_the_same_scales_at_multiples_of_16_bytes() -> None:
    rows = random_rows(5, 256, torch.float32)
    payload, scales = quantise_rows_by_column(rows)
    want, want_scales = quantise_rows(rows)
    assert torch.equal(payload[:5].view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales[:5], want_scales)
    assert (payload.shape, scales.shape, scales.stride()) == ((8, 256), (8, 2), (1, 8))


def test_an_all_zero_block_stays_zero() -> None:
    payload, scales = quantise_rows(torch.zeros(2, 128, device=DEVICE))
    assert not payload.float().any()
    assert bool((scales > 0).all())


def test_a_width_that_is_no_multiple_of_128_is_an_error_with_the_shape() -> None:
    with pytest.raises(ValueError, match=r"\(2, 100\)"):
        quantise_rows(torch.zeros(2, 100))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "hidden_size"), [(0, 128), (1, 128), (3, 1024), (2, 1152)])
def test_the_kernel_gives_what_the_twin_gives(num_rows: int, hidden_size: int, dtype: torch.dtype) -> None:
    rows = representable_rows(num_rows, hidden_size, dtype)
    scales = torch.full((num_rows, hidden_size // 128), -1.0, device=DEVICE)
    payload = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    quantise_rows_fused(rows, payload, scales)
    want, want_scales = quantise_rows_torch(rows)
    assert torch.equal(scales, want_scales)
    assert torch.equal(payload.float(), want.float())
