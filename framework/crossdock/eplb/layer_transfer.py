"""One layer on its way: slices are handed over one at a time until every new expert of this rank lies in a spare slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from crossdock.eplb.layer_plan import LayerPlan
from crossdock.eplb.slices import Chunk
from crossdock.eplb.spare_slots import CANARY, SlotBytes, SpareSlots
from crossdock.eplb.transfer import Arriving, Outgoing, SliceCarrier, SliceTransfer, Ticket
from crossdock.errors import TransferFailed
from crossdock.types.model import ExpertReader
from crossdock.types.moves import Move


class LayerTransfer:
    """Staging of one layer on one rank."""

    def __init__(
        self,
        plan: LayerPlan,
        live: Mapping[str, torch.Tensor],
        spare: SpareSlots,
        carrier: SliceCarrier,
        *,
        ep_rank: int,
        reader: ExpertReader | None = None,
    ) -> None:
        """``live``: everything that moves with an expert of this layer, by name, dim 0 = local slot; read, not written.

        ``reader``: of the checkpoint, where experts come from there and not from other ranks.
        """
        self.plan = plan
        self._live = live
        self._live_slots = SlotBytes(live)
        self._spare = spare
        self._carrier = carrier
        self._rank = ep_rank
        self._reader = reader
        self._slots_per_rank = int(next(iter(live.values())).shape[0])
        self._waiting = deque(plan.slices)
        self._ticket: Ticket | None = None

    @property
    def slices_left(self) -> int:
        """That were not handed over."""
        return len(self._waiting)

    def advance(self) -> bool:
        """Hands over the next slice when the last one is done; True when all are. Never waits.

        Raises:
            TransferFailed: a slice failed.
        """
        if self._ticket is not None:
            if not self._ticket.is_done:
                return False
            if self._ticket.error is not None:
                error = self._ticket.error
                raise TransferFailed(
                    f"experts of MoE layer row {self.plan.moves.layer}: {type(error).__name__}: {error}"
                ) from error
            self._ticket = None
        if not self._waiting:
            return True
        self._ticket = self._carrier.submit(self._own_part(self._waiting.popleft()))
        return False

    def wait_briefly(self, seconds: float) -> None:
        """Gives the carrier time, when the ranks have nothing else to do."""
        if self._ticket is not None:
            self._ticket.wait_briefly(seconds)

    def give_up(self) -> None:
        """What still arrives is dropped."""
        self._waiting.clear()
        if self._ticket is not None:
            self._ticket.give_up()

    def check_canary(self) -> None:
        """In debug mode the number of each expert travelled with its tensors. Once every rank has sent all.

        Raises:
            TransferFailed: another expert arrived.
        """
        if CANARY not in self._live:
            return
        for slot, expert in self.plan.new_experts.items():
            found = int(self._spare.read(CANARY, self.plan.sources[slot]))
            if found != expert:
                raise TransferFailed(
                    f"MoE layer row {self.plan.moves.layer}: local slot {slot} was to get expert {expert} and got {found}"
                )

    def _own_part(self, chunks: Sequence[tuple[int, Chunk]]) -> SliceTransfer:
        """This rank's sends, receives and copies of a slice."""
        sends: list[Outgoing] = []
        receives: list[Arriving] = []
        copies: list[partial[None]] = []
        for tag, chunk in chunks:
            move = chunk.move
            target = move.slot // self._slots_per_rank
            if move.source_rank == target == self._rank:
                copies.append(partial(self._copy, chunk))
            elif self._reader is not None:
                if target == self._rank and chunk.begin == 0:
                    copies.append(partial(self._load, self._reader, move))
            elif move.source_rank == self._rank:
                slot = move.slot % self._slots_per_rank
                parts = partial(self._live_parts, chunk)
                sends.append(Outgoing(rank=target, tag=tag, parts=parts, slot=slot, begin=chunk.begin))
            else:
                parts = partial(self._spare_parts, chunk)
                receives.append(Arriving(rank=move.source_rank, tag=tag, num_bytes=chunk.num_bytes, parts=parts))
        return SliceTransfer(sends=sends, receives=receives, copies=copies)

    def _live_parts(self, chunk: Chunk) -> list[torch.Tensor]:
        return self._live_slots.parts(chunk.move.source_slot % self._slots_per_rank, chunk.begin, chunk.end)

    def _spare_parts(self, chunk: Chunk) -> list[torch.Tensor]:
        return self._spare.slots.parts(chunk.move.slot % self._slots_per_rank, chunk.begin, chunk.end)

    def _copy(self, chunk: Chunk) -> None:
        for target, source in zip(self._spare_parts(chunk), self._live_parts(chunk), strict=True):
            target.copy_(source)

    def _load(self, reader: ExpertReader, move: Move) -> None:
        """File to host memory, host memory to the spare slot; the switch is the third stage. Whole slots: a file is read in one go."""
        content = dict(reader.read_expert(self.plan.moves.layer, move.logical_expert))
        if CANARY in self._live:
            content[CANARY] = torch.tensor(move.logical_expert)
        self._spare.fill(move.slot % self._slots_per_rank, content)
