"""The unpacking of a decode step: the kernel, interpreted on a CPU, against the readable form, and that against the step itself."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from crossdock.ops.unpack_step import (
    StepTensors,
    pack_step,
    packed_ints,
    unpack_step_fused,
)
from crossdock.ops.unpack_step_torch import unpack_step_torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STALE = 77

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)


def tensors(bucket: int, dispatch_rows: int, num_logits: int, columns: int) -> StepTensors:
    def full(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, STALE, dtype=dtype, device=DEVICE)

    return StepTensors(
        input_ids=full(bucket, dtype=torch.int64),
        positions=full(bucket, dtype=torch.int64),
        kv_slots=full(bucket, dtype=torch.int64),
        seq_lens=full(bucket, dtype=torch.int32),
        page_table=full(bucket, columns, dtype=torch.int32),
        logit_rows=full(num_logits, dtype=torch.int64),
        padded_rows=torch.ones(dispatch_rows, 1, dtype=torch.bool, device=DEVICE),
    )


def packed_step(
    bucket: int, live: int, width: int, dispatch_rows: int, num_logits: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """A random step whose every second token is pending; two neighbours are rows of one sequence."""
    draw = np.random.default_rng(live + bucket)
    rows = draw.integers(1, 1000, (6, live)).astype(np.int32)
    rows[1] = -1
    rows[0, ::2], rows[1, ::2] = -1, draw.permutation(bucket)[: len(rows[1, ::2])]
    rows[5] = np.arange(live) // 2
    pages = draw.integers(1, 500, (-(-live // 2), width)).astype(np.int32)
    padded = draw.random(dispatch_rows) < 0.5
    logit_rows = draw.integers(0, bucket, num_logits).astype(np.int32)
    length = packed_ints(bucket, dispatch_rows, num_logits, pages.size)
    out = np.full(length + 3, STALE, dtype=np.int32)
    assert pack_step(rows, pages, padded, logit_rows, bucket, out) == length
    assert (out[length:] == STALE).all()
    sampled = torch.arange(5000, 5000 + bucket, device=DEVICE)
    return torch.from_numpy(out).to(DEVICE), sampled, (rows, pages, padded, logit_rows)


SIZES = [(1, 1, 1, 1, 1), (4, 0, 1, 4, 0), (8, 5, 3, 16, 3), (8, 8, 130, 8, 8), (3, 2, 128, 1, 0), (16, 15, 129, 7, 16)]
"""(bucket, live rows, page columns, rows of the dispatcher, rows with logits)."""


@pytest.mark.parametrize(("bucket", "live", "width", "dispatch_rows", "num_logits"), SIZES)
def test_what_was_packed_is_there_and_pending_ids_come_from_the_step_before(
    bucket: int, live: int, width: int, dispatch_rows: int, num_logits: int
) -> None:
    packed, sampled, (rows, pages, padded, logit_rows) = packed_step(bucket, live, width, dispatch_rows, num_logits)
    to = tensors(bucket, dispatch_rows, num_logits, 140)
    unpack_step_torch(packed.cpu(), sampled.cpu(), to)
    ids = [5000 + source if token < 0 else token for token, source in zip(rows[0], rows[1], strict=True)]
    rest = [0] * (bucket - live)
    assert to.input_ids.tolist() == ids + rest
    assert to.positions.tolist() == rows[2].tolist() + rest
    assert to.kv_slots.tolist() == rows[3].tolist() + rest
    assert to.seq_lens.tolist() == rows[4].tolist() + rest
    assert to.page_table[:live, :width].tolist() == pages[rows[5]].tolist()
    assert to.logit_rows.tolist() == logit_rows.tolist()
    assert (to.page_table[live:] == STALE).all() and (to.page_table[:, width:] == STALE).all()
    assert to.padded_rows.squeeze(1).tolist() == padded.tolist()


@needs_triton
@pytest.mark.parametrize(("bucket", "live", "width", "dispatch_rows", "num_logits"), SIZES)
def test_the_kernel_does_the_same(bucket: int, live: int, width: int, dispatch_rows: int, num_logits: int) -> None:
    packed, sampled, _ = packed_step(bucket, live, width, dispatch_rows, num_logits)
    want, got = (tensors(bucket, dispatch_rows, num_logits, 140) for _ in range(2))
    unpack_step_torch(packed, sampled, want)
    unpack_step_fused(packed, sampled, got)
    for name in ("input_ids", "positions", "kv_slots", "seq_lens", "page_table", "padded_rows", "logit_rows"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
