# mypy: ignore-errors
# pyright: basic
"""Kernel of prefill on Hopper GPUs for contexts that lie in one piece, in Gluon, the language below Triton.

As ``prefill_kernel``, but the order of work on the tensor cores is written out, which Triton's compiler leaves to itself: while a
program is at the softmax of one tile, the scores of the next tile and the value product of the tile before are computed. Tiles come from
the end of the context to its start, so that those with a mask come first. Keys and values have two places each in shared memory: a
tile's place is refilled as soon as the product that reads it is done. Source: Shah et al., FlashAttention-3 (2024), section 3.2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

start_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Renamed after Triton 3.6."""


@gluon.jit
def fetch(source, row, column, barrier, tile, pred) -> None:
    """Starts the copy of a tile into shared memory; ``barrier`` expects its bytes."""
    size: gl.constexpr = tile.shape[0] * tile.shape[1] * 2
    mbarrier.expect(barrier, size, pred=pred)
    start_copy(source, [row, column], barrier, tile, pred=pred)


@gluon.jit
def fetch_parts(sources, columns, row, barrier, tiles, pred, rest_dim: gl.constexpr) -> None:
    """A tile in two parts, of which the second may be empty, under one barrier."""
    if rest_dim > 0:
        size: gl.constexpr = tiles[0].shape[0] * (tiles[0].shape[1] + rest_dim) * 2
        mbarrier.expect(barrier, size, pred=pred)
        start_copy(sources[0], [row, columns[0]], barrier, tiles[0], pred=pred)
        start_copy(sources[1], [row, columns[1]], barrier, tiles[1], pred=pred)
    else:
        fetch(sources[0], row, columns[0], barrier, tiles[0], pred)


@gluon.jit
def start_scores(queries, keys, rows: gl.constexpr, tokens: gl.constexpr, rest_dim: gl.constexpr, layout: gl.constexpr):
    """Scores of a tile of keys, in flight."""
    zero = gl.zeros([rows, tokens], gl.float32, layout)
    scores = warpgroup_mma(queries[0], keys[0].permute((1, 0)), zero, use_acc=False, is_async=True)
    if rest_dim > 0:
        scores = warpgroup_mma(queries[1], keys[1].permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def attend(
    begin,
    end,
    tiles,
    # where keys and values come from: first row of the context, descriptors, columns
    kv_start,
    sources,
    columns,
    # shared memory
    queries,
    keys,
    values,
    key_barriers,
    value_barriers,
    # running softmax
    scores,
    result,
    running_max,
    running_sum,
    # who sees what
    first_position,
    log2_scale,
    # meta
    rows: gl.constexpr,
    tokens: gl.constexpr,
    rest_dim: gl.constexpr,
    scores_layout: gl.constexpr,
    result_layout: gl.constexpr,
    is_masked: gl.constexpr,
):
    """Tiles ``begin`` to ``end`` of ``tiles``, counted from the end of the context; ``scores`` are those of the first one."""
    for tile in range(begin, end):
        # The product of this tile's keys is done: the keys after the next ones take their place.
        row = kv_start + (tiles - 3 - tile) * tokens
        own, other = tile % 2, (tile + 1) % 2
        place = (keys[0].index(own), keys[1].index(own))
        fetch_parts(sources, columns, row, key_barriers.index(own), place, tile + 2 < tiles, rest_dim)
        # Scores of the next tile, in flight; behind the last one there is none, and what comes out is not used.
        mbarrier.wait(key_barriers.index(other), ((tile + 1) // 2) & 1, pred=tile + 1 < tiles)
        following = start_scores(
            queries, (keys[0].index(other), keys[1].index(other)), rows, tokens, rest_dim, scores_layout
        )
        # Softmax of this tile.
        if is_masked:
            lane = gl.arange(0, rows, layout=gl.SliceLayout(1, scores_layout))
            token = gl.arange(0, tokens, layout=gl.SliceLayout(0, scores_layout)) + (tiles - 1 - tile) * tokens
            scores = gl.where(token[None, :] <= (first_position + lane)[:, None], scores, float("-inf"))
        new_max = gl.maximum(running_max, gl.max(scores, axis=1) * log2_scale)
        weights = gl.exp2(scores * log2_scale - new_max[:, None])
        rescale = gl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + gl.sum(weights, axis=1)
        running_max = new_max
        weights = gl.convert_layout(weights.to(sources[2].dtype), gl.DotOperandLayout(0, result_layout, 2))
        # The value product of the tile before is done, and its values' place is free.
        result = warpgroup_mma_wait(num_outstanding=1 if rest_dim == 0 else 2, deps=(result,))
        result = result * gl.convert_layout(rescale, gl.SliceLayout(1, result_layout))[:, None]
        row = kv_start + (tiles - 2 - tile) * tokens
        fetch(sources[2], row, columns[2], value_barriers.index(other), values.index(other), tile + 1 < tiles)
        mbarrier.wait(value_barriers.index(own), (tile // 2) & 1)
        result = warpgroup_mma(weights, values.index(own), result, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(following,))
    return scores, result, running_max, running_sum


@gluon.jit
def clear_behind(tile, first, context, layout: gl.constexpr) -> None:
    """Values behind the end of the context become 0: their weight is 0, but they may be infinite."""
    value = tile.load(layout)
    token = first + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    tile.store(gl.where((token < context)[:, None], value, gl.zeros_like(value)))
    fence_async_shared()


@gluon.jit
def store_live(at, stride, result, live_rows, rows: gl.constexpr, columns: gl.constexpr, layout: gl.constexpr) -> None:
    """The rows that are there, in wide stores."""
    result = gl.convert_layout(result.to(at.dtype.element_ty), layout)
    row = gl.arange(0, rows, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, columns, layout=gl.SliceLayout(0, layout))
    gl.store(at + row.to(gl.int64)[:, None] * stride + column[None, :], result, mask=(row < live_rows)[:, None])


@gluon.jit
def shared_parts(source, rest_source, rows: gl.constexpr, columns: gl.constexpr, rest_columns: gl.constexpr):
    """Room for tiles of rows in two parts; where the second is empty it is the first."""
    part = gl.allocate_shared_memory(source.dtype, [2, rows, columns], source.layout)
    if rest_columns == 0:
        return part, part
    else:  # noqa: RET505 - for the compiler only one of the two is there
        return part, gl.allocate_shared_memory(source.dtype, [2, rows, rest_columns], rest_source.layout)


@gluon.jit
def barriers():
    """Two, each for the thread that announces the bytes to come."""
    both = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(both.index(i), count=1)
    return both


@gluon.jit
def prefill_ahead_kernel(
    # descriptors over [rows, heads * dim]
    q,
    q_rest,
    k,
    k_rest,
    v,
    # pointers
    kv_starts,
    blocks,
    out,
    # sizes
    scale,
    # strides: of heads; of rows and heads
    q_head,
    k_head,
    rest_head,
    v_head,
    out_strides,
    # meta
    group: gl.constexpr,
    key_dim: gl.constexpr,
    rest_dim: gl.constexpr,
    value_dim: gl.constexpr,
    rows: gl.constexpr,
    tokens: gl.constexpr,
    num_warps: gl.constexpr,
) -> None:
    # A block: sequence, first row in the batch, rows in it, position of its first row.
    entry = blocks + gl.program_id(0) * 4
    sequence, first_row = gl.load(entry), gl.load(entry + 1)
    live_rows, first_position = gl.load(entry + 2), gl.load(entry + 3)
    head = gl.program_id(1)
    key_head = head // group
    context = first_position + live_rows
    tiles, whole = gl.cdiv(context, tokens), (first_position + 1) // tokens
    kv_start = gl.load(kv_starts + sequence)
    sources = (k, k_rest, v)
    columns = (key_head * k_head, key_head * rest_head, key_head * v_head)
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, tokens, 16])
    result_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, value_dim, 16])
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // value_dim, value_dim // 8], [num_warps, 1], [1, 0])
    # Shared memory, and the first copies into it.
    query = gl.allocate_shared_memory(q.dtype, [rows, key_dim], q.layout)
    queries = (query, query)
    if rest_dim > 0:
        queries = (query, gl.allocate_shared_memory(q.dtype, [rows, rest_dim], q_rest.layout))
    keys = shared_parts(k, k_rest, tokens, key_dim, rest_dim)
    values = gl.allocate_shared_memory(v.dtype, [2, tokens, value_dim], v.layout)
    query_barrier, key_barriers, value_barriers = barriers(), barriers(), barriers()
    last = kv_start + (tiles - 1) * tokens
    q_columns = (head * q_head, head * q_head + key_dim)
    fetch_parts((q, q_rest), q_columns, first_row, query_barrier.index(0), queries, True, rest_dim)
    fetch_parts(sources, columns, last, key_barriers.index(0), (keys[0].index(0), keys[1].index(0)), True, rest_dim)
    fetch(v, last, columns[2], value_barriers.index(0), values.index(0), True)
    following = (keys[0].index(1), keys[1].index(1))
    fetch_parts(sources, columns, last - tokens, key_barriers.index(1), following, tiles > 1, rest_dim)
    mbarrier.wait(query_barrier.index(0), 0)
    mbarrier.wait(key_barriers.index(0), 0)
    scores = start_scores(queries, (keys[0].index(0), keys[1].index(0)), rows, tokens, rest_dim, scores_layout)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    # Finite: a row may see nothing of the first tiles, those at the end of the context, and -inf less -inf is no number.
    running_max = gl.full([rows], -1.0e30, gl.float32, gl.SliceLayout(1, scores_layout))
    running_sum = gl.zeros([rows], gl.float32, gl.SliceLayout(1, scores_layout))
    result = warpgroup_mma_init(gl.zeros([rows, value_dim], gl.float32, result_layout))
    if context % tokens > 0:
        mbarrier.wait(value_barriers.index(0), 0)
        clear_behind(values.index(0), (tiles - 1) * tokens, context, out_layout)
    for is_masked in gl.static_range(1, -1, -1):
        scores, result, running_max, running_sum = attend(
            0 if is_masked else tiles - whole, tiles - whole if is_masked else tiles, tiles, kv_start, sources, columns,
            queries, keys, values, key_barriers, value_barriers, scores, result, running_max, running_sum, first_position,
            scale * 1.4426950408889634, rows, tokens, rest_dim, scores_layout, result_layout, is_masked,
        )  # fmt: skip
    result = warpgroup_mma_wait(num_outstanding=0, deps=(result,))
    result = result / gl.convert_layout(running_sum, gl.SliceLayout(1, result_layout))[:, None]
    at = out + first_row.to(gl.int64) * out_strides[0] + head * out_strides[1]
    store_live(at, out_strides[0], result, live_rows, rows, value_dim, out_layout)
