"""Verbs: a mistake in one is an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from crossdock.control_verbs import ControlVerbs
from crossdock.errors import TransferFailed
from crossdock.types.link import Control


def echo(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return dict(arguments)


def failing(error: Exception) -> ControlVerbs:
    def fail(arguments: Mapping[str, Any]) -> dict[str, Any]:
        raise error

    return ControlVerbs(local={"do": fail})


def test_a_verb_gets_its_arguments_and_its_result_is_the_answer() -> None:
    reply = ControlVerbs(together={"echo": echo}).run(Control(verb="echo", call_id=5, arguments={"a": 1}), 3)
    assert (reply.rank, reply.call_id, reply.result, reply.error) == (3, 5, {"a": 1}, None)


def test_an_unknown_verb_lists_the_known_ones() -> None:
    verbs = ControlVerbs(local={"b": echo}, together={"a": echo})
    assert verbs.run(Control(verb="c", call_id=1), 0).error == "no verb 'c'; known: a, b"


@pytest.mark.parametrize(
    "error", [TransferFailed("slot 3 was lost"), OSError("disk full"), ValueError("no number"), KeyError("x")]
)
def test_an_error_in_a_verb_is_an_answer(error: Exception) -> None:
    reply = failing(error).run(Control(verb="do", call_id=1), 0)
    assert reply.error is not None
    assert reply.error.startswith("do: ")


def test_a_mistake_of_ours_ends_the_rank() -> None:
    with pytest.raises(AssertionError):
        failing(AssertionError("bug")).run(Control(verb="do", call_id=1), 0)
