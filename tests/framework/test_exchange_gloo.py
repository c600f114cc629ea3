"""The exchange between machines, over gloo and the store."""

import time

import pytest
import torch.distributed as dist
from crossdock.errors import ExchangeTimeout, RankLost
from crossdock.exchange import StoreNotice
from crossdock.exchange_create import create_exchange
from crossdock.groups import resolve_sizes
from crossdock.testing.world import RankPool
from crossdock.types.step import StepRecord


def opened(context, path, timeout_s=20.0, **options):
    sizes = resolve_sizes(ranks=context.size, attn_dp_size=context.size)
    return create_exchange(
        sizes=sizes,
        place=context.place(sizes),
        comms=context.comms_of(sizes),
        store=dist.FileStore(path, context.size),
        timeout_s=timeout_s,
        **options,
    )


def many_steps(context, path, steps):
    exchange = opened(context, path, machine=f"machine {context.rank}")
    for step in range(steps):
        table = exchange.exchange(StepRecord(num_tokens=1000 * context.rank + step, step=step))
        assert [row.num_tokens for row in table] == [1000 * rank + step for rank in range(context.size)]
    return exchange.transport


@pytest.mark.parametrize("ranks", [2, 4])
def test_records_travel_over_gloo_between_machines(rank_pool, tmp_path, ranks):
    assert rank_pool(ranks).run(many_steps, str(tmp_path / "store"), 50) == ["gloo"] * ranks


def one_comes_late(context, path):
    exchange = opened(context, path, timeout_s=0.5, transport="gloo")
    exchange.exchange(StepRecord(step=16, local_forward_mode=1, num_tokens=300))
    try:
        if context.rank == 1:
            time.sleep(2.5)
        exchange.exchange(StepRecord(step=17))
    except (ExchangeTimeout, RankLost) as error:
        return type(error).__name__, str(error), list(getattr(error, "missing_ranks", []))


def test_a_deadline_names_the_rank_that_did_not_answer_the_roll_call(tmp_path):
    with RankPool(3) as pool:
        first, _, other = pool.run(one_comes_late, str(tmp_path / "store"))
    for waiting in (first, other):
        assert waiting[0] in ("ExchangeTimeout", "RankLost")
        assert "step 17: replica 1 (rank 1, last seen at step 16, prefill with 300 tokens) did not arrive" in waiting[1]
    assert "over gloo within 0.5 s" in first[1]


def one_leaves_a_notice(context, path):
    exchange = opened(context, path, timeout_s=30.0, transport="gloo")
    if context.rank == 1:
        exchange.abort("rank 1 failed: no memory")
        time.sleep(1.0)
        return 0.0, ""
    started_s = time.monotonic()
    try:
        exchange.exchange(StepRecord())
    except RankLost as error:
        return time.monotonic() - started_s, str(error)


def test_a_notice_in_the_store_ends_the_wait(tmp_path):
    with RankPool(2) as pool:
        waited_s, message = pool.run(one_leaves_a_notice, str(tmp_path / "store"))[0]
    assert message == "rank 1 failed: no memory"
    assert waited_s < 5


def test_the_first_notice_stays(tmp_path):
    notice = StoreNotice(dist.FileStore(str(tmp_path / "store"), 1))
    assert notice.read() is None
    notice.write("the cause")
    notice.write("a consequence")
    assert notice.read() == "the cause"
