"""Water filling in torch operators, for one layer or many at once."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from crossdock_eplb_algos._shared.layer_copies import LayerCopies

SWEEPS_BETWEEN_CHECKS = 4
MAX_SWEEPS = 40
TOLERANCE = 2e-4
"""Sweeps end when the load of the fullest rank changed by less than this part since the last check: then it is within 0.1 % of the least."""
OVERSHOOT = 1.65
"""After the first sweep an expert pours against loads times this, less what it had: 1 would stop at its own optimum, below 2 every
pour still lowers the sum of squares. Chains of experts settle in a third of the sweeps (measured on placements with 32 ranks)."""
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
        steps = [
            (wave, shares[wave.first : wave.end, : wave.divisors.shape[0]], poured[wave.first : wave.end])
            for wave in self._waves
        ]
        before: torch.Tensor | None = None
        for sweep in range(MAX_SWEEPS):
            for wave, old, amounts in steps:
                _pour(wave, loads, old, amounts, OVERSHOOT if sweep else 1.0)
            if sweep % SWEEPS_BETWEEN_CHECKS == SWEEPS_BETWEEN_CHECKS - 1:
                highest = loads[:-1].view(self._num_layers, -1).amax(1)
                if before is not None and bool(((before - highest).abs() <= TOLERANCE * highest).all()):
                    break
                before = highest
        return shares


def _places(ranks: torch.Tensor, layer: int, num_ranks: int, padding: int) -> torch.Tensor:
    return torch.where(ranks < num_ranks, ranks + layer * num_ranks, padding)


def _pour(wave: _Wave, loads: torch.Tensor, old: torch.Tensor, tokens: torch.Tensor, overshoot: float) -> None:
    """Each expert of a wave takes its tokens back and fills its ranks up to one level; ``old`` is overwritten."""
    others = loads[wave.places].mul_(overshoot).sub_(old)
    # With ranks by load, the level over the j lowest falls while the next rank lies below it and rises after that: take the least.
    lowest_first = torch.sort(others, dim=1).values
    level = lowest_first.cumsum(1).add_(tokens).div_(wave.divisors).amin(1, keepdim=True)
    new = torch.sub(level, others).clamp_(min=0)
    loads.index_add_(0, wave.places.view(-1), (new - old).view(-1))
    old.copy_(new)
