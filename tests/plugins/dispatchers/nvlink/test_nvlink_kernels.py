"""The NVLink kernels with several ranks' buffers in one process, compared with the torch twins.

Under Triton's interpreter where there is no GPU (fp32 and fp16 only: its bf16 arithmetic is wrong); there the ranks run one after the
other and leave the flags alone. On a GPU the same tests run compiled, and one more with a stream a rank and live flags.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from crossdock.errors import DispatchMisuse
from crossdock.ops.fp8_block_torch import BLOCK
from crossdock.ops.quantise_rows_torch import quantise_rows_torch
from crossdock_dispatchers.nvlink.kernels.put_rows import put_rows, wait_rows
from crossdock_dispatchers.nvlink.kernels.put_rows_torch import put_rows_torch
from crossdock_dispatchers.nvlink.kernels.sum_rows import sum_rows, useful_chunks, wait_outputs
from crossdock_dispatchers.nvlink.kernels.sum_rows_torch import sum_rows_torch
from crossdock_dispatchers.nvlink.workspace import SlotBuffers, allocate_slot

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `interpreter`)"
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

WORLD, SLOTS, TOP_K, CAPACITY = 3, 2, 3, 5
POISON = 7.0e3
"""What buffers hold before a put; finite in fp16."""


@attrs.frozen(kw_only=True, eq=False)
class HostBuffer:
    local: torch.Tensor
    addresses: torch.Tensor


class HostDomain:
    """Buffers of all ranks in one process; every rank's k-th allocation is one symmetric buffer."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._buffers: list[list[torch.Tensor]] = []

    def slots(
        self, dtype: torch.dtype, hidden_size: int, quantised: bool, programs: int, chunks: int
    ) -> list[SlotBuffers]:
        domain = self

        class Allocator:
            def __init__(self, rank: int) -> None:
                self._rank, self._calls = rank, 0

            def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> HostBuffer:
                if self._calls == len(domain._buffers):
                    domain._buffers.append(
                        [torch.zeros(*shape, dtype=dtype, device=DEVICE) for _ in range(domain._world)]
                    )
                ranks = domain._buffers[self._calls]
                self._calls += 1
                addresses = torch.tensor([buffer.data_ptr() for buffer in ranks], dtype=torch.int64, device=DEVICE)
                return HostBuffer(local=ranks[self._rank], addresses=addresses)

        return [
            allocate_slot(
                Allocator(rank),
                world=self._world,
                capacity=CAPACITY,
                hidden_size=hidden_size,
                top_k=TOP_K,
                dtype=dtype,
                wire_dtype=torch.float8_e4m3fn if quantised else dtype,
                scale_block=BLOCK if quantised else None,
                programs=programs,
                chunks=chunks,
            )
            for rank in range(self._world)
        ]


def routed(seed: int, counts: Sequence[int], hidden_size: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Per rank hidden rows, distinct ids with some -1, and weights."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for count in counts:
        ids = torch.empty(count, TOP_K, dtype=torch.int64)
        for row in ids:
            row.copy_(torch.randperm(WORLD * SLOTS, generator=generator)[:TOP_K])
        ids = torch.where(torch.rand(count, TOP_K, generator=generator) < 0.2, -1, ids)
        hidden = torch.randn(count, hidden_size, generator=generator).to(dtype)
        weights = torch.rand(count, TOP_K, generator=generator)
        batches.append((hidden.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)))
    return batches


@pytest.mark.parametrize("counts", [(5, 0, 3), (1, 1, 1), (0, 0, 1), (5, 5, 5)])
@pytest.mark.parametrize(("dtype", "hidden_size"), [(torch.float32, 40), (torch.float16, 128)])
def test_rows_ids_and_weights_land_where_the_twin_puts_them(
    counts: tuple[int, ...], dtype: torch.dtype, hidden_size: int
) -> None:
    bucket = max(counts)
    got = HostDomain(WORLD).slots(dtype, hidden_size, False, 2, 2)
    want = HostDomain(WORLD).slots(dtype, hidden_size, False, 2, 2)
    for slot in (*got, *want):
        slot.rows.local.fill_(POISON)
    twins = [{"rows": s.rows.local, "ids": s.ids.local, "weights": s.weights.local} for s in want]
    for rank, (hidden, ids, weights) in enumerate(routed(3, counts, hidden_size, dtype)):
        put_rows(
            hidden,
            ids,
            weights,
            got[rank],
            rank=rank,
            bucket=bucket,
            slots_per_rank=SLOTS,
            programs=2,
            synchronise=False,
            wait=False,
        )
        put_rows_torch(hidden, ids, weights, twins, rank, bucket, SLOTS)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine.rows.local, theirs.rows.local)
        assert torch.equal(mine.ids.local, theirs.ids.local)
        assert torch.equal(mine.weights.local, theirs.weights.local)


def test_the_fp8_wire_carries_representable_values_exactly() -> None:
    """Values that float8 holds exactly: the interpreter loses the carry when rounding reaches the next power of two."""
    hidden_size, counts = 256, (4, 2, 5)
    slots = HostDomain(WORLD).slots(torch.float32, hidden_size, True, 2, 2)
    generator = torch.Generator().manual_seed(2)
    batches = []
    for hidden, ids, weights in routed(5, counts, hidden_size, torch.float32):
        exact = (hidden * 100).clamp(-440, 440).to(torch.float8_e4m3fn).float()
        exact.view(len(hidden), -1, BLOCK)[:, :, 0] = 448.0
        powers = 2.0 ** torch.randint(-6, 3, (len(hidden), hidden_size // BLOCK), generator=generator)
        batches.append((exact * powers.repeat_interleave(BLOCK, 1).to(DEVICE), ids, weights))
    for rank, (hidden, ids, weights) in enumerate(batches):
        put_rows(
            hidden,
            ids,
            weights,
            slots[rank],
            rank=rank,
            bucket=5,
            slots_per_rank=SLOTS,
            programs=2,
            synchronise=False,
            wait=False,
        )
    for holder, slot in enumerate(slots):
        assert slot.scales is not None
        for source, (hidden, ids, _) in enumerate(batches):
            payload, scales = quantise_rows_torch(hidden)
            here = ((ids >= holder * SLOTS) & (ids < (holder + 1) * SLOTS)).any(dim=1)
            block = slice(source * 5, source * 5 + len(hidden))
            assert torch.equal(slot.scales.local[block][here], scales[here])
            assert torch.equal(slot.rows.local[block].float()[here], payload.float()[here])
            back = slot.rows.local[block].float() * slot.scales.local[block].repeat_interleave(BLOCK, 1)
            assert torch.equal(back[here], hidden[here])


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("counts", [(5, 0, 3), (1, 1, 1), (5, 5, 5)])
def test_outputs_come_home_summed_in_rank_order(counts: tuple[int, ...], chunks: int) -> None:
    bucket, hidden_size, programs = max(counts), 40, 2
    slots = HostDomain(WORLD).slots(torch.float32, hidden_size, False, programs, chunks)
    batches = routed(11, counts, hidden_size, torch.float32)
    for rank, (hidden, ids, weights) in enumerate(batches):
        put_rows(
            hidden,
            ids,
            weights,
            slots[rank],
            rank=rank,
            bucket=bucket,
            slots_per_rank=SLOTS,
            programs=programs,
            synchronise=False,
            wait=False,
        )
    generator = torch.Generator().manual_seed(1)
    outs = [torch.randn(WORLD * bucket, hidden_size, generator=generator).to(DEVICE) for _ in range(WORLD)]
    results = [torch.full((len(hidden), hidden_size), POISON, device=DEVICE) for hidden, _, _ in batches]
    for put, reduce in ((True, False), (False, True)):
        for rank, (_, ids, _) in enumerate(batches):
            sum_rows(outs[rank], ids, slots[rank], results[rank], rank=rank, bucket=bucket, slots_per_rank=SLOTS,
                     programs=programs, chunks=chunks, put=put, reduce=reduce, synchronise=False)  # fmt: skip
    for rank, (_, ids, _) in enumerate(batches):
        assert torch.equal(results[rank], sum_rows_torch(outs, ids, rank, bucket, SLOTS))


def test_outputs_of_another_dtype_than_the_wire_home_are_refused() -> None:
    slot = HostDomain(WORLD).slots(torch.float16, 40, False, 2, 1)[0]
    ids = torch.zeros(1, TOP_K, dtype=torch.int64, device=DEVICE)
    outs, out = torch.zeros(WORLD, 40, device=DEVICE), torch.zeros(1, 40, dtype=torch.float16, device=DEVICE)
    with pytest.raises(DispatchMisuse, match="convert it"):
        sum_rows(outs, ids, slot, out, rank=0, bucket=1, slots_per_rank=SLOTS, programs=2, chunks=1)


def test_a_program_sends_no_more_pieces_than_it_has_tiles() -> None:
    assert useful_chunks(8, bucket=4096, programs=132, hidden_size=7168) == 4
    assert useful_chunks(8, bucket=4096, programs=24, hidden_size=7168) == 8
    assert useful_chunks(8, bucket=128, programs=128, hidden_size=7168) == 1
    assert useful_chunks(8, bucket=1, programs=1, hidden_size=40) == 1


def load_kernels(slot: SlotBuffers, bucket: int, hidden_size: int, dtype: torch.dtype, **sizes: int) -> None:
    """One launch of each kernel with flags that never make it wait.

    Loading a kernel waits for the device. On ranks that share a device a rank's load would wait for its own spinning kernel.
    """

    alive: list[torch.Tensor] = []

    def never_waits(flags: HostBuffer) -> HostBuffer:
        scratch = [torch.zeros_like(flags.local) for _ in range(WORLD)]
        alive.extend(scratch)
        addresses = torch.tensor([buffer.data_ptr() for buffer in scratch], dtype=torch.int64, device=DEVICE)
        return HostBuffer(local=torch.ones_like(flags.local), addresses=addresses)

    ids = torch.full((bucket, TOP_K), -1, dtype=torch.int64, device=DEVICE)
    hidden = torch.zeros(bucket, hidden_size, dtype=dtype, device=DEVICE)
    outs = torch.zeros(WORLD * bucket, hidden_size, dtype=dtype, device=DEVICE)
    programs, chunks = sizes["programs"], sizes["chunks"]
    for wait in (True, False):
        calm = attrs.evolve(slot, put_flags=never_waits(slot.put_flags), sum_flags=never_waits(slot.sum_flags))
        put_rows(
            hidden,
            ids,
            ids.float(),
            calm,
            rank=0,
            bucket=bucket,
            slots_per_rank=SLOTS,
            programs=programs,
            synchronise=True,
            wait=wait,
        )
        wait_rows(attrs.evolve(calm, put_flags=never_waits(slot.put_flags)), rank=0, programs=programs)
        calm = attrs.evolve(calm, sum_flags=never_waits(slot.sum_flags))
        come_home(outs, ids, calm, hidden.clone(), 0, bucket, programs, chunks, wait)
    torch.cuda.synchronize()


def come_home(
    outs: torch.Tensor,
    ids: torch.Tensor,
    slot: SlotBuffers,
    result: torch.Tensor,
    rank: int,
    bucket: int,
    programs: int,
    chunks: int,
    fused: bool,
) -> None:
    """Outputs of one rank, in one launch, or sent, awaited and summed by other programs than those that sent them."""
    steps: list[dict[str, Any]] = [{"programs": programs, "chunks": chunks}]
    if not fused:
        steps = [
            {"programs": programs, "chunks": chunks, "reduce": False},
            {"programs": programs + 3, "chunks": 1, "put": False, "synchronise": False},
        ]
    for number, step in enumerate(steps):
        if number:
            wait_outputs(slot, rank=rank, flags=programs * chunks)
        sum_rows(outs, ids, slot, result, rank=rank, bucket=bucket, slots_per_rank=SLOTS, **step)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [True, False])
def test_ranks_that_run_at_the_same_time_wait_for_one_another(dtype: torch.dtype, fused: bool) -> None:
    """A stream a rank; 50 rounds over the same buffers, so that a flag left over from a round would show."""
    counts, hidden_size, programs, chunks = (5, 0, 3), 640, 4, 2
    bucket = max(counts)
    slots = HostDomain(WORLD).slots(dtype, hidden_size, False, programs, chunks)
    load_kernels(slots[0], bucket, hidden_size, dtype, programs=programs, chunks=chunks)
    streams = [torch.cuda.Stream() for _ in range(WORLD)]
    for round_ in range(50):
        batches = routed(round_, counts, hidden_size, dtype)
        generator = torch.Generator().manual_seed(round_)
        outs = [torch.randn(WORLD * bucket, hidden_size, generator=generator).to(DEVICE, dtype) for _ in range(WORLD)]
        results = [
            torch.full((len(hidden), hidden_size), POISON, device=DEVICE, dtype=dtype) for hidden, _, _ in batches
        ]
        torch.cuda.synchronize()
        for rank, (hidden, ids, weights) in enumerate(batches):
            with torch.cuda.stream(streams[rank]):
                put_rows(
                    hidden,
                    ids,
                    weights,
                    slots[rank],
                    rank=rank,
                    bucket=bucket,
                    slots_per_rank=SLOTS,
                    programs=programs,
                    synchronise=True,
                    wait=fused,
                )
                if not fused:
                    wait_rows(slots[rank], rank=rank, programs=programs)
                come_home(outs[rank], ids, slots[rank], results[rank], rank, bucket, programs, chunks, fused)
        torch.cuda.synchronize()
        for rank, (_, ids, _) in enumerate(batches):
            assert torch.equal(results[rank], sum_rows_torch(outs, ids, rank, bucket, SLOTS))
        for slot in slots:
            assert not slot.put_flags.local.any()
            assert not slot.sum_flags.local.any()
