"""Opens what makes the ranks of a run agree on each step: the leaders' exchange, and the channel of each leader to its peers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from crossdock.comm import RankComms
from crossdock.engine_seams import StepSync
from crossdock.exchange import StoreNotice
from crossdock.exchange_create import create_exchange, create_peer_channel
from crossdock.rank_plan import RankPlan
from crossdock.rank_sync import RankSync
from crossdock.step import StepRules

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@contextmanager
def open_step_sync(plan: RankPlan, rules: StepRules, comms: RankComms, store: Store | None) -> Generator[StepSync]:
    """The sync of this rank; closed when the block is left. Collective.

    Args:
        plan: of this rank.
        rules: by which every rank decides.
        comms: its groups.
        store: where the ranks met; None for a job of one rank, and where all ranks are threads of one process.
    """
    launch = plan.config.launch
    notice = None if store is None else StoreNotice(store)
    exchange = create_exchange(
        sizes=plan.sizes,
        place=plan.place,
        comms=comms,
        store=store,
        transport=launch.exchange,
        timeout_s=launch.step_deadline_s,
    )
    peers = create_peer_channel(comms=comms, store=store, transport=launch.exchange, timeout_s=launch.step_deadline_s)
    try:
        yield RankSync(rules=rules, exchange=exchange, peers=peers, notice=notice)
    finally:
        if exchange is not None:
            exchange.close()
