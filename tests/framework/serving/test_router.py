"""Which replica takes a request, and what is known of replicas between two load reports."""

from __future__ import annotations

import pytest
from crossdock.errors import ConfigValueError, OverloadedError, RequestError
from crossdock.serving.replicas import Replica, ReplicaState
from crossdock.serving.router import ROUTER_NAMES, make_router, prefix_blocks, route
from crossdock.types.request import EngineRequest, ReplicaLoad, SamplingParams


def request(rid: str, length: int = 10, first: int = 1) -> EngineRequest:
    ids = tuple((first + place) % 500 for place in range(length))
    return EngineRequest(rid=rid, prompt_ids=ids, sampling=SamplingParams(max_new_tokens=8))


def replicas(count: int) -> list[Replica]:
    made = [Replica(attn_dp_rank=rank, leader=rank) for rank in range(count)]
    for replica in made:
        replica.progressed()
    return made


def load(rank: int, *, running: int = 0, tokens: int = 0, pairs: int = 0, step: int = 1) -> ReplicaLoad:
    return ReplicaLoad(
        attn_dp_rank=rank, running=running, waiting=0, tokens=tokens, attention_pairs=pairs, kv_usage=0.0, step=step
    )


def send(name: str, group: list[Replica], count: int, length: int = 10) -> list[int]:
    router = make_router(name)
    chosen = []
    for index in range(count):
        one = request(f"r{index}", length)
        replica = route(one, group, router, None)
        replica.sent(one)
        chosen.append(replica.attn_dp_rank)
    return chosen


@pytest.mark.parametrize("name", ["round_robin", "least_requests", "least_tokens"])
def test_a_burst_between_two_load_reports_is_spread_evenly(name: str) -> None:
    chosen = send(name, replicas(4), 40)
    assert [chosen.count(rank) for rank in range(4)] == [10, 10, 10, 10]


def test_least_tokens_evens_out_what_reports_say() -> None:
    group = replicas(2)
    group[0].reported(load(0, tokens=1000))
    assert send("least_tokens", group, 10, length=50) == [1] * 10


def test_attention_pairs_weigh_a_long_context_against_many_short_ones() -> None:
    group = replicas(2)
    group[0].reported(load(0, running=1, tokens=30_000, pairs=30_000 * 30_000 // 2))
    group[1].reported(load(1, running=60, tokens=30_500, pairs=60 * 500 * 500 // 2))
    assert send("least_tokens", group, 1) == [1]


def test_a_reservation_ends_when_a_report_counts_the_request() -> None:
    (replica,) = replicas(1)
    for index in range(3):
        replica.sent(request(f"r{index}", length=100))
    assert replica.tokens == 300
    replica.reported(load(0, running=2, tokens=210))
    assert replica.tokens == 310  # two are counted, the youngest is still reserved
    replica.reported(load(0, running=3, tokens=320, step=2))
    assert replica.tokens == 320
    replica.finished("r0")
    replica.reported(load(0, running=2, tokens=220, step=3))
    assert replica.tokens == 220


def test_prefix_affinity_follows_the_prefix_until_its_owner_is_overloaded() -> None:
    group = replicas(2)
    router = make_router("prefix_affinity")
    first = route(request("a", 200), group, router, None)
    assert route(request("b", 200), group, router, None) is first
    other = route(request("c", 200, first=9), [replica for replica in group if replica is not first], router, None)
    assert route(request("d", 300, first=9), group, router, None) is other
    first.reported(load(first.attn_dp_rank, tokens=50_000))
    assert route(request("e", 200), group, router, None) is other


def test_prefix_blocks_are_chained() -> None:
    ids = list(range(200))
    assert prefix_blocks(ids)[:2] == prefix_blocks(ids[:130])
    changed = [7, *ids[1:]]
    assert not set(prefix_blocks(ids)) & set(prefix_blocks(changed))


@pytest.mark.parametrize("name", ROUTER_NAMES)
def test_failed_and_stuck_replicas_get_nothing(name: str) -> None:
    group = replicas(3)
    group[0].change(ReplicaState.FAILED)
    group[2].change(ReplicaState.STUCK)
    assert set(send(name, group, 6)) == {1}
    group[1].change(ReplicaState.FAILED)
    with pytest.raises(OverloadedError, match="no replica") as refused:
        route(request("x"), group, make_router(name), None)
    assert refused.value.http_status == 503


def test_a_pin_is_obeyed_or_refused() -> None:
    group = replicas(2)
    router = make_router("least_requests")
    group[1].sent(request("a"))
    assert route(request("b"), group, router, 1) is group[1]
    with pytest.raises(RequestError, match="no replica") as refused:
        route(request("c"), group, router, 2)
    assert refused.value.field == "routed_dp_rank"
    group[1].change(ReplicaState.FAILED)
    with pytest.raises(OverloadedError, match="replica 1"):
        route(request("d"), group, router, 1)


def test_an_unknown_policy_names_those_that_exist() -> None:
    with pytest.raises(ConfigValueError, match="least_tokens"):
        make_router("random")
