"""Which experts of a layer a picker has a choice for: those with copies on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch

if TYPE_CHECKING:
    from crossdock.types.placement import Topology


@attrs.frozen(kw_only=True, eq=False)
class LayerCopies:
    """One layer's choices. M experts with copies on two or more of R ranks, K the most ranks that one of them is on.

    Copies of an expert on one rank are one copy, the first: to split tokens between them changes no load.
    """

    experts: torch.Tensor
    """[M] int64 logical experts, wave after wave."""
    ranks: torch.Tensor
    """[M, K] int64 ranks that hold a copy, ascending, padded with R."""
    slots: torch.Tensor
    """[M, K] int64 physical expert of that copy, padded with 0."""
    waves: tuple[int, ...]
    """Rows of each wave: experts of a wave share no rank, so that their tokens can be spread at the same time."""
    widths: tuple[int, ...]
    """The most copies of an expert of each wave."""
    row_of_expert: torch.Tensor
    """[E] int64 row in ``experts``; M for an expert without a choice."""
    only_rank: torch.Tensor
    """[E] int64 rank of an expert without a choice; R for one with a choice."""
    first_slot: torch.Tensor
    """[E] int64 first physical expert of each."""
    num_ranks: int

    @property
    def num_rows(self) -> int:
        """M."""
        return int(self.experts.shape[0])


def copies_of_layer(
    replica_lists: Sequence[Sequence[int]], topology: Topology, device: torch.device | None = None
) -> LayerCopies:
    """The choices of a layer, from the slots of each logical expert (in slot order, each list not empty)."""
    num_ranks, slots_per_rank = topology.num_gpus, topology.slots_per_gpu
    copies = [_first_of_each_rank(slots, slots_per_rank) for slots in replica_lists]
    waves = _waves(copies)
    order = [expert for wave in waves for expert in wave]
    width = max((len(copies[expert]) for expert in order), default=0)
    ranks = [[*copies[expert], *[num_ranks] * (width - len(copies[expert]))] for expert in order]
    slots = [[*copies[expert].values(), *[0] * (width - len(copies[expert]))] for expert in order]
    row_of_expert = [len(order)] * len(copies)
    for row, expert in enumerate(order):
        row_of_expert[expert] = row
    only_rank = [num_ranks if len(of_rank) > 1 else next(iter(of_rank)) for of_rank in copies]

    def tensor(values: Sequence[object], *shape: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device).reshape(shape)

    return LayerCopies(
        experts=tensor(order, len(order)),
        ranks=tensor(ranks, len(order), width),
        slots=tensor(slots, len(order), width),
        waves=tuple(len(wave) for wave in waves),
        widths=tuple(max(len(copies[expert]) for expert in wave) for wave in waves),
        row_of_expert=tensor(row_of_expert, len(copies)),
        only_rank=tensor(only_rank, len(copies)),
        first_slot=tensor([slots[0] for slots in replica_lists], len(copies)),
        num_ranks=num_ranks,
    )


def _first_of_each_rank(slots: Sequence[int], slots_per_rank: int) -> dict[int, int]:
    """Rank -> first slot there."""
    found: dict[int, int] = {}
    for slot in slots:
        found.setdefault(slot // slots_per_rank, slot)
    return found


def _waves(copies: Sequence[dict[int, int]]) -> list[list[int]]:
    """Experts with a choice in groups that share no rank, those with most copies first."""
    waves: list[list[int]] = []
    taken: list[set[int]] = []
    movable = [expert for expert, of_rank in enumerate(copies) if len(of_rank) > 1]
    for expert in sorted(movable, key=lambda expert: -len(copies[expert])):
        ranks = copies[expert].keys()
        for wave, ranks_of_wave in zip(waves, taken, strict=True):
            if ranks_of_wave.isdisjoint(ranks):
                wave.append(expert)
                ranks_of_wave.update(ranks)
                break
        else:
            waves.append([expert])
            taken.append(set(ranks))
    return waves
