"""The decode kernel that reads pages in place against dense attention in float64."""

from __future__ import annotations

import pytest
import torch
from crossdock.native_code import native_code
from crossdock.ops.paged_attention_cpu import paged_attention_cpu, serves

pytestmark = pytest.mark.skipif(native_code().library is None, reason=native_code().reason)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""bf16: queries, keys and the result are rounded to 8 bits."""
PAGE_TOKENS = 4


def pool(pages: int, heads: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(pages, PAGE_TOKENS, heads, dim, generator=torch.Generator().manual_seed(seed))


def dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence: q [heads, d], keys [L, kv_heads, d] -> [heads, dv], query heads in order of their key head."""
    fold = q.shape[0] // keys.shape[1]
    out = []
    for head in range(q.shape[0]):
        scores = (keys[:, head // fold].double() @ q[head].double()) * scale
        out.append(scores.softmax(0) @ values[:, head // fold].double())
    return torch.stack(out)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (7, 1), (8, 2), (16, 16)])
@pytest.mark.parametrize("dims", [(32, 32), (96, 64), (32, 160)])
def test_every_length_around_a_page_equals_dense_attention(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    lengths = [1, 3, 4, 5, 8, 9, 40]
    width = 10
    keys, values = (pool(len(lengths) * width + 1, heads[1], dim, dim).to(dtype) for dim in dims)
    order = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(9)) + 1
    table = order.view(len(lengths), width).to(torch.int32)
    for row, length in enumerate(lengths):  # whatever lies behind the end has no effect
        flat = table[row].long()[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
        behind = flat.flatten()[length:]
        keys.flatten(0, 1)[behind], values.flatten(0, 1)[behind] = float("nan"), float("nan")
    wide = torch.randn(len(lengths), 2 * heads[0], dims[0], generator=torch.Generator().manual_seed(3)).to(dtype)
    q = wide[:, : heads[0]]
    found = paged_attention_cpu(q, keys, values, table, torch.tensor(lengths), 0.3)
    for row, length in enumerate(lengths):
        slots = (table[row].long()[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()[:length]
        wanted = dense(q[row], keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots], 0.3)
        torch.testing.assert_close(found[row].double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_values_may_be_the_first_part_of_the_keys_pool() -> None:
    keys = pool(5, 1, 96, 0)
    table = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    q = torch.randn(2, 8, 96, generator=torch.Generator().manual_seed(1))
    found = paged_attention_cpu(q, keys, keys[..., :64], table, torch.tensor([6, 8]), 0.1)
    copied = paged_attention_cpu(q, keys, keys[..., :64].contiguous(), table, torch.tensor([6, 8]), 0.1)
    assert torch.equal(found, copied)


def test_scores_far_apart_neither_overflow_nor_lose_the_winner() -> None:
    keys = torch.zeros(3, PAGE_TOKENS, 1, 32)
    keys[1, :, 0, 0] = torch.tensor([-300.0, 0.0, 300.0, 299.0])
    values = pool(3, 1, 32, 1)
    q = torch.zeros(1, 1, 32)
    q[..., 0] = 1.0
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    found = paged_attention_cpu(q, keys, values, table, torch.tensor([8]), 1.0)
    wanted = values[1, 2, 0] * torch.sigmoid(torch.tensor(1.0)) + values[1, 3, 0] * torch.sigmoid(torch.tensor(-1.0))
    torch.testing.assert_close(found[0, 0], wanted, atol=1e-5, rtol=1e-5)


def test_sizes_that_the_kernel_cannot_read_are_not_taken() -> None:
    cpu = torch.device("cpu")
    sizes = {"key_dim": 64, "value_dim": 64, "page_tokens": 16}
    assert serves(torch.float32, cpu, **sizes)
    assert not serves(torch.float16, cpu, **sizes)
    for name, wrong in (("key_dim", 24), ("value_dim", 40), ("page_tokens", 6)):
        assert not serves(torch.float32, cpu, **{**sizes, name: wrong})
