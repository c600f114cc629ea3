"""Whether a row of a step has the same bits whatever rows are beside it (``launch.row_invariant``): decided at start, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs

from crossdock.errors import SelectionRefused
from crossdock.native_code import native_code
from crossdock.types.attention import KvSpec
from crossdock.types.capability import Refusal
from crossdock.types.model import ModelInfo, MoeSpec
from crossdock.types.selection import Selection

_HEAD_STEP = 16
_WIDTH_STEP = 32
_PAGE_STEP = 4
"""Sizes are multiples of these where C kernels take them; others are computed row by row in torch operators."""
_TINY_HIDDEN_SIZE = 128
"""Models of tests: row by row costs little, and differences by rounding would be in the way."""


def with_row_invariance(
    selection: Selection, wanted: Literal["auto", "on", "off"], info: ModelInfo, page_tokens: int, moe_tp_size: int
) -> Selection:
    """The selection with its decision: ``auto`` takes it where it costs little.

    Raises:
        SelectionRefused: it is on and cannot be had.
    """
    if wanted == "off":
        return selection
    refusals = tuple(_refusals(selection))
    if wanted == "on" and refusals:
        raise SelectionRefused([one.code for one in refusals], [one.sentence for one in refusals])
    is_fast = _head_fits(info.kv) and page_tokens % _PAGE_STEP == 0 and _experts_fit(info.moe, moe_tp_size)
    is_cheap = is_fast or info.hidden_size <= _TINY_HIDDEN_SIZE
    return attrs.evolve(selection, row_invariant=wanted == "on" or (is_cheap and not refusals))


def _refusals(selection: Selection) -> Iterator[Refusal]:
    off = 'set launch.row_invariant = "off"'
    if selection.device != "cpu" or selection.dtype != "float32":
        sentence = (
            f"rows keep their bits on a CPU in float32, not on {selection.device} in {selection.dtype}: "
            f'set launch.device = "cpu" and checkpoint.dtype = "float32", or {off}'
        )
        yield Refusal(code="row_invariance_needs_cpu_float32", sentence=sentence)
        return
    code = native_code()
    if code.library is None:
        yield Refusal(
            code="row_invariance_needs_compiler",
            sentence=f"rows keep their bits in C kernels, and {code.reason}; install one, or {off}",
        )
    for point in ("experts", "attention"):
        plugin = selection.plugin(point)
        if not plugin.capabilities.row_invariant:
            sentence = (
                f"{point} {plugin.name!r} with these options rounds by the rows beside a row; choose 'auto', or {off}"
            )
            yield Refusal(code="row_invariance_not_supported", sentence=sentence)


def _head_fits(kv: KvSpec) -> bool:
    if kv.kind == "mla":
        return kv.kv_lora_rank % _HEAD_STEP == 0 and kv.rope_dim % _HEAD_STEP == 0
    return kv.head_dim % _HEAD_STEP == 0 and kv.v_head_dim % _HEAD_STEP == 0


def _experts_fit(moe: MoeSpec | None, moe_tp_size: int) -> bool:
    if moe is None:
        return True
    return moe.hidden_size % _WIDTH_STEP == 0 and moe.intermediate_size // moe_tp_size % _WIDTH_STEP == 0
