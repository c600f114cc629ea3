"""The typed entry of the dispatcher point refuses what cannot run."""

from __future__ import annotations

import attrs
import pytest
import torch
from crossdock.comm import local_comms
from crossdock.dispatch import make_dispatcher
from crossdock.dispatch_guard import GuardedDispatcher
from crossdock.errors import ConfigValueError, PluginDeclined, WrongPluginResult
from crossdock.groups import rank_place, resolve_sizes
from crossdock.types.dispatch import DispatcherSpec

SIZES = resolve_sizes(ranks=1)
SPEC = DispatcherSpec(
    sizes=SIZES,
    place=rank_place(SIZES, 0),
    comms=local_comms(),
    hidden_size=8,
    top_k=2,
    num_physical_experts=4,
    dtype=torch.float32,
    device=torch.device("cpu"),
    max_rows_per_rank=8,
)


@pytest.mark.parametrize("name", ["allgatherv", "alltoallv"])
def test_first_party_dispatchers_come_guarded(name: str) -> None:
    assert isinstance(make_dispatcher(name, {}, SPEC), GuardedDispatcher)


def test_an_all_to_all_dispatcher_declines_a_part_of_the_ranks() -> None:
    halves = resolve_sizes(ranks=4, attn_dp_size=4, moe_ep_size=2, moe_tp_size=2)
    with pytest.raises(PluginDeclined, match="alltoallv"):
        make_dispatcher("alltoallv", {}, attrs.evolve(SPEC, sizes=halves, place=rank_place(halves, 0)))


def test_more_micro_batches_than_it_allows_are_refused() -> None:
    with pytest.raises(WrongPluginResult, match="asked for 99 micro-batches in flight and allows 8"):
        make_dispatcher("allgatherv", {}, attrs.evolve(SPEC, max_in_flight=99))


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ConfigValueError, match="one_round_byte"):
        make_dispatcher("alltoallv", {"one_round_byte": 1}, SPEC)
    with pytest.raises(ConfigValueError, match="one_round_bytes"):
        make_dispatcher("alltoallv", {"one_round_bytes": -1}, SPEC)
