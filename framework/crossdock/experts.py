"""Typed entry to the ``experts`` point, and the permutation between what a dispatcher hands over and what experts take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from crossdock.errors import SelectionRefused, WrongPluginResult
from crossdock.plugin_call import build
from crossdock.registry import load_plugin
from crossdock.types.dispatch import ReceiveLayout, WireDtype
from crossdock.types.experts import Experts

if TYPE_CHECKING:
    import torch

    from crossdock.types.dispatch import DispatcherCapabilities, Received
    from crossdock.types.experts import ExpertsCapabilities, ExpertsSpec, ExpertTensors

_SORTABLE = frozenset({ReceiveLayout.TOKEN_ROWS, ReceiveLayout.REPLICATED})


def make_experts(name: str, options: Mapping[str, object], spec: ExpertsSpec) -> Experts:
    """The experts plugin ``name`` for ``spec``; it has no weights until ``attach``.

    Raises:
        PluginError: it cannot be loaded, declines, or returns an object without the protocol's methods.
        ConfigValueError: an option is wrong.
    """
    experts: Experts = build(load_plugin("experts", name), Experts, options=options, spec=spec)
    return experts


def layouts_needed(accepted: Sequence[ReceiveLayout]) -> tuple[ReceiveLayout, ...]:
    """Layouts a dispatcher may hand over when the experts plugin takes ``accepted``: these, then those that the core can permute."""
    reachable = list(accepted)
    if ReceiveLayout.FLAT in accepted:
        reachable += sorted(_SORTABLE - set(accepted), key=lambda layout: layout.value)
    if ReceiveLayout.TOKEN_ROWS in accepted and ReceiveLayout.EXPERT_MAJOR not in accepted:
        reachable.append(ReceiveLayout.EXPERT_MAJOR)
    return tuple(reachable)


def agreed_wire(dispatcher: DispatcherCapabilities, experts: ExpertsCapabilities, weight_dtype: str) -> WireDtype:
    """Form of the rows between ranks: fp8 where both sides take it and the weights are fp8 too, else the model's dtype if both take that."""
    common = dispatcher.wire_dtypes & experts.wire_dtypes
    if WireDtype.FP8_BLOCK in common and (weight_dtype == "fp8_block" or WireDtype.NATIVE not in common):
        return WireDtype.FP8_BLOCK
    return WireDtype.NATIVE


def adapt_experts(experts: Experts, handed_over: frozenset[ReceiveLayout], num_local_experts: int) -> Experts:
    """``experts``, behind a permutation where it does not take every layout that the dispatcher hands over.

    Raises:
        SelectionRefused: code ``layout_not_accepted``, a layout can be neither taken nor permuted.
    """
    accepted = experts.capabilities.layouts
    rest = handed_over - set(accepted)
    if not rest:
        return experts
    if rest <= set(layouts_needed(accepted)):
        return PermutingExperts(experts, num_local_experts)
    names = ", ".join(sorted(layout.value for layout in rest))
    raise SelectionRefused(
        ["layout_not_accepted"],
        [
            f"the dispatcher hands over {names} and the experts plugin takes "
            f"{', '.join(layout.value for layout in accepted)}; take experts 'torch', or a dispatcher that hands over one of these"
        ],
    )


class PermutingExperts:
    """Experts behind a dispatcher whose layout they do not take.

    ``token_rows`` and ``replicated`` are sorted for experts that take ``flat``; ``expert_major`` becomes one row a place with one choice for
    experts that take ``token_rows``, without a copy and without waiting for the device.
    """

    def __init__(self, inner: Experts, num_local_experts: int) -> None:
        self._inner = inner
        self._num_local_experts = num_local_experts

    @property
    def capabilities(self) -> ExpertsCapabilities:
        inner = self._inner.capabilities
        return attrs.evolve(inner, layouts=layouts_needed(inner.layouts))

    def attach(self, tensors: ExpertTensors) -> None:
        self._inner.attach(tensors)

    def refresh(self, layer: int, slots: Sequence[int]) -> None:
        self._inner.refresh(layer, slots)

    def run(self, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
        if received.layout in self._inner.capabilities.layouts:
            return self._inner.run(layer, received, sm_budget)
        if received.layout is ReceiveLayout.EXPERT_MAJOR:
            from crossdock.ops.permute import rows_of_places

            out = self._inner.run(layer, rows_of_places(received), sm_budget)
            return out.view(*received.rows.shape[:2], -1)
        from crossdock.ops.permute import sort_by_expert, weighted_sum

        ids, weights = received.local_topk_ids, received.row_weights
        if ids is None or weights is None:
            raise WrongPluginResult(
                f"the dispatcher handed over {received.layout.value} rows without ids and weights; both are needed to sort them"
            )
        ordered = sort_by_expert(
            received.rows, ids, weights, self._num_local_experts, self._inner.capabilities.expert_alignment
        )
        flat = attrs.evolve(
            received,
            layout=ReceiveLayout.FLAT,
            rows=ordered.rows,
            counts=ordered.counts,
            local_topk_ids=None,
            row_weights=ordered.weights,
        )
        return weighted_sum(self._inner.run(layer, flat, sm_budget), ordered.positions)
