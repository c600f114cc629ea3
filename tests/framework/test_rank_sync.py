"""Leaders agree and tell their peers; a peer that is elsewhere is found out."""

import os
import signal
import time
from pathlib import Path

import attrs
import pytest
from crossdock.errors import AgreementError, ExchangeTimeout, MisuseError, RankLost
from crossdock.exchange_create import create_exchange, create_peer_channel
from crossdock.groups import leader_ranks, resolve_sizes
from crossdock.padding import make_padding
from crossdock.peer_channel import CHUNK_BYTES
from crossdock.rank_sync import RankSync, prove_same_plan
from crossdock.step import StepRules, decide_step
from crossdock.testing.world import RankFailure, RankPool
from crossdock.types.step import ForwardMode, StepRecord

FOUR = resolve_sizes(ranks=4, attn_dp_size=2)
TWO_PEERS = resolve_sizes(ranks=2)


def rules(sizes):
    return StepRules(sizes=sizes, padding=make_padding("cost", {}), hidden_size=8, itemsize=4)


def sync_of(context, sizes, timeout_s=20.0, proves=False, transport="auto"):
    comms = context.comms_of(sizes)
    exchange = create_exchange(sizes=sizes, place=context.place(sizes), comms=comms, store=None, timeout_s=timeout_s)
    return RankSync(
        rules=rules(sizes),
        exchange=exchange,
        peers=create_peer_channel(comms=comms, store=None, transport=transport, timeout_s=timeout_s),
        proof_group=comms.world if proves else None,
    )


def decode(rank, step):
    return StepRecord(num_tokens=rank + 1, step=step, eplb_pass=step, local_forward_mode=ForwardMode.DECODE, has_work=1)


def run_steps(context, transport, messages):
    """Plans and messages as this rank saw them."""
    sync = sync_of(context, FOUR, proves=True, transport=transport)
    seen = []
    for step, message in enumerate(messages):
        if context.rank in leader_ranks(FOUR):
            agreed = sync.agree(decode(context.rank, step))
            sync.tell_peers(agreed, message)
        else:
            agreed, message = sync.follow(step, step)
        seen.append((agreed.plan, agreed.records, message))
    return seen


BOTH = pytest.mark.parametrize("transport", ["shm", "gloo"])


@BOTH
def test_peers_get_plan_records_and_message_whatever_its_length(rank_pool, transport):
    lengths = [0, 1, CHUNK_BYTES - 600, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 7]
    messages = [bytes(number % 251 for number in range(length)) for length in lengths]
    results = rank_pool(4).run(run_steps, transport, messages)
    for step, message in enumerate(messages):
        plan, records, got = results[0][step]
        assert got == message and plan.live_tokens == (1, 3) and plan.step == step
        assert records == (decode(0, step), decode(2, step))
        assert all(result[step] == results[0][step] for result in results)


def peer_at_another_step(context):
    sync = sync_of(context, TWO_PEERS)
    if context.rank == 0:
        sync.tell_peers(sync.agree(decode(0, 7)), b"")
        return None
    try:
        sync.follow(8, 7)
    except AgreementError as error:
        return str(error), error.field


def test_a_peer_at_another_step_than_its_leader_is_an_error(rank_pool):
    message, field = rank_pool(2).run(peer_at_another_step)[1]
    assert "leader rank 0 is at step 7, pass 7; this peer is at step 8, pass 7" in message
    assert field == "step"


def silent_leader(context, transport):
    sync = sync_of(context, TWO_PEERS, timeout_s=0.5, transport=transport)
    if context.rank == 0:
        time.sleep(1.5)
        return None
    try:
        sync.follow(3, 3)
    except ExchangeTimeout as error:
        return str(error), error.missing_ranks


@BOTH
def test_a_silent_leader_is_named_by_its_peers(transport):
    with RankPool(2) as pool:
        message, missing = pool.run(silent_leader, transport)[1]
    assert message.startswith("step 3: rank 0, the leader of this replica, sent no step within 1 s")
    assert missing == (0,)


def dying_leader(context, transport, report):
    sync = sync_of(context, TWO_PEERS, timeout_s=60.0, transport=transport)
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        sync.follow(3, 3)
    except RankLost as error:
        Path(report).write_text(str(error))


@pytest.mark.parametrize(
    ("transport", "sentence"),
    [
        ("shm", "the process of rank 0 (pid "),
        ("gloo", "step message over ranks 0, 1 failed, a peer has ended or stopped"),
    ],
)
def test_a_leader_that_is_killed_is_noticed_long_before_the_deadline(tmp_path, transport, sentence):
    report = tmp_path / "report"
    with RankPool(2) as pool, pytest.raises(RankFailure, match="the process ended"):
        pool.run(dying_leader, transport, str(report), timeout_s=30)
    assert sentence in report.read_text()


def wrong_side(context):
    sync = sync_of(context, FOUR)
    if context.rank in leader_ranks(FOUR):
        return
    with pytest.raises(MisuseError, match="follows its leader"):
        sync.agree(decode(0, 0))


def test_a_peer_cannot_lead(rank_pool):
    rank_pool(4).run(wrong_side)


def carried_wait(context):
    sizes = resolve_sizes(ranks=2, attn_dp_size=2)
    sync = sync_of(context, sizes)
    waits = []
    for step, tokens in enumerate([0, 1, 1]):
        if context.rank == 1 and step == 0:
            time.sleep(0.3)
        record = StepRecord(num_tokens=tokens, step=step, has_work=1)
        waits.append(sync.agree(record).wait_s)
    return waits


def test_the_wait_of_a_step_without_a_batch_is_counted_with_the_next_one(rank_pool):
    waits = rank_pool(2).run(carried_wait)[0]
    assert waits[0] == 0.0
    assert waits[1] > 0.2
    assert waits[2] < 0.2


def disagree(context):
    sizes = resolve_sizes(ranks=4, attn_dp_size=4)
    plan = decide_step([decode(0, 1)] * 4, rules(sizes))
    if context.rank == 2:
        plan = attrs.evolve(plan, overlap=True)
    try:
        prove_same_plan(plan, context.comms_of(sizes).world)
    except AgreementError as error:
        return error.odd_ranks, error.field, str(error)


def test_the_proof_names_the_rank_that_decided_differently_and_the_field(rank_pool):
    for odd_ranks, field, message in rank_pool(4).run(disagree):
        assert (odd_ranks, field) == ((2,), "overlap")
        assert "ranks [2] decided another overlap" in message
