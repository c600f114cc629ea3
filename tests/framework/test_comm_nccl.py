"""What ``NcclComm`` asks of torch.distributed, on CPU tensors: gloo answers the same calls, but for gathers of unequal blocks."""

import torch
from crossdock.comm_nccl import NcclComm
from crossdock.groups import resolve_sizes


def calls(context):
    """Names of collectives that differ from their definition."""
    host = context.comms_of(resolve_sizes(ranks=context.size)).host.world
    comm = NcclComm(group=host.group, ranks=host.ranks, rank=host.rank)
    size, rank, wrong = comm.size, comm.rank, []

    def rows_of(other, count):
        generator = torch.Generator().manual_seed(100 * other + count)
        return torch.randint(0, 8, (count, 3), generator=generator).float()

    def check(name, got, expected):
        if got.dtype != expected.dtype or not torch.equal(got, expected):
            wrong.append(name)

    equal = [rows_of(other, 2 * size) for other in range(size)]
    total = torch.stack(equal).sum(0)
    check("all_gather", comm.all_gather(equal[rank]), torch.cat(equal))
    check("all_gatherv", comm.all_gatherv(equal[rank], [2 * size] * size), torch.cat(equal))
    check("all_reduce", comm.all_reduce(equal[rank]), total)
    check("reduce_scatter", comm.reduce_scatter(equal[rank]), total[2 * rank : 2 * rank + 2])
    counts = [other + 1 for other in range(size)]
    full = [rows_of(other, sum(counts)) for other in range(size)]
    start = sum(counts[:rank])
    own = slice(start, start + counts[rank])
    check("reduce_scatterv", comm.reduce_scatterv(full[rank], counts), torch.stack(full).sum(0)[own])
    sent = torch.cat([part[own] for part in full])
    check("all_to_all", comm.all_to_all(full[rank], counts, [counts[rank]] * size), sent)
    check("broadcast", comm.broadcast(full[rank], 1), full[1])
    narrow = [part.to(torch.float8_e4m3fn) for part in equal]
    check("float8", comm.all_gather(narrow[rank]).float(), torch.cat(narrow).float())
    check("input unchanged", equal[rank], rows_of(rank, 2 * size))
    return wrong


def test_nccl_calls_mean_what_the_collectives_say(rank_pool):
    assert rank_pool(2).run(calls) == [[], []]
