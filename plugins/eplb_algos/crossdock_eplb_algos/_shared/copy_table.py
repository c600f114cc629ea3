"""Where a layer's experts have copies, as tensors of fixed shape and address: what pickers and captured graphs read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from crossdock_eplb_algos._shared.arrays import Ints, numbers

if TYPE_CHECKING:
    from crossdock.types.placement import Topology


@attrs.frozen(kw_only=True, eq=False)
class CopyTable:
    """One layer. M rows, as many as experts can ever have copies on two of R ranks; S slots a rank; E experts.

    Copies of an expert on one rank are one copy, the first: to split tokens between them changes no load.
    """

    experts: torch.Tensor
    """[M] int64 logical expert of each row, ascending; E in rows that are not used."""
    slots: torch.Tensor
    """[M, R] int64 physical expert of the copy on each rank, -1 where there is none."""
    columns: torch.Tensor
    """[C] int64 ranks that hold a copy, ascending, padded with R; as many as there can ever be, at most R."""
    only_experts: torch.Tensor
    """[R, S] int64 experts that are on this rank and on no other, padded with E."""
    row_of_expert: torch.Tensor
    """[E] int64; M for an expert without a choice."""
    first_slot: torch.Tensor
    """[E] int64 first physical expert."""

    @property
    def num_rows(self) -> int:
        """M."""
        return int(self.slots.shape[0])

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.slots.shape[1])

    def to(self, device: torch.device) -> CopyTable:
        """The same there."""
        return CopyTable(**{name: getattr(self, name).to(device) for name in attrs.fields_dict(CopyTable)})

    def overwrite(self, other: CopyTable) -> None:
        """Takes the content of a host table of the same sizes, in place and without waiting for a GPU."""
        for name in attrs.fields_dict(CopyTable):
            own, new = getattr(self, name), getattr(other, name)
            own.copy_(new.pin_memory() if own.is_cuda else new, non_blocking=True)


def copy_table(replicas: Ints, topology: Topology) -> CopyTable:
    """The table of a layer on the host, from the slots of each logical expert: [E, X], padded with -1, in slot order."""
    num_experts, num_ranks = len(replicas), topology.num_gpus
    owner, place = np.nonzero(replicas >= 0)
    slot = replicas[owner, place]
    on_rank = np.full((num_experts, num_ranks), topology.num_physical_experts, dtype=np.int64)
    np.minimum.at(on_rank, (owner, slot // topology.slots_per_gpu), slot)
    on_rank[on_rank == topology.num_physical_experts] = -1
    num_copies = (on_rank >= 0).sum(axis=1)

    num_rows = min(num_experts, topology.num_physical_experts - num_experts)
    with_choice = np.flatnonzero(num_copies > 1)
    experts = np.full(num_rows, num_experts, dtype=np.int64)
    experts[: len(with_choice)] = with_choice
    slots = np.full((num_rows, num_ranks), -1, dtype=np.int64)
    slots[: len(with_choice)] = on_rank[with_choice]
    columns = np.full(min(num_ranks, 2 * (topology.num_physical_experts - num_experts)), num_ranks, dtype=np.int64)
    with_copies = np.flatnonzero((slots >= 0).any(axis=0))
    columns[: len(with_copies)] = with_copies
    row_of_expert = np.full(num_experts, num_rows, dtype=np.int64)
    row_of_expert[with_choice] = numbers(len(with_choice))

    only = np.full((num_ranks, topology.slots_per_gpu), num_experts, dtype=np.int64)
    expert, rank = np.nonzero((on_rank >= 0) & (num_copies == 1)[:, None])
    only[rank, on_rank[expert, rank] % topology.slots_per_gpu] = expert
    return CopyTable(
        experts=torch.from_numpy(experts),
        slots=torch.from_numpy(slots),
        columns=torch.from_numpy(columns),
        only_experts=torch.from_numpy(only),
        row_of_expert=torch.from_numpy(row_of_expert),
        first_slot=torch.from_numpy(replicas[:, 0].copy()),
    )


def tokens_of_rows(table: CopyTable, counts: torch.Tensor) -> torch.Tensor:
    """[..., E] tokens of each expert -> [..., M] tokens of each row, 0 for unused rows."""
    return torch.nn.functional.pad(counts, (0, 1))[..., table.experts]


def loads_without_choice(table: CopyTable, tokens: torch.Tensor) -> torch.Tensor:
    """[E] tokens of each expert -> [R] tokens that each rank gets whatever is picked."""
    return torch.nn.functional.pad(tokens, (0, 1))[table.only_experts].sum(1)
