"""The ``max_len`` policy gives its mode for every step."""

import pytest
from crossdock.errors import ConfigValueError
from crossdock.padding import make_padding
from crossdock.types.step import PaddingMode, StepCounts
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.booleans())
def test_max_len_is_chosen_whatever_the_counts(tokens, prefills):
    policy = make_padding("max_len", {})
    counts = StepCounts(tokens=tuple(tokens), is_prefill_in_batch=prefills, hidden_size=8, itemsize=2, attn_tp_size=1)
    assert policy.choose(counts) is PaddingMode.MAX_LEN
    assert policy.captured_mode() is PaddingMode.MAX_LEN


def test_max_len_has_no_options():
    with pytest.raises(ConfigValueError, match="padding"):
        make_padding("max_len", {"threshold": 2})
