"""Transfers beside the step: bytes arrive, failures are told, what is given up is dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import attrs
import pytest
import torch
from crossdock.comm import local_comms
from crossdock.eplb import transfer_peer
from crossdock.eplb.spare_slots import SlotBytes, SpareSlots, slot_bytes
from crossdock.eplb.transfer import (
    Arriving,
    LocalCarrier,
    Outgoing,
    SliceCarrier,
    SliceTransfer,
    Ticket,
    TransferTicket,
)
from crossdock.eplb.transfer_device import DeviceTicket
from crossdock.eplb.transfer_gloo import GlooCarrier
from crossdock.eplb.transfer_shared import SharedCarrier
from crossdock.testing.rebalance_rig import layer_tensors
from crossdock.testing.world import RankContext, RankPool

Pool = Callable[[int], RankPool]
PATIENCE_S = 20.0


def carried(ticket: Ticket) -> None:
    ticket.wait_briefly(PATIENCE_S)
    assert ticket.is_done, "the transfer does not end"


def all_to_all_parts(context: RankContext, sizes: list[int]) -> list[list[int]]:
    """Every rank sends each other one part of each size, all in one slice, and copies within itself."""
    members = tuple(range(context.size))
    carrier = GlooCarrier(members, [members], timeout_s=30.0)
    found: dict[tuple[int, int], torch.Tensor] = {}
    sends, receives = [], []
    for other in members:
        for tag, size in enumerate(sizes):
            if other == context.rank:
                continue
            data = torch.full((size,), 10 * context.rank + tag, dtype=torch.uint8)
            cut = [size // 3, size - size // 3]
            sends.append(Outgoing(rank=other, tag=tag, parts=lambda data=data, cut=cut: data.split(cut)))
            found[other, tag] = torch.zeros(size, dtype=torch.uint8)
            parts = [found[other, tag]]
            receives.append(Arriving(rank=other, tag=tag, num_bytes=size, parts=lambda parts=parts: parts))
    copied = threading.Event()
    for _ in range(2):
        ticket = carrier.submit(SliceTransfer(sends=sends, receives=receives, copies=[copied.set]))
        carried(ticket)
        assert ticket.error is None
    carrier.close()
    assert copied.is_set()
    return [[int(found[key].min()), found[key].shape[0]] for key in sorted(found)]


def test_parts_of_all_ranks_cross_in_one_slice(rank_pool: Pool) -> None:
    sizes = [1, 100, 70_000]
    for rank, found in enumerate(rank_pool(4).run(all_to_all_parts, sizes)):
        others = [other for other in range(4) if other != rank]
        assert found == [[10 * other + tag, size] for other in others for tag, size in enumerate(sizes)]


def fail_then_renew(context: RankContext) -> tuple[str, str, int]:
    """Rank 1 cannot read what it should send: its slice and the next one fail; after a renewal bytes cross again."""
    members = tuple(range(context.size))
    carrier = GlooCarrier(members, [members], timeout_s=30.0)
    arrived = torch.zeros(3, dtype=torch.uint8)

    def broken() -> torch.Tensor:
        raise OSError("no such expert")

    def exchange(read: Callable[[], torch.Tensor]) -> Ticket:
        other = 1 - context.rank
        receive = Arriving(rank=other, tag=0, num_bytes=3, parts=lambda: [arrived])
        return carrier.submit(
            SliceTransfer(sends=[Outgoing(rank=other, tag=0, parts=lambda: [read()])], receives=[receive])
        )

    def whole() -> torch.Tensor:
        return torch.full((3,), 5 + context.rank, dtype=torch.uint8)

    first, second = exchange(broken if context.rank == 1 else whole), exchange(whole)
    if context.rank == 1:
        carried(first)
        carried(second)
    first.give_up()
    second.give_up()
    carrier.abandon()
    carrier.renew()
    third = exchange(whole)
    carried(third)
    carrier.close()
    assert third.error is None
    return str(first.error), str(second.error), int(arrived[-1])


def test_after_a_failure_the_next_slices_fail_and_a_renewed_carrier_works(rank_pool: Pool) -> None:
    healthy, failed = rank_pool(2).run(fail_then_renew)
    assert failed[:2] == ("no such expert", "an earlier transfer failed: no such expert")
    assert (healthy[2], failed[2]) == (6, 5)


def test_what_was_given_up_is_not_written() -> None:
    target = torch.zeros(1, dtype=torch.uint8)
    arriving = Arriving(rank=0, tag=0, num_bytes=1, parts=lambda: [target])
    ticket = TransferTicket(SliceTransfer(receives=[arriving], copies=[lambda: target.fill_(2)]))
    ticket.give_up()
    ticket.write([torch.ones(1, dtype=torch.uint8)])
    assert target.tolist() == [0]


def test_a_group_of_one_copies_at_once_and_tells_errors_in_the_ticket() -> None:
    copied: list[int] = []
    ticket = LocalCarrier().submit(SliceTransfer(copies=[lambda: copied.append(1)]))
    assert ticket.is_done
    assert copied == [1]

    def broken() -> None:
        raise OSError("full")

    ticket = LocalCarrier().submit(SliceTransfer(copies=[broken]))
    assert ticket.is_done
    assert str(ticket.error) == "full"


@attrs.define
class ImmediateSide:
    """In place of a stream: what is enqueued happens at once, and ``release`` is passed when the test says so."""

    is_released: bool = True

    def enqueued(self, work: Callable[[], None]) -> DeviceTicket:
        work()
        return DeviceTicket()

    def release(self) -> None:
        self.is_released = False

    def synchronize(self) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize("kind", ["peer", "shared"])
def test_a_rank_writes_what_it_sends_into_the_spare_slots_of_the_others(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_peer, "SideStream", ImmediateSide)
    live = dict(layer_tensors(0, [3, 4]).tensors)
    spares = [SpareSlots([live]) for _ in range(3)]
    peers = [spares[0].peer(spare.memory) for spare in spares]
    carrier: SliceCarrier = SharedCarrier(peers)
    if kind == "peer":
        carrier = transfer_peer.PeerCarrier(transfer_peer.PeerMemory(peers, None), local_comms().world)
    own, end = SlotBytes(live), slot_bytes(live)
    copied: list[int] = []
    for rank, cut in ((1, 50), (2, 7)):
        for begin, stop in ((0, cut), (cut, end)):
            parts = partial(own.parts, rank - 1, begin, stop)
            send = Outgoing(rank=rank, tag=0, parts=parts, slot=1, begin=begin)
            ticket = carrier.submit(SliceTransfer(sends=[send], copies=[partial(copied.append, rank)]))
            assert ticket.is_done
            assert ticket.error is None
    assert copied == [1, 1, 2, 2]
    for rank in (1, 2):
        for name, tensor in live.items():
            assert torch.equal(spares[rank].read(name, 1).view(torch.uint8), tensor[rank - 1].view(torch.uint8))
    assert carrier.has_room
    carrier.release()
    assert carrier.has_room == (kind == "shared")


def test_what_a_step_thread_cannot_write_is_told_in_the_ticket() -> None:
    def broken() -> list[torch.Tensor]:
        raise OSError("no such expert")

    ticket = SharedCarrier([]).submit(SliceTransfer(sends=[Outgoing(rank=0, tag=0, parts=broken)]))
    assert ticket.is_done
    assert str(ticket.error) == "no such expert"
