"""Rows of the experts' segments, against a count in Python."""

from __future__ import annotations

import pytest
import torch
from crossdock_dispatchers.nvlink.segment_counts import SegmentCounts, segment_rows

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def counted(ids: torch.Tensor, num_experts: int, alignment: int) -> int:
    rows = [sum(choice == expert for choice in ids.reshape(-1).tolist()) for expert in range(num_experts)]
    return sum(-(-count // alignment) * alignment for count in rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 2), (1, 1), (1, 3), (127, 2), (128, 2), (129, 2), (700, 8)])
@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_each_experts_rows_are_rounded_up(device: str, shape: tuple[int, int], alignment: int) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    ids = torch.randint(-1, 5, shape, generator=generator)
    found = segment_rows(ids.to(device), 5, alignment)
    assert (found.shape, found.dtype, found.item()) == ((1,), torch.int64, counted(ids, 5, alignment))


@pytest.mark.parametrize("device", DEVICES)
def test_all_rows_on_one_expert_and_rows_without_any(device: str) -> None:
    ids = torch.full((300, 4), -1)
    assert segment_rows(ids.to(device), 3, 128).item() == 0
    ids[:, 1] = 2
    assert segment_rows(ids.to(device), 3, 128).item() == 384


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_slots_are_told_apart_in_a_stream_of_their_own() -> None:
    device = torch.device("cuda")
    counts = SegmentCounts(num_experts=4, alignment=16, slots=2, device=device)
    stream = torch.cuda.Stream(device)
    for turn in range(3):
        ids = [torch.randint(-1, 4, (50 + 30 * slot + turn, 2)) for slot in range(2)]
        on_device = [each.to(device) for each in ids]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for slot in range(2):
                counts.issue(on_device[slot], slot)
        for slot in (1, 0):
            assert counts.wait(slot) == counted(ids[slot], 4, 16)
