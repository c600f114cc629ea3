"""Which replica each rank uses, as pure data (the facts, section 8.4; golden values A2)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Cluster:
    """Expert-parallel ranks, their nodes, and the slots they hold."""

    num_ranks: int
    num_nodes: int
    num_slots: int

    def rank_of(self, slot: int) -> int:
        return slot // (self.num_slots // self.num_ranks)

    def node_of(self, rank: int) -> int:
        return rank // (self.num_ranks // self.num_nodes)


def nearest_replica(replicas: Sequence[int], rank: int, cluster: Cluster) -> int | None:
    """The replica that ``rank`` should use, None when none is nearer than the others.

    The only one; else the first on the rank itself; else the first on its node, unless all are there.
    """
    if len(replicas) == 1:
        return replicas[0]
    for slot in replicas:
        if cluster.rank_of(slot) == rank:
            return slot
    on_node = [slot for slot in replicas if cluster.node_of(cluster.rank_of(slot)) == cluster.node_of(rank)]
    return on_node[0] if on_node and len(on_node) < len(replicas) else None


def picks_of_layer(replica_lists: Sequence[Sequence[int]], cluster: Cluster, draw: random.Random) -> list[list[int]]:
    """[ranks][experts] slot that each rank uses. Ranks without a near replica share the replicas out evenly, by ``draw``.

    Every rank computes the table for all ranks from the same draw, so that the shares come out even without talking.
    """
    picks = [[-1] * len(replica_lists) for _ in range(cluster.num_ranks)]
    for expert, replicas in enumerate(replica_lists):
        waiting: list[int] = []
        for rank in range(cluster.num_ranks):
            near = nearest_replica(replicas, rank, cluster)
            if near is None:
                waiting.append(rank)
            else:
                picks[rank][expert] = near
        rounds, rest = divmod(len(waiting), len(replicas))
        shares = [*replicas] * rounds + draw.sample(list(replicas), rest)
        draw.shuffle(shares)
        for rank, slot in zip(waiting, shares, strict=True):
            picks[rank][expert] = slot
    return picks
