"""Stop strings over any cut of the text into pieces."""

from __future__ import annotations

import itertools

import pytest
from crossdock.serving.stop_strings import StopMatcher, held_length
from hypothesis import given
from hypothesis import strategies as st

LETTERS = st.text("ab\u6f22", max_size=25)
STOPS = st.lists(st.text("ab\u6f22", min_size=1, max_size=4), min_size=1, max_size=4)


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 25), max_size=8), include=st.booleans())
def test_any_cutting_gives_the_text_before_the_first_stop(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops=tuple(stops), include_stop=include)
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    given_out, stopped = "", None
    for begin, end in itertools.pairwise(edges):
        checked = matcher.feed(text[begin:end])
        given_out += checked.text
        if checked.stop is not None:
            stopped = checked.stop
            break
    if stopped is None:
        given_out += matcher.flush()
        assert given_out == text
        assert not any(stop in text for stop in stops)
        return
    # The first stop of the text so far ends it; a longer one that begins earlier may only complete later.
    assert given_out == text[: text.find(stopped) + (len(stopped) if include else 0)]
    assert include or not any(stop in given_out for stop in stops)


@pytest.mark.parametrize(("text", "held"), [("hel", 3), ("help", 0), ("xhe", 2), ("", 0), ("hellohel", 3)])
def test_only_what_may_become_a_stop_is_kept_back(text: str, held: int) -> None:
    assert held_length(text, ["hello"]) == held


def test_what_is_kept_back_is_given_once_at_the_end() -> None:
    matcher = StopMatcher(stops=("hello",))
    assert matcher.feed("say hel").text == "say "
    assert matcher.flush() == "hel"
    assert matcher.flush() == ""
