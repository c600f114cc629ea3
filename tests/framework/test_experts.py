"""The typed entry of the experts point, and the permutation that the core puts between layouts."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch
from crossdock.errors import DispatchMisuse, PluginDeclined, SelectionRefused
from crossdock.experts import PermutingExperts, adapt_experts, agreed_wire, layouts_needed, make_experts
from crossdock.types.dispatch import DispatcherCapabilities, Received, ReceiveLayout, ScaleForm, WireDtype
from crossdock.types.experts import ExpertsCapabilities, ExpertsSpec, ExpertTensors
from crossdock.types.layout import COMPLETE, LOCAL_ROWS

EXPERTS = 3
BY_TOKEN = frozenset({ReceiveLayout.TOKEN_ROWS})


class SortedOnly:
    """Takes rows sorted by expert, in segments of 4, and multiplies them by expert number + 1 and their weight."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.refreshed: list[tuple[int, Sequence[int]]] = []
        self.capabilities = ExpertsCapabilities(layouts=(ReceiveLayout.FLAT,), expert_alignment=4)

    def attach(self, tensors: ExpertTensors) -> None:
        self.attached = tensors

    def refresh(self, layer: int, slots: Sequence[int]) -> None:
        self.refreshed.append((layer, slots))

    def run(self, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
        assert received.layout is ReceiveLayout.FLAT
        assert isinstance(received.counts, list)
        assert received.row_weights is not None
        self.seen.append(received.counts)
        factors = torch.arange(1.0, EXPERTS + 1).repeat_interleave(torch.tensor(received.counts))
        return received.rows * factors[:, None] * received.row_weights[:, None]


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_rows_by_token_are_sorted_for_experts_that_want_them_so(rows: int) -> None:
    inner = SortedOnly()
    experts = adapt_experts(inner, BY_TOKEN, EXPERTS)
    assert isinstance(experts, PermutingExperts)
    generator = torch.Generator().manual_seed(0)
    hidden, weights = torch.randn(rows, 4, generator=generator), torch.rand(rows, 2, generator=generator)
    ids = torch.randint(-1, EXPERTS, (rows, 2), generator=generator)
    out = experts.run(
        0, Received(layout=ReceiveLayout.TOKEN_ROWS, rows=hidden, local_topk_ids=ids, row_weights=weights)
    )
    torch.testing.assert_close(out, hidden * (weights * (ids + 1)).sum(dim=1, keepdim=True))
    assert all(count % 4 == 0 for count in inner.seen[0])


def test_sorted_rows_pass_through_and_other_calls_too() -> None:
    inner = SortedOnly()
    experts = adapt_experts(inner, BY_TOKEN, EXPERTS)
    flat = Received(layout=ReceiveLayout.FLAT, rows=torch.ones(4, 4), counts=[0, 4, 0], row_weights=torch.ones(4))
    assert float(experts.run(0, flat)[0, 0]) == 2.0
    experts.refresh(5, (1,))
    assert inner.refreshed == [(5, (1,))]
    assert ReceiveLayout.TOKEN_ROWS in experts.capabilities.layouts


def test_experts_that_take_the_layout_are_left_alone() -> None:
    inner = SortedOnly()
    assert adapt_experts(inner, frozenset({ReceiveLayout.FLAT}), EXPERTS) is inner


def test_a_layout_that_cannot_be_reached_is_refused_with_its_code() -> None:
    with pytest.raises(SelectionRefused, match="hands over expert_major and the experts plugin takes flat") as found:
        adapt_experts(SortedOnly(), frozenset({ReceiveLayout.EXPERT_MAJOR}), EXPERTS)
    assert found.value.codes == ("layout_not_accepted",)


def test_a_dispatcher_may_hand_over_what_can_be_sorted() -> None:
    assert layouts_needed((ReceiveLayout.FLAT,)) == (
        ReceiveLayout.FLAT,
        ReceiveLayout.REPLICATED,
        ReceiveLayout.TOKEN_ROWS,
    )
    assert layouts_needed((ReceiveLayout.EXPERT_MAJOR,)) == (ReceiveLayout.EXPERT_MAJOR,)


def test_experts_that_do_not_serve_an_activation_decline() -> None:
    spec = ExpertsSpec(
        hidden_size=8,
        intermediate_size=8,
        num_local_experts=2,
        top_k=1,
        activation="gelu",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with pytest.raises(PluginDeclined, match="torch"):
        make_experts("torch", {}, spec)


def test_rows_in_places_become_rows_by_token_for_experts_that_take_these() -> None:
    seen: list[Received] = []

    class ByToken:
        capabilities = ExpertsCapabilities(layouts=(ReceiveLayout.TOKEN_ROWS,))

        def run(self, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
            seen.append(received)
            return received.rows * 2

    adapted = adapt_experts(ByToken(), frozenset({ReceiveLayout.EXPERT_MAJOR}), 3)  # type: ignore[arg-type]
    rows = torch.arange(3 * 4 * 2, dtype=torch.float32).view(3, 4, 2)
    counts = torch.tensor([2, 0, 4], dtype=torch.int32)
    out = adapted.run(0, Received(layout=ReceiveLayout.EXPERT_MAJOR, rows=rows, counts=counts))
    assert torch.equal(out, rows * 2)
    assert seen[0].local_topk_ids is not None
    assert seen[0].local_topk_ids.flatten().tolist() == [0, 0, -1, -1, -1, -1, -1, -1, 2, 2, 2, 2]
    # scales that came column by column
    scales = torch.arange(3 * 4 * 5, dtype=torch.float32).view(3, 5, 4).transpose(1, 2)
    sent = Received(
        layout=ReceiveLayout.EXPERT_MAJOR, rows=rows, counts=counts, scales=scales, scale_form=ScaleForm.FP32_COL_TMA
    )
    adapted.run(0, sent)
    assert seen[1].scale_form is ScaleForm.FP32_ROW
    assert seen[1].scales is not None
    assert seen[1].scales.is_contiguous()
    assert torch.equal(seen[1].scales, scales.reshape(12, 5))
    with pytest.raises(DispatchMisuse, match="packed scales"):
        adapted.run(0, attrs.evolve(sent, scale_form=ScaleForm.UE8M0_PACKED))


@pytest.mark.parametrize(
    ("sent", "taken", "weights", "agreed"),
    [
        (
            {WireDtype.NATIVE, WireDtype.FP8_BLOCK},
            {WireDtype.NATIVE, WireDtype.FP8_BLOCK},
            "fp8_block",
            WireDtype.FP8_BLOCK,
        ),
        ({WireDtype.NATIVE, WireDtype.FP8_BLOCK}, {WireDtype.NATIVE, WireDtype.FP8_BLOCK}, "native", WireDtype.NATIVE),
        ({WireDtype.NATIVE, WireDtype.FP8_BLOCK}, {WireDtype.NATIVE}, "fp8_block", WireDtype.NATIVE),
        ({WireDtype.FP8_BLOCK}, {WireDtype.NATIVE, WireDtype.FP8_BLOCK}, "native", WireDtype.FP8_BLOCK),
    ],
)
def test_rows_travel_in_fp8_where_both_sides_take_it_and_the_weights_are_fp8(
    sent: set[WireDtype], taken: set[WireDtype], weights: str, agreed: WireDtype
) -> None:
    dispatcher = DispatcherCapabilities(
        layouts=frozenset({ReceiveLayout.TOKEN_ROWS}),
        input_rows=LOCAL_ROWS,
        output_rows=LOCAL_ROWS,
        output_owed=COMPLETE,
        needs_full_ep=True,
        rank_invariant_picks_needed=False,
        wire_dtypes=frozenset(sent),
    )
    experts = ExpertsCapabilities(layouts=(ReceiveLayout.TOKEN_ROWS,), wire_dtypes=frozenset(taken))
    assert agreed_wire(dispatcher, experts, weights) is agreed
