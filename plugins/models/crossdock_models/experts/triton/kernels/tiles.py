"""Tile sizes of the grouped products, by rows an expert gets. A committed table: nothing is tuned at start."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Tiles:
    """Tile of both products; ``inner`` is the step along the summed dimension (128 where weights have block scales)."""

    rows: int
    gate_columns: int
    down_columns: int
    inner: int
    group: int
    gate_warps: int
    gate_stages: int
    down_warps: int
    down_stages: int


FEW = Tiles(
    rows=16,
    gate_columns=64,
    down_columns=128,
    inner=128,
    group=1,
    gate_warps=4,
    gate_stages=4,
    down_warps=4,
    down_stages=4,
)
"""A handful of rows an expert: weights stream once through, the tile is as thin as the tensor cores allow."""

SOME = Tiles(
    rows=32,
    gate_columns=64,
    down_columns=128,
    inner=64,
    group=4,
    gate_warps=4,
    gate_stages=4,
    down_warps=4,
    down_stages=4,
)

MANY = Tiles(
    rows=64,
    gate_columns=128,
    down_columns=128,
    inner=64,
    group=8,
    gate_warps=4,
    gate_stages=4,
    down_warps=4,
    down_stages=4,
)

LARGE = Tiles(
    rows=128,
    gate_columns=128,
    down_columns=256,
    inner=64,
    group=8,
    gate_warps=8,
    gate_stages=4,
    down_warps=8,
    down_stages=4,
)
"""Prefill of sizes or weights that ``grouped_large`` does not take."""


MOST_MIDDLING_ROWS = 96
"""Rows an expert up to which weights are still a large part of the cost."""


def choose_tiles(rows_per_expert: float, weight_bytes: int) -> Tiles:
    """The table's entry for the mean number of rows an expert gets; ``weight_bytes`` an element.

    One byte: the inner step stays at a block of scales. Four: no tensor cores, and tiles that fit into shared memory.
    """
    if weight_bytes == 4:
        return attrs.evolve(FEW if rows_per_expert <= 12 else SOME, inner=32)
    if rows_per_expert <= 12:
        tiles = FEW
    elif rows_per_expert <= 32:
        tiles = SOME
    elif rows_per_expert <= MOST_MIDDLING_ROWS:
        tiles = MANY
    else:
        tiles = LARGE
    return (
        attrs.evolve(tiles, inner=128, gate_stages=2, down_stages=2)
        if weight_bytes == 1 and tiles.inner != 128
        else tiles
    )
