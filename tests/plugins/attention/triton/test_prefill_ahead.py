"""The Hopper form of prefill against the readable truth; Gluon has no interpreter, so only the choice is tested without a GPU."""

from __future__ import annotations

import pytest
import torch
from crossdock_attention.attention.triton.kernels.prefill import PrefillTile, prefill, query_blocks
from crossdock_attention.attention.triton.kernels.prefill_ahead import is_hopper, runs_ahead
from crossdock_attention.attention.triton.kernels.prefill_torch import prefill_torch

AHEAD = PrefillTile(rows=128, tokens=64, warps=8, stages=2, is_ahead=True)
TOLERANCE = 2e-2
"""bf16 weights of the softmax."""
NEEDS_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or not is_hopper(0), reason="needs a GPU of compute capability 9"
)


def test_tensors_on_a_cpu_are_left_to_the_kernel_that_runs_anywhere() -> None:
    rows = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    assert not runs_ahead(rows, rows, rows[..., :0], rows)


@pytest.mark.gpu
@NEEDS_HOPPER
@pytest.mark.parametrize("rest_dim", [0, 64])
@pytest.mark.parametrize(
    "rows_and_prefixes", [[(1, 0)], [(127, 0), (128, 0), (129, 0)], [(300, 5), (2, 1000), (64, 64)]]
)
def test_contexts_in_one_piece_give_the_dense_softmax(rows_and_prefixes: list[tuple[int, int]], rest_dim: int) -> None:
    """Behind the last context lie infinite values, as after another sequence's overflow; beside the heads lie other columns."""
    generator = torch.Generator().manual_seed(len(rows_and_prefixes))
    lengths = [rows + prefix for rows, prefix in rows_and_prefixes]
    kv_starts = [sum(lengths[:i]) for i in range(len(lengths))]
    firsts = [sum(rows for rows, _ in rows_and_prefixes[:i]) for i in range(len(lengths))]

    def random(rows: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(rows, heads + 1, dim + 8, generator=generator).to("cuda", torch.bfloat16)[:, :heads, :dim]

    q = random(firsts[-1] + rows_and_prefixes[-1][0] + 3, 8, 128 + rest_dim)
    k, rest, v = (
        random(sum(lengths) + 5, 4, 128),
        random(sum(lengths) + 5, 1, rest_dim),
        random(sum(lengths) + 5, 4, 128),
    )
    v[sum(lengths) :] = float("inf")
    spans = [
        (i, first, rows, prefix)
        for i, (first, (rows, prefix)) in enumerate(zip(firsts, rows_and_prefixes, strict=True))
    ]
    blocks = torch.tensor(query_blocks(spans, AHEAD.rows), dtype=torch.int32, device="cuda")
    assert runs_ahead(q, k, rest, v)
    got, want = (torch.zeros(q.shape[0], 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    starts = torch.tensor(kv_starts, dtype=torch.int32, device="cuda")
    prefill(q, k, v, got, blocks, 0.08, kv_starts=starts, k_rest=rest if rest_dim else None, tile=AHEAD)
    keys = torch.cat((k, rest.expand(-1, 4, -1)), dim=2)
    contexts = [(keys[at : at + length], v[at : at + length]) for at, length in zip(kv_starts, lengths, strict=True)]
    prefill_torch(q, contexts, [(first, first + rows) for _, first, rows, _ in spans], want, 0.08)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
