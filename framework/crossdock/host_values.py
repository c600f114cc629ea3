"""Tensors as Python numbers: where a step waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch


def ints(x: torch.Tensor) -> list[int]:
    """A one-dimensional integer tensor as a list."""
    return cast("list[int]", cast("Any", x).tolist())


def int_rows(x: torch.Tensor) -> list[list[int]]:
    """A two-dimensional integer tensor as a list of rows."""
    return cast("list[list[int]]", cast("Any", x).tolist())


def floats(x: torch.Tensor) -> list[float]:
    """A one-dimensional floating-point tensor as a list."""
    return cast("list[float]", cast("Any", x).tolist())


def float_rows(x: torch.Tensor) -> list[list[float]]:
    """A two-dimensional floating-point tensor as a list of rows."""
    return cast("list[list[float]]", cast("Any", x).tolist())
