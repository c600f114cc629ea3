# mypy: ignore-errors
# pyright: basic
"""The two grouped products for many rows an expert on Hopper, in Gluon: warps that load and two groups of warps that multiply, side by side.

A tile is 128 rows of one expert times two blocks of 128 columns. Its first and its last 64 rows belong to one multiplying group each, which wait
for a step's operands and let go of them on their own: while one group scales or stores, the other one has the tensor cores. The loading warps run
ahead, over the end of a tile too. ``grouped_large_triton`` and ``fp8_products_triton`` compute the same where there is no Hopper, with all
warps in step.
"""

from __future__ import annotations

from crossdock.ops.quantise_rows_triton import FLOOR, LARGEST
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 and later versions name these differently.
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
load_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

HALF_ROWS = gl.constexpr(64)
BLOCK_ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(128)
MINUS_LOG2_E = gl.constexpr(-1.4426950408889634)


@gluon.jit
def place_of(tile, num_blocks, whole, column_tiles, group: gl.constexpr):
    """(row block, column tile, is half) of a tile: those of whole blocks first; columns advance inside groups of ``group`` row blocks."""
    is_half = tile >= whole * column_tiles
    in_front = gl.where(is_half, whole, 0)
    row_blocks = gl.where(is_half, num_blocks - whole, whole)
    tile -= in_front * column_tiles
    in_group = group * column_tiles
    first = (tile // in_group) * group
    size = gl.minimum(row_blocks - first, group)
    return in_front + first + (tile % in_group) % size, (tile % in_group) // size, is_half


@gluon.jit
def load_steps(
    # pointers
    rows,
    left,
    weights,
    pairs,
    block_experts,
    num_blocks,
    # shared memory
    low,
    high,
    first,
    second,
    full,
    empty,
    # sizes
    num_pairs,
    width,
    column_tiles,
    expert_rows,
    tile_rows,
    second_at,
    # meta
    gathers: gl.constexpr,
    top_k: gl.constexpr,
    step: gl.constexpr,
    group: gl.constexpr,
    stages: gl.constexpr,
) -> None:
    """Brings the operands of each step: rows one by one where pairs name them, else in blocks, and two blocks of weights."""
    element_bytes: gl.constexpr = weights.dtype.primitive_bitwidth // 8
    half_bytes: gl.constexpr = HALF_ROWS * step * element_bytes
    weight_bytes: gl.constexpr = 2 * COLUMNS * step * element_bytes
    elements: gl.constexpr = 16 // element_bytes
    threads: gl.constexpr = step // elements
    layout: gl.constexpr = gl.BlockedLayout([1, elements], [32 // threads, threads], [4, 1], [1, 0])
    lane = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, layout))
    inner = gl.arange(0, step, layout=gl.SliceLayout(0, layout))[None, :]
    blocks, whole = gl.load(num_blocks), gl.load(num_blocks + 1)
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), blocks * column_tiles, gl.num_programs(0)):
        row_block, column_tile, is_half = place_of(tile, blocks, whole, column_tiles, group)
        weight_row = gl.load(block_experts + row_block) * expert_rows + column_tile * tile_rows
        row = row_block * BLOCK_ROWS
        if gathers:
            # Rows of empty pairs are row 0.
            pair = gl.load(pairs + row + lane)
            low_at = rows + (gl.where(pair < num_pairs, pair, 0) // top_k).to(gl.int64)[:, None] * width + inner
            pair = gl.load(pairs + row + HALF_ROWS + lane)
            high_at = rows + (gl.where(pair < num_pairs, pair, 0) // top_k).to(gl.int64)[:, None] * width + inner
        for start in range(0, width, step):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            if gathers:
                mbarrier.expect(bar, weight_bytes)
            else:
                mbarrier.expect(bar, weight_bytes + half_bytes, pred=is_half)
                mbarrier.expect(bar, weight_bytes + 2 * half_bytes, pred=is_half == 0)
            load_block(weights, [weight_row, start], bar, first.index(stage))
            load_block(weights, [weight_row + second_at, start], bar, second.index(stage))
            if gathers:
                load_elements(low.index(stage), low_at + start)
                if is_half == 0:
                    load_elements(high.index(stage), high_at + start)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                load_block(left, [row, start], bar, low.index(stage))
                load_block(left, [row + HALF_ROWS, start], bar, high.index(stage), pred=is_half == 0)
            stage += 1
            if stage == stages:
                stage = 0
                phase ^= 1


@gluon.jit
def sum_steps(
    left, first, second, full, empty, stage, phase, num_steps, gathers: gl.constexpr, stages: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """(left times first, left times second, stage, phase): products of a step run while the next ones are issued."""
    one = gl.zeros([HALF_ROWS, COLUMNS], gl.float32, layout)
    two = gl.zeros([HALF_ROWS, COLUMNS], gl.float32, layout)
    for index in range(num_steps):
        mbarrier.wait(full.index(stage), phase)
        if gathers:
            fence_async_shared()
        one = warpgroup_mma(left.index(stage), first.index(stage).permute((1, 0)), one, is_async=True)
        two = warpgroup_mma(left.index(stage), second.index(stage).permute((1, 0)), two, is_async=True)
        one, two = warpgroup_mma_wait(num_outstanding=2, deps=(one, two))
        # What the step before read is free.
        mbarrier.arrive(empty.index((stage + stages - 1) % stages), pred=index > 0)
        stage += 1
        if stage == stages:
            stage = 0
            phase ^= 1
    one, two = warpgroup_mma_wait(num_outstanding=0, deps=(one, two))
    mbarrier.arrive(empty.index((stage + stages - 1) % stages))
    return one, two, stage, phase


@gluon.jit
def sum_scaled_steps(
    left, first, second, full, empty, stage, phase, num_steps, row_scales, first_scales, second_scales,
    gathers: gl.constexpr, stages: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """As ``sum_steps`` in float8: each step's product is a sum of its own, scaled while the other group multiplies; scales come a step ahead."""
    one = gl.zeros([HALF_ROWS, COLUMNS], gl.float32, layout)
    two = gl.zeros([HALF_ROWS, COLUMNS], gl.float32, layout)
    zero = gl.zeros([HALF_ROWS, COLUMNS], gl.float32, layout)
    row_scale, first_scale, second_scale = gl.load(row_scales), gl.load(first_scales), gl.load(second_scales)
    for index in range(num_steps):
        mbarrier.wait(full.index(stage), phase)
        if gathers:
            fence_async_shared()
        weight = first.index(stage).permute((1, 0))
        part = warpgroup_mma(left.index(stage), weight, zero, use_acc=False, is_async=True)
        # Behind the fence, which waits for loads as well.
        following = gl.minimum(index + 1, num_steps - 1)
        next_row_scale = gl.load(row_scales + following)
        next_first_scale = gl.load(first_scales + following)
        next_second_scale = gl.load(second_scales + following)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        one += part * (row_scale * first_scale)[:, None]
        weight = second.index(stage).permute((1, 0))
        part = warpgroup_mma(left.index(stage), weight, zero, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        mbarrier.arrive(empty.index(stage))
        two += part * (row_scale * second_scale)[:, None]
        row_scale, first_scale, second_scale = next_row_scale, next_first_scale, next_second_scale
        stage += 1
        if stage == stages:
            stage = 0
            phase ^= 1
    return one, two, stage, phase


@gluon.jit
def skip_steps(full, empty, stage, phase, num_steps, stages: gl.constexpr):
    """(stage, phase) after a tile without rows for this group: lets go of what comes for the other one."""
    for _ in range(num_steps):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage))
        stage += 1
        if stage == stages:
            stage = 0
            phase ^= 1
    return stage, phase


@gluon.jit
def store_result(value, result, out, row, column) -> None:
    """A block of the result, by the copy engine once the one before has left shared memory."""
    tma.store_wait(0)
    result.index(0).store(value.to(out.dtype))
    fence_async_shared()
    store_block(out, [row, column], result.index(0))


@gluon.jit
def multiply_rows(
    pointers,
    # shared memory
    left,
    first,
    second,
    full,
    empty,
    result,
    # sizes
    num_pairs,
    width,
    column_tiles,
    # meta
    half: gl.constexpr,
    gathers: gl.constexpr,
    gated: gl.constexpr,
    scaled: gl.constexpr,
    top_k: gl.constexpr,
    step: gl.constexpr,
    group: gl.constexpr,
    stages: gl.constexpr,
) -> None:
    """Every tile's first 64 rows, or with ``half`` its last."""
    out, out_scales, row_scales, weight_scales, pairs, block_experts, num_blocks = pointers
    instruction: gl.constexpr = [16, COLUMNS, 256 // left.dtype.primitive_bitwidth]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=instruction)
    lane = gl.arange(0, HALF_ROWS, layout=gl.SliceLayout(1, layout))
    num_steps = width // step
    blocks, whole = gl.load(num_blocks), gl.load(num_blocks + 1)
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), blocks * column_tiles, gl.num_programs(0)):
        row_block, column_tile, is_half = place_of(tile, blocks, whole, column_tiles, group)
        row = row_block * BLOCK_ROWS + half * HALF_ROWS
        if half and is_half:
            stage, phase = skip_steps(full, empty, stage, phase, num_steps, stages)
        else:
            if scaled:
                source = row + lane
                if gathers:
                    pair = gl.load(pairs + source)
                    source = gl.where(pair < num_pairs, pair, 0) // top_k
                block_at = gl.load(block_experts + row_block) * 2 * column_tiles
                second_at = column_tiles
                if gated:
                    block_at += column_tile
                else:
                    block_at += 2 * column_tile
                    second_at = 1
                scales_at = weight_scales + block_at.to(gl.int64) * num_steps
                one, two, stage, phase = sum_scaled_steps(
                    left, first, second, full, empty, stage, phase, num_steps, row_scales + source.to(gl.int64) * num_steps,
                    scales_at, scales_at + second_at * num_steps, gathers, stages, layout)  # fmt: skip
            else:
                one, two, stage, phase = sum_steps(
                    left, first, second, full, empty, stage, phase, num_steps, gathers, stages, layout)  # fmt: skip
            if gated:
                # silu(one) * two; the square of a root instead of a division, which takes thrice the instructions.
                root = gl.rsqrt(1.0 + gl.exp2(one * MINUS_LOG2_E))
                value = one * root * root * two
                if scaled:
                    # The tile's columns are one block of the next product's scales.
                    found = gl.maximum(gl.max(gl.abs(value), axis=1), FLOOR) / LARGEST
                    gl.store(out_scales + (row + lane).to(gl.int64) * column_tiles + column_tile, found)
                    value = value / found[:, None]
                store_result(value, result, out, row, column_tile * COLUMNS)
            else:
                store_result(one, result, out, row, column_tile * 2 * COLUMNS)
                store_result(two, result, out, row, column_tile * 2 * COLUMNS + COLUMNS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_pairs"])
def hopper_product_kernel(
    # pointers (left, weights, out: descriptors over [rows, width], [S * weight rows, width] and [places, columns])
    rows,
    left,
    weights,
    row_scales,
    weight_scales,
    pairs,
    block_experts,
    num_blocks,
    out,
    out_scales,
    # sizes
    num_pairs,
    width,
    columns,
    # meta
    gathers: gl.constexpr,
    gated: gl.constexpr,
    scaled: gl.constexpr,
    top_k: gl.constexpr,
    step: gl.constexpr,
    group: gl.constexpr,
    stages: gl.constexpr,
) -> None:
    """out[place]: ``gated``, silu(gate) * up of the rows that ``pairs`` name (``gathers``); else down of the rows that lie in their places."""
    low = gl.allocate_shared_memory(weights.dtype, [stages, HALF_ROWS, step], left.layout)
    high = gl.allocate_shared_memory(weights.dtype, [stages, HALF_ROWS, step], left.layout)
    first = gl.allocate_shared_memory(weights.dtype, [stages, COLUMNS, step], weights.layout)
    second = gl.allocate_shared_memory(weights.dtype, [stages, COLUMNS, step], weights.layout)
    low_result = gl.allocate_shared_memory(out.dtype, [1, HALF_ROWS, COLUMNS], out.layout)
    high_result = gl.allocate_shared_memory(out.dtype, [1, HALF_ROWS, COLUMNS], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        # Blocks come with one arrival; where rows are gathered each of the 128 threads arrives too.
        if gathers:
            mbarrier.init(full.index(stage), count=129)
        else:
            mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    if gated:
        column_tiles = columns // COLUMNS
        expert_rows, second_at = 2 * columns, columns
        tile_rows: gl.constexpr = COLUMNS
    else:
        column_tiles = columns // (2 * COLUMNS)
        expert_rows, second_at = columns, COLUMNS
        tile_rows: gl.constexpr = 2 * COLUMNS
    pointers = (out, out_scales, row_scales, weight_scales, pairs, block_experts, num_blocks)
    gl.warp_specialize(
        [
            (multiply_rows, (pointers, low, first, second, full, empty, low_result, num_pairs, width, column_tiles,
                             0, gathers, gated, scaled, top_k, step, group, stages)),
            (multiply_rows, (pointers, high, first, second, full, empty, high_result, num_pairs, width, column_tiles,
                             1, gathers, gated, scaled, top_k, step, group, stages)),
            (load_steps, (rows, left, weights, pairs, block_experts, num_blocks, low, high, first, second, full, empty,
                          num_pairs, width, column_tiles, expert_rows, tile_rows, second_at,
                          gathers, top_k, step, group, stages)),
        ],
        [4, 4],
        [216, 80],
    )  # fmt: skip
