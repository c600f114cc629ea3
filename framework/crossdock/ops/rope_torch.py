"""Rotary embedding in torch: frequencies, table and rotation."""

from __future__ import annotations

import math

import torch

from crossdock.ops.rope_spec import RopeSpec


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """[dim / 2] float32, one frequency a pair."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "default":
        return plain
    if spec.kind == "linear":
        return plain / spec.factor
    return _yarn_frequencies(spec, plain)


def _yarn_frequencies(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Fast pairs keep their frequency, slow ones are stretched by ``factor``, a linear ramp joins them (YaRN, section 3.2)."""

    def pair_with_turns(turns: float) -> float:
        length = spec.original_max_positions
        return spec.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_with_turns(spec.beta_fast), pair_with_turns(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    span = max(high - low, 0.001)
    stretched = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / spec.factor * stretched + plain * (1 - stretched)


def rotation_table(frequencies: torch.Tensor, num_positions: int, factor: float) -> torch.Tensor:
    """[num_positions, dim / 2] complex64: ``factor * (cos + i sin)`` of position times frequency."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    return torch.polar(torch.full_like(angles, factor), angles)


def rotate_pairs_torch(rows: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """[n, heads, dim] x [n, 1, dim / 2] complex64 -> [n, heads, dim]."""
    pairs = torch.view_as_complex(rows.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(rows.dtype)
