"""Rows a rank can bring follow from the limits; a start that cannot hold them is refused with the number."""

from __future__ import annotations

import pytest
from crossdock.dispatch_capacity import RowLimits, check_capacity, needed_rows_per_rank
from crossdock.errors import CapacityTooSmall
from crossdock.groups import resolve_sizes
from crossdock.types.dispatch import DispatcherCapabilities, ReceiveLayout
from crossdock.types.layout import ATTN_ROWS, COMPLETE, FULL_ROWS, LOCAL_ROWS, Layout

LIMITS = RowLimits(max_step_tokens=9, max_running_requests=5)


@pytest.mark.parametrize(
    ("layout", "prefills", "needed"),
    [
        (LOCAL_ROWS, True, 5),  # 9 -> 10 rows a replica, half of them
        (ATTN_ROWS, True, 10),
        (FULL_ROWS, True, 20),  # both replicas padded to the largest
        (LOCAL_ROWS, False, 3),  # 5 -> 6 decode rows
        (FULL_ROWS, False, 12),
    ],
)
def test_rows_of_two_replicas_of_two_ranks(layout: Layout, prefills: bool, needed: int) -> None:
    sizes = resolve_sizes(ranks=4, attn_dp_size=2, attn_tp_size=2)
    assert needed_rows_per_rank(LIMITS, layout, sizes, prefills=prefills) == needed


def test_the_largest_graph_bucket_and_the_warm_up_count_too() -> None:
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    bucket = RowLimits(max_step_tokens=9, max_running_requests=5, largest_bucket=16)
    warm_up = RowLimits(max_step_tokens=9, max_running_requests=5, warmup_tokens=17)
    assert needed_rows_per_rank(bucket, LOCAL_ROWS, sizes, prefills=False) == 16
    assert needed_rows_per_rank(warm_up, LOCAL_ROWS, sizes, prefills=False) == 17


def test_a_capacity_of_8_takes_8_and_refuses_9_with_the_number() -> None:
    capabilities = DispatcherCapabilities(
        layouts=frozenset({ReceiveLayout.EXPERT_MAJOR}),
        input_rows=LOCAL_ROWS,
        output_rows=LOCAL_ROWS,
        output_owed=COMPLETE,
        needs_full_ep=True,
        rank_invariant_picks_needed=False,
        capacity_rows_per_rank=8,
    )
    check_capacity("some", capabilities, 8)
    with pytest.raises(CapacityTooSmall, match="at most 8 rows a rank and the limits allow 9") as found:
        check_capacity("some", capabilities, 9)
    assert found.value.needed == 9
