"""The fake pick overwrites routing with random scores."""

from __future__ import annotations

import numpy as np
import torch
from crossdock.comm import local_comms
from crossdock.groups import rank_place, resolve_sizes
from crossdock.location import make_expert_location, placement_maps
from crossdock.types.location import Picker, PickerSpec
from crossdock.types.placement import Placement, Topology

SIZES = resolve_sizes(ranks=2, attn_dp_size=2)


def picker(*, replicated: bool, rank: int) -> Picker:
    placement = Placement.from_physical(np.array([[0, 1, 2, 3, 0, 1]]), 4)
    spec = PickerSpec(
        maps=placement_maps(placement, torch.device("cpu")),
        topology=Topology(num_gpus=2, num_nodes=1, num_physical_experts=6),
        sizes=SIZES,
        place=rank_place(SIZES, rank),
        comms=local_comms(),
        replicated_rows=replicated,
    )
    return make_expert_location("fake", {}, spec)


def test_scores_are_uniform_from_5_to_10_and_the_bias_is_zero() -> None:
    logits, bias = picker(replicated=False, rank=0).transform_router(torch.full((500, 4), -3.0), torch.ones(4))
    assert 5.0 <= float(logits.min()) < 5.1
    assert 9.9 < float(logits.max()) <= 10.0
    assert bias is not None
    assert not bias.any()
    assert picker(replicated=False, rank=0).transform_router(logits, None)[1] is None


def test_every_expert_gets_about_the_same() -> None:
    logits, _ = picker(replicated=False, rank=0).transform_router(torch.zeros(4000, 4), None)
    shares = torch.bincount(logits.topk(2).indices.flatten(), minlength=4) / 8000
    assert float((shares - 0.25).abs().max()) < 0.02


def test_ranks_with_the_same_rows_draw_the_same_and_others_do_not() -> None:
    logits = torch.zeros(20, 4)
    same = [picker(replicated=True, rank=rank).transform_router(logits, None)[0] for rank in range(2)]
    other = [picker(replicated=False, rank=rank).transform_router(logits, None)[0] for rank in range(2)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(other[0], other[1])


def test_it_says_that_it_cannot_be_captured() -> None:
    assert not picker(replicated=False, rank=0).capabilities.capturable
