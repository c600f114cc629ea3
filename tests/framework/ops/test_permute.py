"""Sorting by local expert and back."""

from __future__ import annotations

import pytest
import torch
from crossdock.errors import DispatchMisuse
from crossdock.ops.permute import sort_by_expert, weighted_sum

EXPERTS, TOP_K, HIDDEN = 4, 3, 5


def sample(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, -1, ids)
    return torch.randn(rows, HIDDEN, generator=generator), ids, torch.rand(rows, TOP_K, generator=generator)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 40])
def test_each_segment_holds_the_rows_of_its_expert_in_input_order(rows: int, alignment: int) -> None:
    hidden, ids, weights = sample(rows)
    ordered = sort_by_expert(hidden, ids, weights, EXPERTS, alignment)
    start = 0
    for expert, count in enumerate(ordered.counts):
        chosen, column = (ids == expert).nonzero(as_tuple=True)
        assert count == -(-len(chosen) // alignment) * alignment
        segment = ordered.rows[start : start + count]
        assert torch.equal(segment[: len(chosen)], hidden[chosen])
        assert not segment[len(chosen) :].any()
        assert torch.equal(ordered.weights[start : start + len(chosen)], weights[chosen, column])
        assert not ordered.weights[start + len(chosen) : start + count].any()
        start += count
    assert start == len(ordered.rows)


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_there_and_back_is_the_weighted_sum(rows: int, alignment: int) -> None:
    hidden, ids, weights = sample(rows, seed=1)
    ordered = sort_by_expert(hidden, ids, weights, EXPERTS, alignment)
    wanted = hidden * torch.where(ids >= 0, weights, 0.0).sum(dim=1, keepdim=True)
    applied_before = weighted_sum(ordered.rows * ordered.weights[:, None], ordered.positions)
    applied_after = weighted_sum(ordered.rows, ordered.positions, weights)
    torch.testing.assert_close(applied_before, wanted)
    torch.testing.assert_close(applied_after, wanted)


def test_rows_without_an_expert_are_exactly_zero_whatever_they_hold() -> None:
    hidden, ids, weights = sample(6)
    ids[2], hidden[2] = -1, float("nan")
    ordered = sort_by_expert(hidden, ids, weights, EXPERTS)
    assert not weighted_sum(ordered.rows, ordered.positions)[2].any()


def test_bfloat16_outputs_are_added_in_float32() -> None:
    outputs = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    total = weighted_sum(outputs, torch.tensor([[0, 1, 2]]))
    assert total.dtype is torch.bfloat16
    assert total.item() == 258.0  # one addition after the other in bfloat16 stays at 256


def test_shapes_that_do_not_belong_together_are_named() -> None:
    hidden, ids, weights = sample(4)
    with pytest.raises(DispatchMisuse, match=r"rows \[3, 5\], ids \[4, 3\]"):
        sort_by_expert(hidden[:3], ids, weights, EXPERTS)
