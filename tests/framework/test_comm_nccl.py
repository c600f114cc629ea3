"""``NcclComm`` against the definitions: on CPU tensors, where gloo answers the same calls but for gathers of unequal blocks; all of them on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from crossdock.comm_nccl import NcclComm
from crossdock.groups import resolve_sizes
from crossdock.testing.world import RankContext, RankPool

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def calls(context: RankContext, counts: Sequence[int], dtype: torch.dtype) -> list[str]:
    """Names of collectives that differ from their definition, for so many rows of each rank; values are exact in every type and sum."""
    comms = context.comms_of(resolve_sizes(ranks=context.size))
    host = comms.host.world
    comm = comms.world if context.device == "cuda" else NcclComm(group=host.group, ranks=host.ranks, rank=host.rank)
    assert isinstance(comm, NcclComm)
    size, rank, wrong = comm.size, comm.rank, list[str]()

    def rows_of(other: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * other + count)
        return torch.randint(0, 8, (count, 3), generator=generator).to(context.device, dtype)

    def check(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        if got.dtype != expected.dtype or not torch.equal(got, expected):
            wrong.append(name)

    equal = [rows_of(other, 2 * size) for other in range(size)]
    total = torch.stack(equal).sum(0).to(dtype)
    check("all_gather", comm.all_gather(equal[rank]), torch.cat(equal))
    check("all_gatherv", comm.all_gatherv(equal[rank], [2 * size] * size), torch.cat(equal))
    check("all_reduce", comm.all_reduce(equal[rank]), total)
    check("reduce_scatter", comm.reduce_scatter(equal[rank]), total[2 * rank : 2 * rank + 2])
    full = [rows_of(other, sum(counts)) for other in range(size)]
    start = sum(counts[:rank])
    own = slice(start, start + counts[rank])
    check("reduce_scatterv", comm.reduce_scatterv(full[rank], counts), torch.stack(full).sum(0).to(dtype)[own])
    sent = torch.cat([part[own] for part in full])
    pending = [comm.all_to_all_begin(full[rank], counts, [counts[rank]] * size) for _ in range(2)]
    check("second all_to_all in flight", pending[1].wait(), sent)
    check("first all_to_all in flight", pending[0].wait(), sent)
    check("broadcast", comm.broadcast(full[rank], size - 1), full[-1])
    if context.device == "cuda":
        uneven = [rows_of(other, counts[other]) for other in range(size)]
        check("all_gatherv of unequal blocks", comm.all_gatherv(uneven[rank], counts), torch.cat(uneven))
    if dtype is torch.float32:
        narrow = [part.to(torch.float8_e4m3fn) for part in equal]
        check("float8", comm.all_gather(narrow[rank]).float(), torch.cat(narrow).float())
    check("input unchanged", equal[rank], rows_of(rank, 2 * size))
    return wrong


def test_nccl_calls_mean_what_the_collectives_say(rank_pool: Callable[[int], RankPool]) -> None:
    for dtype in DTYPES:
        assert rank_pool(2).run(calls, (1, 2), dtype) == [[], []], dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which two ranks can share")
def test_nccl_itself_keeps_to_the_definitions_with_empty_ranks_too() -> None:
    with RankPool(2, device="cuda") as gpus:
        for counts in ((3, 1), (0, 2), (1, 0), (0, 0)):
            for dtype in DTYPES:
                assert gpus.run(calls, counts, dtype) == [[], []], (counts, dtype)
