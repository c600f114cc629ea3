"""Memory plan of the KV cache, and blocks that move between two pools."""

from __future__ import annotations

import psutil
import pytest
import torch
from crossdock.errors import ConfigValueError, MisuseError
from crossdock.kv_storage import KvStorage, plan_kv_cache
from crossdock.types.attention import KvSpec

GQA = KvSpec(kind="gqa", num_kv_heads=2, head_dim=8, v_head_dim=6)
MLA = KvSpec(kind="mla", kv_lora_rank=12, rope_dim=4)


@pytest.mark.parametrize(("kv", "per_token"), [(GQA, 2 * (8 + 6)), (MLA, 16)])
def test_the_plan_says_exactly_the_bytes_that_are_allocated(kv: KvSpec, per_token: int) -> None:
    plan = plan_kv_cache(kv, num_layers=3, tokens=21, page_tokens=4, itemsize=4)
    assert (plan.num_pages, plan.usable_tokens) == (6, 20)
    assert plan.bytes_per_token == 3 * per_token * 4
    storage = KvStorage(kv, plan, dtype=torch.float32, device=torch.device("cpu"))
    assert sum(pool.nbytes for layer in storage.caches for pool in layer) == plan.total_bytes


def test_fewer_tokens_than_a_page_are_refused() -> None:
    with pytest.raises(ConfigValueError, match="at least one page of 16 tokens, found 15"):
        plan_kv_cache(GQA, num_layers=1, tokens=15, page_tokens=16, itemsize=4)


@pytest.mark.parametrize("kv", [GQA, MLA])
def test_blocks_exported_from_one_pool_and_imported_into_another_are_equal_and_nothing_else_changes(kv: KvSpec) -> None:
    plan = plan_kv_cache(kv, num_layers=2, tokens=20, page_tokens=4, itemsize=4)
    source, target = (KvStorage(kv, plan, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for layer in source.caches:
        for pool in layer:
            pool.copy_(torch.randn(pool.shape, generator=generator))
    target.import_blocks(source.export_blocks([4, 1]), [2, 5])
    for ours, theirs in zip(target.caches, source.caches, strict=True):
        for pool, origin in zip(ours, theirs, strict=True):
            assert torch.equal(pool[[2, 5]], origin[[4, 1]])
            assert not pool[[0, 1, 3, 4]].any()


def test_blocks_of_another_form_are_misuse() -> None:
    plan = plan_kv_cache(GQA, num_layers=2, tokens=20, page_tokens=4, itemsize=4)
    storage = KvStorage(GQA, plan, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(MisuseError, match="cannot go into 1 pages"):
        storage.import_blocks(storage.export_blocks([1, 2]), [3])
    shallow = plan_kv_cache(GQA, num_layers=1, tokens=20, page_tokens=4, itemsize=4)
    other = KvStorage(GQA, shallow, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(MisuseError, match="blocks of 2 layers"):
        other.import_blocks(storage.export_blocks([1]), [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_on_the_cpu_is_zero_and_takes_memory_only_where_it_is_written(dtype: torch.dtype) -> None:
    plan = plan_kv_cache(GQA, num_layers=2, tokens=400_000, page_tokens=16, itemsize=dtype.itemsize)
    before = psutil.Process().memory_info().rss
    storage = KvStorage(GQA, plan, dtype=dtype, device=torch.device("cpu"))
    for layer in storage.caches:
        for pool in layer:
            assert pool.dtype is dtype
            pool[1] = 1.0
            assert pool[1].sum() == pool[1].numel()
            assert not pool[2].any()
    assert psutil.Process().memory_info().rss - before < plan.total_bytes / 4
