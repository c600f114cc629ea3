# mypy: ignore-errors
# pyright: basic
"""The step that both attention kernels share: a softmax over blocks of scores, kept as maximum, sum and unnormalised result."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_block(scores, value, running_max, running_sum, result):
    """Adds a block: scores [rows, tokens] in units of log2(e), value [tokens, dim]; a score of -inf adds nothing."""
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(running_max - new_max)
    running_sum = running_sum * rescale + tl.sum(weights, axis=1)
    result = tl.dot(weights.to(value.dtype), value, result * rescale[:, None], input_precision="ieee")
    return new_max, running_sum, result


@triton.jit
def add_row(score, value, running_max, running_sum, result):
    """Adds one token: score [rows] in units of log2(e), value [dim]."""
    new_max = tl.maximum(running_max, score)
    rescale, weight = tl.exp2(running_max - new_max), tl.exp2(score - new_max)
    running_sum = running_sum * rescale + weight
    result = result * rescale[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
    return new_max, running_sum, result
