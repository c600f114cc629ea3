"""The causal kernel for new rows against dense attention in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from crossdock.native_code import native_code
from crossdock.ops.prefill_attention_cpu import prefill_attention_cpu, takes

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2}
"""Values are unit normals; bf16 results are rounded once, to 8 bits."""
pytestmark = pytest.mark.skipif(native_code().library is None, reason=f"no native kernels: {native_code().reason}")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Every product and the softmax in float64, head by head."""
    rows, heads, _ = q.shape
    group, prefix = heads // k.shape[1], k.shape[0] - rows
    out = torch.empty(rows, heads, v.shape[2], dtype=torch.float64)
    for head in range(heads):
        scores = q[:, head].double() @ k[:, head // group].double().T * scale
        hidden = torch.ones(rows, k.shape[0], dtype=torch.bool).triu(prefix + 1)
        out[:, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, head // group].double()
    return out


def sample(
    rows: int, prefix: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + prefix)
    q = torch.randn(rows, heads[0], dims[0], generator=generator)
    k = torch.randn(prefix + rows, heads[1], dims[0], generator=generator)
    v = torch.randn(prefix + rows, heads[1], dims[1], generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "prefix"), [(0, 0), (1, 0), (2, 0), (31, 0), (33, 0), (1, 40), (13, 19), (70, 64)])
@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (8, 2), (5, 5)])
@pytest.mark.parametrize("dims", [(64, 64), (96, 32), (32, 96)])
def test_rows_around_a_block_equal_dense_attention(
    dtype: torch.dtype, rows: int, prefix: int, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    q, k, v = sample(rows, prefix, heads, dims, dtype)
    found = prefill_attention_cpu(q, k, v, 0.2)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), dense(q, k, v, 0.2), atol=TOLERANCE[dtype], rtol=0)


def test_strided_rows_and_heads_that_lie_first_are_read_right() -> None:
    q, k, v = sample(20, 7, (4, 2), (32, 32), torch.float32)
    wide = torch.cat((q, q), dim=2)[..., :32]
    heads_first = k.transpose(0, 1).contiguous().transpose(0, 1)
    assert takes(wide, heads_first, v)
    assert torch.equal(prefill_attention_cpu(wide, heads_first, v, 0.3), prefill_attention_cpu(q, k, v, 0.3))


def test_large_scores_do_not_overflow() -> None:
    q, k, v = sample(40, 0, (2, 1), (32, 32), torch.float32)
    found = prefill_attention_cpu(q * 100, k, v, 1.0)
    torch.testing.assert_close(found.double(), dense(q * 100, k, v, 1.0), atol=1e-3, rtol=0)


def test_later_rows_do_not_change_the_bits_of_earlier_ones() -> None:
    q, k, v = sample(60, 0, (2, 2), (32, 64), torch.float32)
    k[41:], v[41:] = 1e6, 1e6
    whole = prefill_attention_cpu(q, k, v, 0.2)
    part = prefill_attention_cpu(q[:41], k[:41], v[:41], 0.2)
    assert torch.equal(whole[:41], part)


def test_it_says_what_it_does_not_take() -> None:
    q, k, v = sample(3, 0, (2, 2), (32, 32), torch.float32)
    assert takes(q, k, v)
    assert not takes(q[..., :16], k[..., :16], v)
    assert not takes(q, k, v.bfloat16())
    assert not takes(q.double(), k.double(), v.double())
    assert not takes(q[..., ::2], k, v)
    torch.set_num_threads(2)
    assert not takes(q, k, v)
