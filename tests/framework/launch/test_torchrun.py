"""The environment of a rank that torchrun started."""

from __future__ import annotations

import pytest
from crossdock.errors import ConfigValueError
from crossdock.launch.torchrun import read_torchrun_environment

GIVEN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_the_agents_variables_are_read() -> None:
    place = read_torchrun_environment(GIVEN, expected_ranks=4)
    assert (place.rank, place.ranks, place.local_rank, place.local_ranks) == (3, 4, 1, 2)
    assert (place.master_addr, place.master_port) == ("node0", 29500)
    assert (place.agent_hosts_store, place.run_id, place.attempt) == (True, "job7", 2)


def test_a_scheduler_may_set_the_four_basic_ones_only() -> None:
    basic = {name: GIVEN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    place = read_torchrun_environment(basic, expected_ranks=4)
    assert not place.agent_hosts_store
    assert (place.local_rank, place.local_ranks, place.attempt) == (3, 4, 0)


def test_everything_that_is_absent_is_named_at_once() -> None:
    with pytest.raises(ConfigValueError) as refused:
        read_torchrun_environment({"WORLD_SIZE": "two"}, expected_ranks=2)
    for word in ("RANK is not set", "MASTER_ADDR", "MASTER_PORT", "'two'", "torchrun --nproc-per-node"):
        assert word in str(refused.value)


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigValueError, match="8 configured, torchrun started 4"):
        read_torchrun_environment(GIVEN, expected_ranks=8)
