"""Which tensors a checkpoint's config calls quantised; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from crossdock.errors import CheckpointError

from crossdock_models._shared.shards import FP8_BLOCK

NEVER = ("embed_tokens", "lm_head", "gate")
"""Owners of matrices that stay in the plain dtype in every fp8 checkpoint; ``gate`` is the router."""


@attrs.frozen(kw_only=True)
class Quantisation:
    """DeepSeek's block fp8, or none."""

    is_fp8: bool = False
    excluded: tuple[tuple[str, ...], ...] = ()
    """Dotted paths, split, whose modules are not converted."""

    def covers(self, name: str) -> bool:
        """Whether the matrix ``name`` is stored as fp8 blocks. Compares whole dotted components: layer 1 is not layer 11."""
        parts = tuple(name.split("."))
        if not self.is_fp8 or parts[-2] in NEVER:
            return False
        return not any(_contains(parts, path) for path in self.excluded)


def _contains(parts: tuple[str, ...], path: tuple[str, ...]) -> bool:
    return any(parts[i : i + len(path)] == path for i in range(len(parts) - len(path) + 1))


def read_quantisation(config: Mapping[str, Any]) -> Quantisation:
    """The quantisation of a config.

    Raises:
        CheckpointError: a method or block size that cannot be read; names it and what can.
    """
    fields = config.get("quantization_config")
    if not fields:
        return Quantisation()
    method, block = fields.get("quant_method"), list(fields.get("weight_block_size") or ())
    if method != "fp8" or block != [FP8_BLOCK, FP8_BLOCK]:
        raise CheckpointError(
            f"quantisation {method!r} with weight_block_size {block or None} cannot be read; only 'fp8' with blocks of "
            f"[{FP8_BLOCK}, {FP8_BLOCK}], float32, float16 and bfloat16 can"
        )
    excluded = tuple(tuple(name.split(".")) for name in fields.get("modules_to_not_convert") or ())
    return Quantisation(is_fp8=True, excluded=excluded)
