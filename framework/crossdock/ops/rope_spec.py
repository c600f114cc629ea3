"""Rotary embedding as a value, read from either spelling of a checkpoint's config; torch is not imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

KINDS = ("default", "linear", "yarn")


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention temperature for a context ``factor`` times longer: ``0.1 * weight * ln(factor) + 1``, 1 below a factor of 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@attrs.frozen(kw_only=True)
class RopeSpec:
    """How positions turn into angles.

    Sources: Su et al. 2021 (rotary embedding); Peng et al. 2023 (YaRN); the DeepSeek-V2 report for ``mscale_all_dim``.
    """

    dim: int
    """Rotated dimensions of a head, even."""
    theta: float = 10000.0
    kind: str = attrs.field(default="default", validator=attrs.validators.in_(KINDS))
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def table_factor(self) -> float:
        """Multiplies cos and sin. An explicit ``attention_factor`` wins, both mscale terms give their ratio, anything else ``mscale(factor)``."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return mscale(self.factor, self.mscale) / mscale(self.factor, self.mscale_all_dim)
        return mscale(self.factor)

    @property
    def softmax_factor(self) -> float:
        """Multiplies the attention scale of MLA models: the square of the ``mscale_all_dim`` term. Not the table factor."""
        if self.kind == "default" or not self.mscale_all_dim:
            return 1.0
        return mscale(self.factor, self.mscale_all_dim) ** 2


def read_rope(config: Mapping[str, Any], dim: int, default_theta: float = 10000.0) -> RopeSpec:
    """The rope of a checkpoint.

    Accepts ``rope_parameters {rope_type, rope_theta, ...}`` and the older ``rope_theta`` + ``rope_scaling {type | rope_type, ...}``.

    Raises:
        ValueError: an unknown kind, or a scaled kind without its factor.
    """
    fields: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; known: {', '.join(KINDS)}")
    theta = float(fields.get("rope_theta", config.get("rope_theta", default_theta)))
    if kind == "default":
        return RopeSpec(dim=dim, theta=theta)
    original = int(fields.get("original_max_position_embeddings") or config.get("max_position_embeddings", 0))
    factor = fields.get("factor") or (config.get("max_position_embeddings", 0) / original if original else 0)
    if not factor:
        raise ValueError(f"rope type {kind!r} needs a factor; found {fields}")
    return RopeSpec(
        dim=dim,
        theta=theta,
        kind=kind,
        factor=float(factor),
        original_max_positions=original,
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        truncate=bool(fields.get("truncate", True)),
        attention_factor=fields.get("attention_factor"),
        mscale=fields.get("mscale"),
        mscale_all_dim=fields.get("mscale_all_dim"),
    )
