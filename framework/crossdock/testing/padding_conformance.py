"""What must hold for a padding policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from crossdock.padding import make_padding
from crossdock.testing.conformance import PluginCase, check_of
from crossdock.types.padding import PaddingPolicy
from crossdock.types.step import PaddingMode, StepCounts


def _counts() -> Iterator[StepCounts]:
    """Even, uneven, idle and single replicas, in every combination of the other fields."""
    tokens = ((1,), (0, 0), (4, 4), (6, 0), (0, 0, 0, 8), (2, 4, 6, 2048))
    for rows, prefill, symmetric, limit in itertools.product(tokens, (False, True), (False, True), (0, 1 << 20)):
        yield StepCounts(
            tokens=rows,
            is_prefill_in_batch=prefill,
            hidden_size=64,
            itemsize=2,
            attn_tp_size=1,
            symmetric_counts_required=symmetric,
            variable_all_reduce_max_bytes=limit,
        )


def _policy(case: PluginCase) -> PaddingPolicy:
    return make_padding(case.name, case.options)


def check_every_step_gets_a_padding_mode(case: PluginCase) -> None:
    policy = _policy(case)
    for counts in _counts():
        assert isinstance(policy.choose(counts), PaddingMode), f"{counts} got no PaddingMode"


def check_captured_steps_have_one_padding_mode(case: PluginCase) -> None:
    policy = _policy(case)
    assert isinstance(policy.captured_mode(), PaddingMode)
    assert policy.captured_mode() is policy.captured_mode()


def check_the_answer_depends_on_the_counts_alone(case: PluginCase) -> None:
    """Two policies, asked in opposite order, as two ranks with different pasts."""
    first, second = _policy(case), _policy(case)
    everything = list(_counts())
    forward = [first.choose(counts) for counts in everything]
    backward = [second.choose(counts) for counts in reversed(everything)]
    assert forward == backward[::-1], "the policy remembers earlier steps"


CHECKS = (
    check_of(check_every_step_gets_a_padding_mode),
    check_of(check_captured_steps_have_one_padding_mode),
    check_of(check_the_answer_depends_on_the_counts_alone),
)
