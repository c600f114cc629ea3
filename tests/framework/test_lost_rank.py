"""Who is gone when a collective breaks: the roll call, and which errors ask for one."""

from __future__ import annotations

import pytest
from crossdock.errors import RankLost
from crossdock.lost_rank import is_broken_collective, named, roll_call
from torch._C._distributed_c10d import HashStore


def broken(message: str = "connection closed") -> RankLost:
    try:
        raise RankLost("all_to_all failed") from RuntimeError(message)
    except RankLost as error:
        return error


def test_the_roll_call_names_who_does_not_answer() -> None:
    store = HashStore()
    store.set("crossdock/alive/2", "1")
    assert roll_call(store, 0, 4, wait_s=0.1) == (1, 3)


def test_answers_stay_so_that_late_callers_find_them() -> None:
    store = HashStore()
    roll_call(store, 0, 2, wait_s=0.0)
    assert roll_call(store, 1, 2, wait_s=0.1) == ()


@pytest.mark.parametrize(
    ("answered", "words", "culprit"),
    [
        ((1, 2), "^rank 3 ended or stopped in the middle of a step; found by rank 0: all_to_all failed$", 3),
        ((1,), "^ranks 2, 3 ended or stopped", 2),
    ],
)
def test_an_error_gets_the_names(
    answered: tuple[int, ...], words: str, culprit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossdock.lost_rank.ROLL_CALL_S", 0.1)
    store = HashStore()
    for rank in answered:
        store.set(f"crossdock/alive/{rank}", "1")
    found = named(broken(), store, 0, 4)
    assert found.rank == culprit
    with pytest.raises(RankLost, match=words):
        raise found


def test_when_everybody_answers_the_error_stays_as_it_was() -> None:
    store = HashStore()
    store.set("crossdock/alive/1", "1")
    error = broken()
    assert named(error, store, 0, 2) is error


def test_only_broken_collectives_ask_for_a_roll_call() -> None:
    assert is_broken_collective(broken())
    assert not is_broken_collective(RankLost("rank 1 ended: out of memory"))
    assert not is_broken_collective(RankLost("gone", rank=1))
