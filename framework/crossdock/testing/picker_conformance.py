"""What must hold for a replica picker: a pick is a replica of the expert, ranks agree where they must, a changed placement is followed."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt
import torch

from crossdock.errors import PluginDeclined
from crossdock.groups import resolve_sizes
from crossdock.location import make_expert_location, overwrite_layer, placement_maps
from crossdock.ops.host_lists import int_list
from crossdock.testing.conformance import NotCheckable, PluginCase, check_of
from crossdock.testing.world import OneProcessWorld, RankContext
from crossdock.types.location import Picker, PickerSpec, PlacementMaps
from crossdock.types.placement import Placement, Topology

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS, TOP_K = 2, 6, 4, 2
NUM_SLOTS = 12
SIZES = resolve_sizes(ranks=NUM_RANKS, attn_dp_size=NUM_RANKS)


def seeded_placement(seed: int) -> Placement:
    """Every expert at least once, the other slots at random."""
    generator = np.random.default_rng(seed)
    layers: list[npt.NDArray[np.int64]] = []
    for _ in range(NUM_LAYERS):
        extra = generator.integers(0, NUM_EXPERTS, NUM_SLOTS - NUM_EXPERTS)
        layers.append(generator.permutation(np.concatenate((np.arange(NUM_EXPERTS), extra))))
    return Placement.from_physical(np.stack(layers), NUM_EXPERTS)


@attrs.frozen(kw_only=True, eq=False)
class _Picks:
    """What one rank saw."""

    declined: bool
    first: torch.Tensor = attrs.field(factory=lambda: torch.empty(0))
    second: torch.Tensor = attrs.field(factory=lambda: torch.empty(0))
    logical_ids: torch.Tensor = attrs.field(factory=lambda: torch.empty(0))
    rank_invariant: bool = False


def _built(
    context: RankContext, name: str, options: Mapping[str, object], replicated_rows: bool
) -> tuple[Picker, PlacementMaps]:
    maps = placement_maps(seeded_placement(0), torch.device("cpu"))
    spec = PickerSpec(
        maps=maps,
        topology=Topology(num_gpus=NUM_RANKS, num_nodes=2, num_physical_experts=NUM_SLOTS),
        sizes=SIZES,
        place=context.place(SIZES),
        comms=context.comms_of(SIZES),
        replicated_rows=replicated_rows,
        seed=3,
    )
    return make_expert_location(name, options, spec), maps


def _pick_before_and_after(
    context: RankContext, name: str, options: Mapping[str, object], replicated_rows: bool, rows: int
) -> _Picks:
    """Picks by one placement, then by another that overwrote the maps in place. The same rows on all ranks."""
    try:
        picker, maps = _built(context, name, options, replicated_rows)
    except PluginDeclined:
        return _Picks(declined=True)
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(rows, NUM_EXPERTS, generator=generator)
    scores, _ = picker.transform_router(logits, None)
    ids = scores.argsort(dim=1, descending=True)[:, :TOP_K]
    addresses = [tensor.data_ptr() for tensor in (maps.physical_to_logical, maps.logical_to_physical)]
    first = [picker.pick(layer, ids, rows).clone() for layer in range(NUM_LAYERS)]
    for layer in range(NUM_LAYERS):
        overwrite_layer(maps, layer, seeded_placement(1))
        picker.placement_changed(layer)
    second = [picker.pick(layer, ids, rows).clone() for layer in range(NUM_LAYERS)]
    assert addresses == [tensor.data_ptr() for tensor in (maps.physical_to_logical, maps.logical_to_physical)]
    return _Picks(
        declined=False,
        first=torch.stack(first),
        second=torch.stack(second),
        logical_ids=ids,
        rank_invariant=picker.capabilities.rank_invariant,
    )


def _all_picks(case: PluginCase, *, replicated_rows: bool, rows: int) -> list[_Picks]:
    return OneProcessWorld(SIZES).run(_pick_before_and_after, case.name, dict(case.options), replicated_rows, rows)


def check_a_pick_is_a_replica_of_the_expert(case: PluginCase) -> None:
    for picks in _all_picks(case, replicated_rows=False, rows=40):
        assert not picks.declined, "declined where ranks hold different rows"
        for found, placement in ((picks.first, seeded_placement(0)), (picks.second, seeded_placement(1))):
            owners = torch.tensor(placement.physical_to_logical)
            for layer in range(NUM_LAYERS):
                assert torch.equal(owners[layer][found[layer]], picks.logical_ids), f"layer row {layer}: another expert"


def check_ranks_with_the_same_rows_pick_the_same(case: PluginCase) -> None:
    picks = _all_picks(case, replicated_rows=True, rows=40)
    if picks[0].declined:
        assert all(each.declined for each in picks), "some ranks declined and some did not"
        raise NotCheckable("declines where ranks hold the same rows")
    assert picks[0].rank_invariant, "accepts replicated rows without promising rank-invariant picks"
    for each in picks[1:]:
        assert torch.equal(each.first, picks[0].first), "picks differ between ranks"
        assert torch.equal(each.second, picks[0].second), "picks differ between ranks after a switch"


def check_zero_rows_and_one_row_are_fine(case: PluginCase) -> None:
    for rows in (0, 1):
        for picks in _all_picks(case, replicated_rows=False, rows=rows):
            assert picks.first.shape == (NUM_LAYERS, rows, TOP_K), f"{rows} rows gave {list(picks.first.shape)}"


def _pick_with_padding(context: RankContext, name: str, options: Mapping[str, object]) -> list[torch.Tensor]:
    """Picks of a batch with rows that carry no token in the middle and at the end."""
    picker, _ = _built(context, name, options, replicated_rows=False)
    ids = torch.tensor([[0, 1], [-1, -1], [2, 5], [-1, -1], [-1, -1]])
    return [picker.pick(layer, ids.clone(), 3).clone() for layer in range(NUM_LAYERS)]


def check_rows_without_a_token_disturb_nobody(case: PluginCase) -> None:
    placement = seeded_placement(0)
    for picks in OneProcessWorld(SIZES).run(_pick_with_padding, case.name, dict(case.options)):
        for layer, found in enumerate(picks):
            owners = torch.from_numpy(placement.physical_to_logical[layer])
            assert owners[found[0]].tolist() == [0, 1], f"layer row {layer}: another expert beside padding"
            assert owners[found[2]].tolist() == [2, 5], f"layer row {layer}: another expert behind padding"


def check_replicas_share_the_load(case: PluginCase) -> None:
    """Over all ranks every replica gets tokens of an expert that is asked for often."""
    placement = seeded_placement(0)
    picks = _all_picks(case, replicated_rows=False, rows=200)
    for layer in range(NUM_LAYERS):
        used = {slot for each in picks for slot in int_list(each.first[layer].flatten())}
        asked = {expert for each in picks for expert in int_list(each.logical_ids.flatten())}
        wanted = {slot for slot, expert in enumerate(placement.physical_to_logical[layer]) if int(expert) in asked}
        assert len(used) >= 0.7 * len(wanted), f"layer row {layer}: slots {sorted(wanted - used)} never got a token"


def check_the_same_start_picks_the_same(case: PluginCase) -> None:
    first, second = (_all_picks(case, replicated_rows=False, rows=17) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.first, other.first), "a run is not repeatable"
        assert torch.equal(one.second, other.second), "a run is not repeatable after a switch"


CHECKS = tuple(
    check_of(check)
    for check in (
        check_a_pick_is_a_replica_of_the_expert,
        check_ranks_with_the_same_rows_pick_the_same,
        check_zero_rows_and_one_row_are_fine,
        check_rows_without_a_token_disturb_nobody,
        check_replicas_share_the_load,
        check_the_same_start_picks_the_same,
    )
)
