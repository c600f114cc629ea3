"""Which parallel layouts a dispatcher is checked in: those that this machine has devices for and the plugin serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from crossdock.groups import resolve_sizes
from crossdock.testing.conformance import NotCheckable, PluginCase
from crossdock.testing.dispatch_flights import declared_capabilities
from crossdock.types.dispatch import DispatcherCapabilities
from crossdock.types.parallel import ParallelSizes

WIDTHS: Mapping[int, tuple[tuple[int, int, int], ...]] = {
    1: ((1, 1, 1),),
    2: ((2, 1, 2), (1, 2, 2), (2, 1, 1), (1, 2, 1)),
    4: ((4, 1, 4), (2, 2, 4), (1, 4, 4), (2, 2, 2), (4, 1, 2)),
}
"""(attn_dp, attn_tp, moe_ep) by number of ranks; moe_tp is the rest."""


def world_sizes(case: PluginCase) -> list[int]:
    """Numbers of ranks that this machine has devices for and the dispatcher serves.

    Raises:
        NotCheckable: there is none; says why.
    """
    # Two ranks can share a GPU (see the pool's worker).
    here = [size for size in WIDTHS if case.device == "cpu" or size <= max(2, torch.cuda.device_count())]
    served = [size for size in here if layouts_of(case, size)]
    if not served:
        raise NotCheckable(f"serves no layout of {', '.join(map(str, here))} ranks: {_why_not(case, here)}")
    return served


def layouts_of(case: PluginCase, world_size: int) -> list[ParallelSizes]:
    """The layouts of so many ranks that the dispatcher serves."""
    every = [
        resolve_sizes(ranks=world_size, attn_dp_size=dp, attn_tp_size=tp, moe_ep_size=ep, moe_tp_size=world_size // ep)
        for dp, tp, ep in WIDTHS[world_size]
    ]
    return [sizes for sizes in every if _is_served(case, sizes)]


def two_ranks(case: PluginCase) -> ParallelSizes:
    """A layout of two ranks.

    Raises:
        NotCheckable: they are not served, or not there.
    """
    if 2 not in world_sizes(case):
        raise NotCheckable("two ranks are not there, or not served")
    return layouts_of(case, 2)[0]


def capabilities_of(case: PluginCase, sizes: ParallelSizes, rows: int = 0) -> DispatcherCapabilities:
    """What the plugin's hook says for a layout, and for at most so many rows a rank; 0 leaves that open.

    Raises:
        NotCheckable: it refuses, cannot say, or runs on other devices only.
    """
    return declared_capabilities(case.name, case.options, sizes, case.device, rows)


def _is_served(case: PluginCase, sizes: ParallelSizes) -> bool:
    try:
        needs_full_ep = capabilities_of(case, sizes).needs_full_ep
    except NotCheckable:
        return False
    return not needs_full_ep or sizes.moe_ep_size == sizes.ranks


def _why_not(case: PluginCase, here: Sequence[int]) -> str:
    """What the hook answers for the most ranks that are there."""
    try:
        capabilities_of(case, resolve_sizes(ranks=max(here, default=1)))
    except NotCheckable as reason:
        return str(reason)
    return "it needs its experts on all ranks"
