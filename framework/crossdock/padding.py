"""Typed entry to the ``padding`` point, and what its answer does to the counts of a step (the facts, section 2)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from crossdock.plugin_call import build
from crossdock.registry import load_plugin
from crossdock.types.padding import PaddingPolicy
from crossdock.types.step import PaddingMode, StepCounts


def make_padding(name: str, options: Mapping[str, object]) -> PaddingPolicy:
    """The padding policy ``name``.

    Raises:
        PluginError: it cannot be loaded, declines, or returns an object without the protocol's methods.
        ConfigValueError: an option is wrong.
    """
    policy: PaddingPolicy = build(load_plugin("padding", name), PaddingPolicy, options=options)
    return policy


def choose_padding(policy: PaddingPolicy, counts: StepCounts) -> PaddingMode:
    """The policy's mode, but equal blocks wherever a back end of the step needs them, whatever the policy says."""
    return PaddingMode.MAX_LEN if counts.symmetric_counts_required else policy.choose(counts)


def padded_tokens(mode: PaddingMode, tokens: Sequence[int]) -> tuple[int, ...]:
    """Rows of each replica in the gathered buffer. ``tokens``: live counts already rounded up to attn_tp_size.

    ``max_len``: the largest count for everyone; ``sum_len``: as they are. The buffer holds their sum.
    """
    return (max(tokens),) * len(tokens) if mode is PaddingMode.MAX_LEN else tuple(tokens)


def slot_offsets(padded: Sequence[int]) -> tuple[int, ...]:
    """First row of each replica's slot: prefix sums of the padded counts."""
    return tuple(itertools.accumulate(padded, initial=0))[:-1]
