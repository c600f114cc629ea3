"""Water filling in torch operators, for one layer or many at once."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from crossdock_eplb_algos._shared.layer_copies import LayerCopies

SWEEPS_BETWEEN_CHECKS = 4
MAX_SWEEPS = 96
TOLERANCE = 1e-4
"""Sweeps end when the fullest rank lost less than this part of its load since the last check: then the optimum is nearer than 0.1 %."""
_NEVER = 1e30
"""Load of the place behind the last rank: no token is poured there."""


@attrs.frozen(eq=False)
class _Wave:
    """Rows first to end - 1 of all layers together; they share no rank."""

    first: int
    end: int
    places: torch.Tensor
    """[rows, width] index of each copy's rank among the loads of all layers."""
    divisors: torch.Tensor
    """[width] 1, 2, ..., width."""


class TorchFill:
    """Layers side by side: their loads are one vector, with one place more for padding."""

    def __init__(self, copies: Sequence[LayerCopies]) -> None:
        device = copies[0].experts.device
        num_ranks, num_experts = copies[0].num_ranks, copies[0].only_rank.shape[0]
        self._num_places = len(copies) * num_ranks
        self._num_layers = len(copies)
        width = max(layer.ranks.shape[1] for layer in copies)
        padding = self._num_places
        self._only_place = torch.cat(
            [_places(layer.only_rank, index, num_ranks, padding) for index, layer in enumerate(copies)]
        )
        self._waves: list[_Wave] = []
        rows, first = list[torch.Tensor](), 0
        starts = [0] * len(copies)
        for number in range(max(len(layer.waves) for layer in copies)):
            places = list[torch.Tensor]()
            present = [(index, layer) for index, layer in enumerate(copies) if number < len(layer.waves)]
            wave_width = max(layer.widths[number] for _, layer in present)
            for index, layer in present:
                part = slice(starts[index], starts[index] + layer.waves[number])
                starts[index] = part.stop
                ranks = torch.nn.functional.pad(layer.ranks[part], (0, width), value=num_ranks)[:, :wave_width]
                places.append(_places(ranks, index, num_ranks, padding))
                rows.append(layer.experts[part] + index * num_experts)
            end = first + sum(layer.waves[number] for _, layer in present)
            divisors = torch.arange(1, wave_width + 1, dtype=torch.float64, device=device)
            self._waves.append(_Wave(first, end, torch.cat(places), divisors))
            first = end
        self._row_experts = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device=device)
        self._shape = (first, width)

    @property
    def row_experts(self) -> torch.Tensor:
        """[rows] expert of each row of a solution, counted through all layers: layer * E + expert."""
        return self._row_experts

    def solve(self, tokens: torch.Tensor) -> torch.Tensor:
        """[E] (or [L, E] for several layers) -> [rows, K] float64 tokens of each copy. Rows of one layer are its ``LayerCopies`` rows."""
        flat = tokens.reshape(-1).to(torch.float64)
        loads = torch.zeros(self._num_places + 1, dtype=torch.float64, device=flat.device)
        loads.index_add_(0, self._only_place, flat)
        loads[-1] = _NEVER
        shares = torch.zeros(self._shape, dtype=torch.float64, device=flat.device)
        poured = flat[self._row_experts].unsqueeze(1)
        before: torch.Tensor | None = None
        for sweep in range(MAX_SWEEPS):
            for wave in self._waves:
                _pour(wave, loads, shares, poured)
            if sweep % SWEEPS_BETWEEN_CHECKS == SWEEPS_BETWEEN_CHECKS - 1 and self._waves:
                highest = loads[:-1].view(self._num_layers, -1).amax(1)
                if before is not None and bool((before - highest <= TOLERANCE * highest).all()):
                    break
                before = highest
        return shares


def _places(ranks: torch.Tensor, layer: int, num_ranks: int, padding: int) -> torch.Tensor:
    return torch.where(ranks < num_ranks, ranks + layer * num_ranks, padding)


def _pour(wave: _Wave, loads: torch.Tensor, shares: torch.Tensor, tokens: torch.Tensor) -> None:
    """Each expert of a wave takes its tokens back and fills its ranks up to one level."""
    old = shares[wave.first : wave.end, : wave.divisors.shape[0]]
    others = loads[wave.places] - old
    # With ranks by load, the level over the j lowest falls while the next rank lies below it and rises after that: take the least.
    lowest_first = torch.sort(others, dim=1).values
    level = lowest_first.cumsum(1).add_(tokens[wave.first : wave.end]).div_(wave.divisors).amin(1, keepdim=True)
    new = (level - others).clamp_(min=0)
    loads.index_add_(0, wave.places.view(-1), (new - old).view(-1))
    old.copy_(new)
