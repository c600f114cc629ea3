"""Dispatch scenarios: rows of all replicas, their routing, and which of them a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch

from crossdock.dispatch_layout import rows_of_rank
from crossdock.groups import align_rows, drop_unit_axes, rank_place
from crossdock.testing.toy_experts import (
    ToyExperts,
    constant_experts,
    distinct_experts,
    identity_experts,
    replicated_experts,
)
from crossdock.types.layout import Layout, TokenAxis
from crossdock.types.parallel import ParallelSizes

HIDDEN_SIZE = 64
GPU_HIDDEN_SIZE = 2048
"""The smallest that libraries of device kernels are built for."""
EXPERTS: Mapping[str, Callable[[int], ToyExperts]] = {
    "identity": identity_experts,
    "distinct": distinct_experts,
    "constants": constant_experts,
    "replicated": replicated_experts,
}


@attrs.frozen(kw_only=True)
class DispatchScenario:
    """One case; plain data, so that it can be sent to rank processes."""

    sizes: ParallelSizes
    live_tokens: tuple[int, ...]
    """Rows of each replica; padded to equal blocks of a multiple of attn_tp_size with rows that go nowhere."""
    routing: str = "random"
    """``random``, ``first_rank`` (every choice on rank 0), ``one_expert`` (the last one, and -1), ``nowhere`` (all -1), ``holes`` (some
    choices -1), ``pair`` (first and last expert, weights 0.7 and 0.3), ``replicas`` (neighbouring slots 2e and 2e + 1)."""
    experts: str = "distinct"
    top_k: int = 3
    experts_a_rank: int = 3
    dtype: str = "float32"
    seed: int = 0
    counts_known: bool = True
    """Whether the step says how many rows every rank brings."""
    hidden_size: int = HIDDEN_SIZE
    device: str = "cpu"

    @property
    def num_physical_experts(self) -> int:
        return self.experts_a_rank * self.sizes.moe_ep_size

    @property
    def padded_tokens(self) -> tuple[int, ...]:
        most = align_rows(max(self.live_tokens), self.sizes.attn_tp_size)
        return (most,) * len(self.live_tokens)


@attrs.frozen(kw_only=True, eq=False)
class RoutedRows:
    """Rows of all replicas, one after the other, padding included; equal on all ranks."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def held(self, layout: Layout, scenario: DispatchScenario, rank: int) -> RoutedRows:
        """The part that a rank holds in ``layout``."""
        first, count = held_range(layout, scenario, rank)
        part = slice(first, first + count)
        return RoutedRows(
            hidden_states=self.hidden_states[part].contiguous(),
            topk_ids=self.topk_ids[part].contiguous(),
            topk_weights=self.topk_weights[part].contiguous(),
        )


def on_device(scenario: DispatchScenario, device: str) -> DispatchScenario:
    """The scenario where a rank's tensors lie: on GPUs in bfloat16, and wide enough for libraries."""
    if device == "cpu":
        return scenario
    return attrs.evolve(scenario, device=device, dtype="bfloat16", hidden_size=GPU_HIDDEN_SIZE)


def held_range(layout: Layout, scenario: DispatchScenario, rank: int) -> tuple[int, int]:
    """First row and number of rows that a rank holds, as positions in the rows of all replicas."""
    sizes, padded = scenario.sizes, scenario.padded_tokens
    place = rank_place(sizes, rank)
    count = rows_of_rank(layout, padded, rank, sizes)
    axes = drop_unit_axes(layout, sizes)
    first = sum(padded[: place.attn_dp_rank]) if TokenAxis.ATTN_DP in axes else 0
    return first + (place.attn_tp_rank * count if TokenAxis.ATTN_TP in axes else 0), count


def routed_rows(scenario: DispatchScenario) -> RoutedRows:
    """Seeded rows and routing, the latter the same for every width; padding has id -1 and NaN in it, so that whoever reads it is found out."""
    generator = torch.Generator().manual_seed(scenario.seed)
    total, top_k, experts = sum(scenario.padded_tokens), scenario.top_k, scenario.num_physical_experts
    hidden = torch.randn(total, scenario.hidden_size, generator=torch.Generator().manual_seed(scenario.seed + 1000))
    choices = experts if scenario.routing != "first_rank" else scenario.experts_a_rank
    ids = torch.rand(total, choices, generator=generator).argsort(dim=1)[:, :top_k]
    weights = torch.rand(total, top_k, generator=generator) + 0.1
    weights = weights / weights.sum(dim=1, keepdim=True)
    if scenario.routing == "nowhere":
        ids = torch.full_like(ids, -1)
    elif scenario.routing == "one_expert":
        ids = torch.tensor([experts - 1] + [-1] * (top_k - 1)).repeat(total, 1)
    elif scenario.routing == "pair":
        ids = torch.tensor([0, experts - 1]).repeat(total, 1)
        weights = torch.tensor([0.7, 0.3]).repeat(total, 1)
    elif scenario.routing == "replicas":
        ids = 2 * torch.randint(experts // 2, (total, 1), generator=generator) + torch.tensor([0, 1])
    elif scenario.routing == "holes":
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, ids, -1)
    start = 0
    for live, padded in zip(scenario.live_tokens, scenario.padded_tokens, strict=True):
        ids[start + live : start + padded] = -1
        hidden[start + live : start + padded] = float("nan")
        start += padded
    device = torch.device(scenario.device)
    return RoutedRows(
        hidden_states=hidden.to(device, getattr(torch, scenario.dtype)),
        topk_ids=ids.to(device),
        topk_weights=weights.to(device),
    )


def toy_experts(scenario: DispatchScenario) -> ToyExperts:
    """The scenario's experts."""
    return EXPERTS[scenario.experts](scenario.num_physical_experts).to(scenario.device)


def uneven(sizes: ParallelSizes) -> tuple[int, ...]:
    """Different row counts of the replicas."""
    return tuple(5 + 3 * replica for replica in range(sizes.attn_dp_size))


def one_replica(sizes: ParallelSizes, rows: int) -> tuple[int, ...]:
    """``rows`` on the last replica, nothing on the others."""
    return (0,) * (sizes.attn_dp_size - 1) + (rows,)
