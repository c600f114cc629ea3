"""What stands around DeepGEMM's products: kernels against their torch twins, interpreted where there is no GPU (fp32 and fp16)."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from crossdock.ops.quantise_rows_torch import quantise_rows_torch
from crossdock_models.experts.deep_gemm.kernels.activate import quantise_places, swiglu_places
from crossdock_models.experts.deep_gemm.kernels.activate_torch import quantised_swiglu_torch, swiglu_torch
from crossdock_models.experts.deep_gemm.kernels.move_rows import move_rows
from crossdock_models.experts.deep_gemm.kernels.move_rows_torch import move_rows_torch
from crossdock_models.experts.deep_gemm.kernels.places import (
    SEGMENT_ROWS,
    Places,
    fixed_places,
    given_places,
    segment_places,
    segments_needed,
)
from crossdock_models.experts.deep_gemm.kernels.places_torch import segments_torch
from crossdock_models.experts.deep_gemm.kernels.sum_choices import sum_choices
from crossdock_models.experts.deep_gemm.kernels.sum_choices_torch import sum_choices_torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_EXPERTS, TOP_K, CAPACITY = 5, 3, 128
FP16_TOLERANCE = 2e-3
"""One rounding to 11 bits."""


def routed(num_rows: int, *, seed: int = 0, everything_to: int | None = None) -> torch.Tensor:
    """Distinct experts a row, a quarter of the choices elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
    ids[torch.rand(ids.shape, generator=generator) < 0.25] = -1
    if everything_to is not None:
        ids.fill_(-1)
        ids[:, 1] = everything_to
    return ids.to(DEVICE)


def random_rows(num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)


def representable_rows(num_rows: int, width: int) -> torch.Tensor:
    """Float8 values times a power of two a block: the interpreter loses the carry when rounding reaches the next power of two."""
    generator = torch.Generator().manual_seed(6)
    values = (torch.randn(num_rows, width, generator=generator) * 100).clamp(-440, 440)
    blocks = values.to(torch.float8_e4m3fn).float().unflatten(1, (-1, 128))
    blocks[..., 0] = 448.0
    powers = 2.0 ** torch.randint(-6, 3, blocks.shape[:2], generator=generator)
    return (blocks * powers[..., None]).flatten(1).to(DEVICE)


def some_places(kind: str, ids: torch.Tensor) -> Places:
    if kind == "segments":
        return segment_places(ids, NUM_EXPERTS, segments_needed(ids.numel(), NUM_EXPERTS))
    return fixed_places(ids, NUM_EXPERTS, CAPACITY)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 200])
def test_segments_lie_one_after_the_other_as_the_twin_says(num_rows: int) -> None:
    ids = routed(num_rows)
    places = some_places("segments", ids)
    counts, starts, groups = segments_torch(ids, NUM_EXPERTS, places.num_places, SEGMENT_ROWS)
    assert torch.equal(places.counts, counts)
    assert torch.equal(places.starts, starts)
    assert places.groups is not None
    assert torch.equal(places.groups, groups)


@pytest.mark.parametrize("num_rows", [0, 1, 200])
def test_the_device_says_how_many_places_there_are(num_rows: int) -> None:
    ids = routed(num_rows)
    found, bounded = segment_places(ids, NUM_EXPERTS, None), some_places("segments", ids)
    assert bounded.groups is not None
    assert found.num_places == int((bounded.groups >= 0).sum())
    assert found.groups is not None
    assert torch.equal(found.groups, bounded.groups[: found.num_places])


@pytest.mark.parametrize("everything_to", [None, 0, NUM_EXPERTS - 1])
@pytest.mark.parametrize("kind", ["segments", "fixed"])
def test_every_pair_has_a_place_of_its_own_among_those_of_its_expert(kind: str, everything_to: int | None) -> None:
    ids = routed(100, everything_to=everything_to)
    places = some_places(kind, ids)
    live = ids >= 0
    at = (places.starts[ids.clamp(min=0)] + places.ranks)[live]
    assert at.unique().numel() == at.numel()
    for expert in range(NUM_EXPERTS):
        mine = (places.ranks[ids == expert]).sort().values
        assert torch.equal(mine, torch.arange(mine.numel(), dtype=torch.int32, device=DEVICE))


def test_the_bound_on_segments_holds_for_every_spread_of_few_pairs() -> None:
    for num_pairs in (0, 1, 2, 127, 128, 129, 640):
        counts = [num_pairs - min(num_pairs, NUM_EXPERTS - 1), *[1] * min(num_pairs, NUM_EXPERTS - 1)]
        needed = sum(-(-count // SEGMENT_ROWS) * SEGMENT_ROWS for count in counts)
        assert needed <= segments_needed(num_pairs, NUM_EXPERTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["segments", "fixed"])
@pytest.mark.parametrize("num_rows", [0, 1, 30])
def test_rows_move_to_their_places_unchanged(kind: str, num_rows: int, dtype: torch.dtype) -> None:
    ids, rows = routed(num_rows), random_rows(num_rows, 1152, dtype)
    rows[(ids < 0).all(dim=1)] = float("nan")
    places = some_places(kind, ids)
    moved = move_rows(rows, None, ids, places, dtype)
    assert torch.equal(moved.positions >= 0, ids >= 0)
    want = move_rows_torch(rows, moved.positions, places.num_places, 0.0)
    used = moved.positions[moved.positions >= 0].long()
    assert torch.equal(moved.rows[used], want[used])
    expected = places.starts[ids.clamp(min=0)] + places.ranks
    assert torch.equal(moved.positions[ids >= 0], expected[ids >= 0])


@pytest.mark.parametrize("kind", ["segments", "fixed"])
@pytest.mark.parametrize("arrives_quantised", [True, False])
def test_quantised_rows_and_their_scales_lie_side_by_side(kind: str, arrives_quantised: bool) -> None:
    ids, rows = routed(20), representable_rows(20, 256)
    payload, scales = quantise_rows_torch(rows)
    places = some_places(kind, ids)
    given = (payload, scales) if arrives_quantised else (rows, None)
    moved = move_rows(*given, ids, places, torch.float8_e4m3fn)
    assert moved.scales is not None
    if kind == "fixed":
        assert moved.scales.stride()[1:] == (1, CAPACITY)
    by_place = moved.scales.reshape(-1, 2)
    row, k = (ids >= 0).nonzero(as_tuple=True)
    used = moved.positions[row, k].long()
    assert torch.equal(by_place[used], scales[row])
    assert torch.equal(moved.rows[used].float(), payload[row].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["segments", "fixed"])
def test_swiglu_of_live_places_is_the_twins(kind: str, dtype: torch.dtype) -> None:
    ids = routed(40)
    places = some_places(kind, ids)
    gate_up = random_rows(places.num_places, 2 * 1152, dtype)
    got, scales = swiglu_places(gate_up, places, dtype)
    assert scales is None
    used = (places.starts[ids.clamp(min=0)] + places.ranks)[ids >= 0].long()
    want = swiglu_torch(gate_up)[used]
    assert torch.allclose(got[used].float(), want, rtol=FP16_TOLERANCE, atol=FP16_TOLERANCE)


@pytest.mark.parametrize("kind", ["segments", "fixed"])
def test_quantised_swiglu_of_live_places_is_the_twins(kind: str) -> None:
    ids = routed(40)
    places = some_places(kind, ids)
    # silu(64) is 64 in float32, so that the products are representable too.
    up = representable_rows(places.num_places, 256)
    gate_up = torch.cat((torch.full_like(up, 64.0), up / 64), dim=1)
    got, scales = swiglu_places(gate_up, places, torch.float8_e4m3fn)
    assert scales is not None
    want, want_scales = quantised_swiglu_torch(gate_up)
    used = (places.starts[ids.clamp(min=0)] + places.ranks)[ids >= 0].long()
    assert torch.equal(scales.reshape(-1, 2)[used], want_scales[used])
    assert torch.equal(got[used].float(), want[used].float())


def test_rows_that_came_in_their_places_are_quantised_there() -> None:
    counts = torch.tensor([3, 0, 128], dtype=torch.int32, device=DEVICE)
    rows = representable_rows(3 * CAPACITY, 256)
    payload, scales = quantise_places(rows, given_places(counts, CAPACITY))
    want, want_scales = quantise_rows_torch(rows)
    for expert, count in enumerate((3, 0, 128)):
        first = expert * CAPACITY
        live = slice(first, first + count)
        assert torch.equal(scales[expert, :count], want_scales[live])
        assert torch.equal(payload[live].float(), want[live].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_choices_are_summed_with_their_weights(num_rows: int, dtype: torch.dtype) -> None:
    ids = routed(num_rows)
    places = some_places("fixed", ids)
    positions = torch.where(ids >= 0, places.starts[ids.clamp(min=0)] + places.ranks, -1).to(torch.int32)
    out = random_rows(places.num_places, 1152, dtype)
    unused = torch.ones(places.num_places, dtype=torch.bool, device=DEVICE)
    unused[positions[positions >= 0].long()] = False
    out[unused] = float("nan")
    weights = torch.rand(num_rows, TOP_K, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    got = sum_choices(out, positions, weights)
    want = sum_choices_torch(out, positions, weights)
    assert got.dtype is dtype
    assert torch.allclose(got.float(), want, rtol=FP16_TOLERANCE, atol=FP16_TOLERANCE)
    assert not got[(ids < 0).all(dim=1)].any()
