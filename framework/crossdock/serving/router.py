"""Which replica takes a request."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import xxhash

from crossdock.errors import ConfigValueError, OverloadedError, RequestError
from crossdock.serving.replicas import Replica
from crossdock.types.request import EngineRequest

PAIRS_PER_TOKEN = 4096
"""Query-key pairs that weigh as much as one token: a token's projections and experts cost about as much as its attention
over a context of some thousand tokens (hidden size 2k to 7k)."""
PREFIX_BLOCK_TOKENS = 64
MAX_PREFIX_BLOCKS = 64
MAX_REMEMBERED_PREFIXES = 100_000
IMBALANCE_TOKENS = 4096
IMBALANCE_RATIO = 1.5


class Router(Protocol):
    """Chooses among usable replicas, of which there is at least one."""

    def choose(self, request: EngineRequest, replicas: Sequence[Replica]) -> Replica: ...


@attrs.define
class RoundRobin:
    """Each replica in turn."""

    _turn: itertools.count[int] = attrs.Factory(itertools.count)

    def choose(self, request: EngineRequest, replicas: Sequence[Replica]) -> Replica:
        return replicas[next(self._turn) % len(replicas)]


@attrs.define
class LeastRequests:
    """The one with the fewest requests in flight; the frontend's own count, so no report can be late."""

    def choose(self, request: EngineRequest, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda replica: len(replica.in_flight))


@attrs.define
class LeastTokens:
    """The one with the least work: tokens plus weighted attention pairs, from its reports and our reservations."""

    def choose(self, request: EngineRequest, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=work_tokens)


@attrs.define
class PrefixAffinity:
    """The one that saw the longest prefix of this prompt, unless it has far more work than the least busy one."""

    _owners: OrderedDict[int, int] = attrs.Factory(OrderedDict)
    """Chained block hash to attn_dp_rank, least recently used first."""

    def choose(self, request: EngineRequest, replicas: Sequence[Replica]) -> Replica:
        blocks = prefix_blocks(request.prompt_ids)
        least = min(replicas, key=work_tokens)
        by_rank = {replica.attn_dp_rank: replica for replica in replicas}
        owner = next(
            (by_rank[self._owners[block]] for block in reversed(blocks) if self._owners.get(block) in by_rank), None
        )
        chosen = least if owner is None or _is_overloaded(owner, least) else owner
        for block in blocks:
            self._owners[block] = chosen.attn_dp_rank
            self._owners.move_to_end(block)
        while len(self._owners) > MAX_REMEMBERED_PREFIXES:
            self._owners.popitem(last=False)
        return chosen


_POLICIES: Mapping[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "prefix_affinity": PrefixAffinity,
}
ROUTER_NAMES = tuple(_POLICIES)


def make_router(name: str) -> Router:
    """The policy of ``server.router``.

    Raises:
        ConfigValueError: there is no such policy.
    """
    policy = _POLICIES.get(name)
    if policy is None:
        raise ConfigValueError([f"server.router: no policy {name!r}; there are {', '.join(ROUTER_NAMES)}"])
    return policy()


def route(request: EngineRequest, replicas: Sequence[Replica], router: Router, pinned: int | None) -> Replica:
    """The replica for a request: the pinned one, else the policy's choice among usable ones.

    Raises:
        RequestError: the pin names no replica.
        OverloadedError: the pinned replica, or every replica, is out of service (503).
    """
    if pinned is not None and pinned >= len(replicas):
        message = f"routed_dp_rank: {pinned} is no replica; there are {len(replicas)}, counted from 0"
        raise RequestError(message, field="routed_dp_rank")
    usable = [replica for replica in replicas if replica.usable and pinned in (None, replica.attn_dp_rank)]
    if not usable:
        which = "no replica is" if pinned is None else f"replica {pinned} is not"
        raise OverloadedError(
            f"{which} in service now; see /health and try again later", retry_after_s=5, http_status=503
        )
    return router.choose(request, usable)


def work_tokens(replica: Replica) -> float:
    """A replica's work in tokens."""
    return replica.tokens + replica.attention_pairs / PAIRS_PER_TOKEN


def prefix_blocks(prompt_ids: Sequence[int]) -> list[int]:
    """Chained hashes of the prompt's full blocks: equal hashes mean equal prefixes up to there."""
    hashes: list[int] = []
    digest = 0
    full = min(len(prompt_ids) // PREFIX_BLOCK_TOKENS, MAX_PREFIX_BLOCKS)
    for block in range(full):
        ids = prompt_ids[block * PREFIX_BLOCK_TOKENS : (block + 1) * PREFIX_BLOCK_TOKENS]
        digest = xxhash.xxh3_64_intdigest(b"".join(token.to_bytes(4, "little") for token in ids), seed=digest)
        hashes.append(digest)
    return hashes


def _is_overloaded(replica: Replica, least: Replica) -> bool:
    work, low = work_tokens(replica), work_tokens(least)
    return work > low + IMBALANCE_TOKENS and work > low * IMBALANCE_RATIO
