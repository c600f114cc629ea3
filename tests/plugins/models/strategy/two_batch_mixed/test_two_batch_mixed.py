"""What ``two_batch_mixed`` asks for, and that its options decide when and where steps are cut."""

from __future__ import annotations

import pytest
from crossdock.errors import ConfigValueError
from crossdock.strategy import make_strategy


def test_it_needs_two_slots_of_the_dispatcher_and_is_not_captured() -> None:
    capabilities = make_strategy("two_batch_mixed", {}).capabilities
    assert capabilities.micro_batches == 2
    assert capabilities.graph_capture
    assert capabilities.overlap.mixes_modes is True
    assert capabilities.overlap.is_gated


def test_its_options_become_limits() -> None:
    options: dict[str, object] = {
        "gate": "always",
        "min_prefill_rows": 8,
        "min_decode_rows": 4,
        "balance_threshold": 0.0,
    }
    limits = make_strategy("two_batch_mixed", options).capabilities.overlap
    assert not limits.is_gated
    assert (limits.min_prefill_rows, limits.min_decode_rows, limits.balance_threshold) == (8, 4, 0.0)


def test_a_threshold_above_one_half_is_refused() -> None:
    with pytest.raises(ConfigValueError, match="balance_threshold"):
        make_strategy("two_batch_mixed", {"balance_threshold": 0.6})
