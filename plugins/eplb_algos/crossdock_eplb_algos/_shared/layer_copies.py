"""The choices of a layer as lists of ranks, for solvers that go through experts one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from crossdock_eplb_algos._shared.copy_table import CopyTable


@attrs.frozen(kw_only=True, eq=False)
class LayerCopies:
    """One layer's choices on the host. N experts with copies on two or more of R ranks, K the most ranks that one of them is on."""

    experts: torch.Tensor
    """[N] int64 logical experts, wave after wave."""
    ranks: torch.Tensor
    """[N, K] int64 ranks that hold a copy, ascending, padded with R."""
    waves: tuple[int, ...]
    """Rows of each wave: experts of a wave share no rank, so that their tokens can be spread at the same time."""
    widths: tuple[int, ...]
    """The most copies of an expert of each wave."""
    only_rank: torch.Tensor
    """[E] int64 rank of an expert without a choice; R for one with a choice."""
    places: torch.Tensor
    """[N, K] int64 place of each copy in a flat [M, R] of the table; M * R in padding."""
    num_ranks: int


def layer_copies(table: CopyTable) -> LayerCopies:
    """The same choices as in the table, which is on the host."""
    num_rows, num_ranks = table.slots.shape
    experts: list[int] = table.experts.tolist()
    holds: list[list[bool]] = (table.slots >= 0).tolist()
    ranks = [[rank for rank, held in enumerate(row) if held] for row in holds]
    waves = _waves(ranks)
    order = [row for wave in waves for row in wave]
    width = max((len(ranks[row]) for row in order), default=0)
    padded = [[*ranks[row], *[num_ranks] * (width - len(ranks[row]))] for row in order]
    rank_table = torch.tensor(padded, dtype=torch.int64).reshape(len(order), width)
    rows = torch.tensor(order, dtype=torch.int64)[:, None]
    only_rank = torch.full((table.row_of_expert.shape[0] + 1,), num_ranks)
    only_rank[table.only_experts] = torch.arange(num_ranks)[:, None].expand_as(table.only_experts)
    return LayerCopies(
        experts=torch.tensor([experts[row] for row in order], dtype=torch.int64),
        ranks=rank_table,
        waves=tuple(len(wave) for wave in waves),
        widths=tuple(max(len(ranks[row]) for row in wave) for wave in waves),
        only_rank=only_rank[:-1],
        places=torch.where(rank_table < num_ranks, rows * num_ranks + rank_table, num_rows * num_ranks),
        num_ranks=num_ranks,
    )


def _waves(ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Used rows in groups that share no rank, those with most copies first."""
    waves: list[list[int]] = []
    taken: list[set[int]] = []
    used = [row for row, held in enumerate(ranks) if held]
    for row in sorted(used, key=lambda row: -len(ranks[row])):
        for wave, ranks_of_wave in zip(waves, taken, strict=True):
            if ranks_of_wave.isdisjoint(ranks[row]):
                wave.append(row)
                ranks_of_wave.update(ranks[row])
                break
        else:
            waves.append([row])
            taken.append(set(ranks[row]))
    return waves
