"""A pool of ranks and a world of threads."""

import os
import time

import pytest
import torch
from crossdock.groups import resolve_sizes
from crossdock.testing.world import OneProcessWorld, RankFailure, RankHang, RankPool

TWO = resolve_sizes(ranks=2)


def sum_of_ranks(context, offset):
    comms = context.comms_of(TWO)
    return float(comms.world.all_reduce(torch.tensor([float(context.rank + offset)]))), os.environ["OMP_NUM_THREADS"]


def fail_on_rank_1(context):
    if context.rank == 1:
        raise ValueError("rank one says no")
    context.comms_of(TWO).world.all_reduce(torch.ones(1))


def hang_on_rank_1(context):
    if context.rank == 1:
        time.sleep(600)


def pids(context):
    return os.getpid()


def meet_in_different_collectives(context):
    world = context.comms_of(TWO).world
    return world.all_reduce(torch.ones(2)) if context.rank else world.all_gather(torch.ones(2))


def test_a_pool_runs_a_function_of_a_test_module_on_every_rank_and_keeps_its_processes(rank_pool):
    pool = rank_pool(2)
    assert pool.run(sum_of_ranks, 10) == [(21.0, "1"), (21.0, "1")]
    assert pool.run(pids) == pool.run(pids)


def test_a_failing_rank_is_named_with_its_traceback_and_the_pool_recovers():
    with RankPool(2) as pool:
        with pytest.raises(RankFailure, match=r"ranks \[.*1\].*(?s:.*)rank one says no"):
            pool.run(fail_on_rank_1, timeout_s=30)
        assert pool.run(sum_of_ranks, 0) == [(1.0, "1"), (1.0, "1")]


def test_a_hang_is_a_failure_that_names_the_rank_and_ends_its_process():
    with RankPool(2) as pool:
        before = pool.run(pids)
        with pytest.raises(RankHang, match=r"ranks \[1\] of 2"):
            pool.run(hang_on_rank_1, timeout_s=1)
        for pid in before:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_threads_sum_like_ranks():
    assert OneProcessWorld(TWO).run(sum_of_threads) == [3.0, 3.0]


def sum_of_threads(context):
    return float(context.comms_of(TWO).world.all_reduce(torch.tensor([context.rank + 1.0])))


def test_threads_that_meet_in_different_collectives_are_found_out():
    with pytest.raises(RankFailure, match="different collectives"):
        OneProcessWorld(TWO).run(meet_in_different_collectives)


def test_a_function_inside_a_function_is_refused_by_name(rank_pool):
    with pytest.raises(ValueError, match="top level"):
        rank_pool(2).run(lambda context: None)
