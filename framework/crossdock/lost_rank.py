"""A collective that broke says that somebody is gone, not who: a bound on how long one may take, and a roll call that finds the name."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroup

from crossdock.comm import RankComms
from crossdock.comm_gloo import GlooComm
from crossdock.comm_nccl import NcclComm
from crossdock.comm_shared import SharedComm
from crossdock.errors import RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ROLL_CALL_S = 2.0
"""How long the living have to answer; they all found the same collective broken."""
_ROLL_CALL_POLL_S = 0.05


def limit_collectives(comms: RankComms, timeout_s: float) -> None:
    """From now on a collective of these groups fails after ``timeout_s``. At start they may take longer, while ranks load weights."""
    limit = datetime.timedelta(seconds=timeout_s)
    # Private, but the only way that torch offers to change the timeout of a group that exists.
    set_timeout: Callable[[datetime.timedelta, ProcessGroup], None] = getattr(c10d, "_set_pg_timeout")  # noqa: B009
    for groups in (comms, comms.host):
        for comm in (groups.world, groups.attn_tp, groups.moe_ep, groups.moe_tp):
            if isinstance(comm, SharedComm):
                comm.state.timeout_s = timeout_s
            if isinstance(comm, GlooComm | NcclComm):
                set_timeout(limit, comm.group)


def is_broken_collective(error: RankLost) -> bool:
    """The error comes from a collective itself, not from a rank or supervisor that said why it ended."""
    return error.rank is None and isinstance(error.__cause__, RuntimeError)


def roll_call(store: Store, rank: int, ranks: int, wait_s: float) -> tuple[int, ...]:
    """Ranks that do not answer. Every rank that finds a collective broken calls it; answers stay, so the order does not matter."""
    keys = [f"crossdock/alive/{one}" for one in range(ranks)]
    store.set(keys[rank], "1")
    ends_s = time.monotonic() + wait_s
    while time.monotonic() < ends_s and not store.check(keys):
        time.sleep(_ROLL_CALL_POLL_S)
    return tuple(one for one, key in enumerate(keys) if not store.check([key]))


def named(error: RankLost, store: Store, rank: int, ranks: int) -> RankLost:
    """``error`` with the rank that is to blame, where the roll call finds one."""
    try:
        missing = roll_call(store, rank, ranks, ROLL_CALL_S)
    except RuntimeError:
        # The store went with the rank or machine that hosted it.
        return error
    if not missing:
        return error
    listed = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    return RankLost(
        f"{listed} ended or stopped in the middle of a step; found by rank {rank}: {error}", rank=missing[0]
    )
