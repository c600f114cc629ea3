"""The exchange over shared memory, between real processes."""

import os
import signal
import time
from pathlib import Path

import attrs
import numpy as np
import pytest
from crossdock.comm import local_comms
from crossdock.errors import ExchangeTimeout, RankLost, SelectionRefused
from crossdock.exchange import OneReplica
from crossdock.exchange_create import create_exchange
from crossdock.exchange_shared import SharedMemoryExchange, SharedTable, table_bytes
from crossdock.groups import rank_place, resolve_sizes
from crossdock.shared_memory import mapped_bytes
from crossdock.testing.world import RankFailure, RankPool
from crossdock.types.step import StepRecord


def opened(context, timeout_s=20.0, transport="shm", machine=None, **widths):
    sizes = resolve_sizes(ranks=context.size, **(widths or {"attn_dp_size": context.size}))
    return create_exchange(
        sizes=sizes,
        place=context.place(sizes),
        comms=context.comms_of(sizes),
        store=None,
        transport=transport,
        timeout_s=timeout_s,
        machine=machine,
    )


def many_steps(context, steps):
    """Every rank checks every table against what each replica must have sent; some ranks are slow now and then."""
    exchange = opened(context)
    for step in range(steps):
        if (step + context.rank) % 37 == 0:
            time.sleep(0.002)
        table = exchange.exchange(StepRecord(num_tokens=1000 * context.rank + step, step=step, eplb_pass=-step))
        expected = [(1000 * rank + step, step, -step) for rank in range(context.size)]
        assert [(row.num_tokens, row.step, row.eplb_pass) for row in table] == expected
    return exchange.transport


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_replica_gets_every_record_of_every_step_with_more_ranks_than_cores_too(rank_pool, ranks):
    assert rank_pool(ranks).run(many_steps, 600) == ["shm"] * ranks


def every_field(context):
    names = [field.name for field in attrs.fields(StepRecord)]
    record = StepRecord(**{name: 100 * context.rank + number for number, name in enumerate(names)})
    return [attrs.astuple(row) for row in opened(context).exchange(record)]


def test_every_field_of_a_record_arrives(rank_pool):
    count = len(attrs.fields(StepRecord))
    expected = [tuple(100 * rank + number for number in range(count)) for rank in range(2)]
    assert rank_pool(2).run(every_field) == [expected] * 2


def one_comes_late(context):
    exchange = opened(context, timeout_s=0.5)
    exchange.exchange(StepRecord(step=16, local_forward_mode=2, num_tokens=3))
    try:
        if context.rank == 1:
            time.sleep(1.0)
        exchange.exchange(StepRecord(step=17))
    except (ExchangeTimeout, RankLost) as error:
        return type(error).__name__, str(error), list(getattr(error, "missing_ranks", []))


def test_a_deadline_names_the_rank_that_did_not_arrive_and_where_it_was_last_seen(rank_pool):
    waiting, late = rank_pool(2).run(one_comes_late)
    assert waiting[0] == "ExchangeTimeout" and waiting[2] == [1]
    assert "step 17: replica 1 (rank 1, last seen at step 16, decode with 3 tokens) did not arrive" in waiting[1]
    assert "over shared memory within 0.5 s" in waiting[1]
    assert late[:2] == ("RankLost", waiting[1])


def one_gives_up(context):
    exchange = opened(context, timeout_s=30.0)
    if context.rank == 1:
        exchange.abort("rank 1 failed: no memory")
        return 0.0, ""
    started_s = time.monotonic()
    try:
        exchange.exchange(StepRecord())
    except RankLost as error:
        return time.monotonic() - started_s, str(error)


def test_an_abort_ends_the_wait_of_the_others_at_once_with_its_reason(rank_pool):
    waited_s, message = rank_pool(2).run(one_gives_up)[0]
    assert message == "rank 1 failed: no memory"
    assert waited_s < 5


def leaders_only(context):
    exchange = opened(context, attn_dp_size=2)
    return (
        exchange
        if exchange is None
        else [row.num_tokens for row in exchange.exchange(StepRecord(num_tokens=context.rank))]
    )


def test_only_leaders_hold_an_end(rank_pool):
    assert rank_pool(4).run(leaders_only) == [[0, 2], None, [0, 2], None]


def wait_and_work(context):
    exchange = opened(context)
    if context.rank == 1:
        time.sleep(0.3)
    exchange.exchange(StepRecord())
    return exchange.waited_s


def test_the_wait_is_measured_on_the_rank_that_waits(rank_pool):
    waited_s = rank_pool(2).run(wait_and_work)
    assert waited_s[0] > 0.2
    assert waited_s[1] < 0.2


def shared_mappings(context):
    exchange = opened(context)
    exchange.exchange(StepRecord())
    rows = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {row[5] for row in rows if row[1].endswith("s") and "crossdock" in row[-1]}


def test_shared_memory_has_no_name_so_nothing_is_left_however_a_rank_ends(rank_pool):
    assert rank_pool(2).run(shared_mappings) == [{"/memfd:crossdock (deleted)"}] * 2


def test_memory_whose_creator_has_gone_on_to_another_file_is_not_mapped(tmp_path):
    with (tmp_path / "other").open("wb+") as other:
        other.truncate(4096)
        inode = os.fstat(other.fileno()).st_ino
        assert mapped_bytes(os.getpid(), other.fileno(), inode, 4096) is not None
        assert mapped_bytes(os.getpid(), other.fileno(), inode + 1, 4096) is None
        assert mapped_bytes(os.getpid(), other.fileno(), inode, 8192) is None
    assert mapped_bytes(os.getpid(), 1 << 20, 1, 4096) is None
    assert mapped_bytes(0, 0, 0, 4096) is None


def wait_for_a_killed_one(context, report):
    exchange = opened(context, timeout_s=60.0)
    exchange.exchange(StepRecord())
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        exchange.exchange(StepRecord(step=1))
    except RankLost as error:
        Path(report).write_text(f"{error.rank} {error}")


def test_a_killed_rank_is_noticed_and_named_long_before_the_deadline(tmp_path):
    report = tmp_path / "report"
    with RankPool(2) as pool, pytest.raises(RankFailure, match="the process ended"):
        pool.run(wait_for_a_killed_one, str(report), timeout_s=30)
    assert report.read_text().startswith("1 the process of rank 1 (pid ")


def different_machines(context, transport):
    try:
        exchange = opened(context, transport=transport, machine=f"machine {context.rank}")
    except SelectionRefused as error:
        return error.codes
    return exchange


def test_shared_memory_between_machines_is_refused_on_all_ranks(rank_pool):
    assert rank_pool(2).run(different_machines, "shm") == [("shm_needs_one_machine",)] * 2


def test_one_replica_exchanges_nothing():
    sizes = resolve_sizes(ranks=1)
    exchange = create_exchange(sizes=sizes, place=rank_place(sizes, 0), comms=local_comms(), store=None, timeout_s=1.0)
    assert isinstance(exchange, OneReplica)
    record = StepRecord(step=3)
    assert exchange.exchange(record) == (record,)


def test_the_first_abort_message_stays_because_it_names_the_culprit():
    table = SharedTable.over(np.zeros(table_bytes(2), dtype=np.uint8), 2)
    exchange = SharedMemoryExchange(table=table, attn_dp_rank=0, leaders=(0, 1), timeout_s=1.0)
    exchange.abort("rank 1 is out of memory")
    exchange.abort("rank 0 lost rank 1")
    with pytest.raises(RankLost, match="rank 1 is out of memory"):
        exchange.exchange(StepRecord())
