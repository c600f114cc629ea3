"""Tensors as plain lists, typed; each call waits for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch


def int_list(tensor: torch.Tensor) -> list[int]:
    """[n] integers."""
    return cast("list[int]", cast("Any", tensor).tolist())


def int_rows(tensor: torch.Tensor) -> list[list[int]]:
    """[n, m] integers."""
    return cast("list[list[int]]", cast("Any", tensor).tolist())


def float_list(tensor: torch.Tensor) -> list[float]:
    """[n] numbers."""
    return cast("list[float]", cast("Any", tensor).tolist())
