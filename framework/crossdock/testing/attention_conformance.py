"""What must hold for an attention backend: dense attention's numbers at every length, and nothing read that is not the sequence's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from crossdock.errors import MisuseError
from crossdock.groups import resolve_sizes
from crossdock.plugin_call import call_hook
from crossdock.registry import load_plugin
from crossdock.testing.attention_world import (
    GQA,
    MLA,
    MLA_ODD,
    MLA_VALUE,
    NUM_HEADS,
    AttentionWorld,
    check_close,
    make_batch,
)
from crossdock.testing.conformance import NotCheckable, PluginCase, check_of
from crossdock.types.attention import AttentionCapabilities, KvSpec
from crossdock.types.capability import Environment

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _capabilities(case: PluginCase) -> AttentionCapabilities:
    env = Environment(device="cpu", sizes=resolve_sizes(ranks=1), dtype="float32")
    found = call_hook(load_plugin("attention", case.name), "attention_capabilities", options=case.options, env=env)
    if not isinstance(found, AttentionCapabilities):
        raise NotCheckable(f"attention_capabilities answered {found!r}")
    return found


def _worlds(case: PluginCase, page_count: int = 64) -> Iterator[tuple[AttentionWorld, torch.dtype]]:
    """A world for every kind and dtype that the backend says it takes."""
    capabilities = _capabilities(case)
    for kv in (GQA, MLA, MLA_ODD):
        for name in sorted(capabilities.dtypes & _DTYPES.keys()):
            if kv.kind in capabilities.kinds:
                yield AttentionWorld(case.name, kv, _DTYPES[name], case.options, page_count), _DTYPES[name]


def _value_dim(kv: KvSpec) -> int:
    return kv.v_head_dim if kv.kind == "gqa" else MLA_VALUE


def check_decode_equals_dense_attention_at_every_length_around_a_page(case: PluginCase) -> None:
    """Free pages, the scratch page and slots behind a sequence's end hold NaN; none of it may be read."""
    for world, dtype in _worlds(case):
        world.step({0: 2, 1: 7})
        for _ in range(8):
            check_close(*world.step({0: 1, 1: 1}), dtype)


def check_prefill_in_one_go_and_in_chunks_equals_dense_attention(case: PluginCase) -> None:
    for world, dtype in _worlds(case):
        for work in ({0: 9}, {1: 3, 0: 4}, {2: 6}, {2: 5, 0: 2}):
            check_close(*world.step(work), dtype)


def check_prefill_and_decode_mix_in_one_batch(case: PluginCase) -> None:
    for world, dtype in _worlds(case):
        world.step({0: 3, 1: 5})
        for work in ({0: 1, 2: 6, 1: 1}, {3: 1}, {2: 5, 3: 1, 0: 2, 1: 1}):
            check_close(*world.step(work), dtype)


def check_sequences_of_very_different_lengths_share_a_batch(case: PluginCase) -> None:
    for world, dtype in _worlds(case, page_count=128):
        world.step({0: 200, **dict.fromkeys(range(1, 9), 3)})
        check_close(*world.step(dict.fromkeys(range(9), 1)), dtype)


def check_padded_rows_of_the_result_are_zero(case: PluginCase) -> None:
    for world, dtype in _worlds(case):
        for work in ({0: 1}, {0: 3, 1: 1}, {}):
            found, wanted = world.step(work, padding=3)
            check_close(found, wanted, dtype)
            assert bool((found[-3:] == 0).all()), "padded rows are not zero"


def check_a_batch_without_rows_gives_an_empty_result(case: PluginCase) -> None:
    for world, _ in _worlds(case):
        found, _ = world.step({})
        assert found.shape == (0, NUM_HEADS, _value_dim(world.kv)), f"the result has shape {list(found.shape)}"


def check_a_sequence_longer_than_its_page_table_is_refused(case: PluginCase) -> None:
    for world, _ in _worlds(case):
        for pages, length in (([1, 2], 9), ([1, -1], 5)):
            try:
                world.attention.plan(make_batch([pages], [length], [1], [length - 1], 0))
            except MisuseError:
                continue
            raise AssertionError(f"a table of pages {pages} was taken for {length} tokens of 4 a page")


CHECKS = tuple(
    check_of(function)
    for function in (
        check_decode_equals_dense_attention_at_every_length_around_a_page,
        check_prefill_in_one_go_and_in_chunks_equals_dense_attention,
        check_prefill_and_decode_mix_in_one_batch,
        check_sequences_of_very_different_lengths_share_a_batch,
        check_padded_rows_of_the_result_are_zero,
        check_a_batch_without_rows_gives_an_empty_result,
        check_a_sequence_longer_than_its_page_table_is_refused,
    )
)
