"""The ``triton`` experts as a plugin: which rows they take from the wire, and what they do with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crossdock.errors import DispatchMisuse
from crossdock.types.dispatch import Received, ReceiveLayout, ScaleForm, WireDtype
from crossdock.types.experts import ExpertsSpec, ExpertTensors
from crossdock_models.experts.triton.capabilities import triton_capabilities
from crossdock_models.experts.triton.experts import TritonExperts


def spec_of(weight_dtype: str, inner_size: int, device: str) -> ExpertsSpec:
    return ExpertsSpec(
        hidden_size=256,
        intermediate_size=inner_size,
        num_local_experts=2,
        top_k=1,
        activation="silu",
        dtype=torch.bfloat16,
        device=torch.device(device),
        weight_dtype=weight_dtype,
    )


@pytest.mark.parametrize(
    ("weight_dtype", "inner_size", "takes_fp8"),
    [("fp8_block", 384, True), ("fp8_block", 192, False), ("native", 384, False)],
)
def test_rows_in_float8_are_taken_beside_weights_of_whole_blocks_only(
    weight_dtype: str, inner_size: int, takes_fp8: bool
) -> None:
    capabilities = TritonExperts(spec_of(weight_dtype, inner_size, "cpu")).capabilities
    assert (WireDtype.FP8_BLOCK in capabilities.wire_dtypes) == takes_fp8
    assert WireDtype.NATIVE in capabilities.wire_dtypes
    assert capabilities == triton_capabilities(weight_dtype, 256, inner_size)


def received(rows: torch.Tensor, **given: Any) -> Received:
    """Rows that all go to expert 1."""
    ids = torch.ones(rows.shape[0], 1, dtype=torch.int64, device=rows.device)
    weights = torch.rand(rows.shape[0], 1, device=rows.device)
    return Received(layout=ReceiveLayout.TOKEN_ROWS, rows=rows, local_topk_ids=ids, row_weights=weights, **given)


def test_scales_by_column_are_refused() -> None:
    experts = TritonExperts(spec_of("fp8_block", 128, "cpu"))
    weight = torch.zeros(2, 256, 256)
    experts.attach(ExpertTensors(layer=0, tensors={"gate_up": weight, "down": weight[:, :, :128]}))
    given = {"scales": torch.ones(3, 2), "scale_form": ScaleForm.FP32_COL_TMA}
    with pytest.raises(DispatchMisuse, match="row by row"):
        experts.run(0, received(torch.zeros(3, 256), **given))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_quantised_rows_from_the_wire_give_what_the_plugin_makes_of_plain_ones(rows: int) -> None:
    from crossdock.ops.fp8_block import quantise_blocks
    from crossdock.ops.quantise_rows import quantise_rows

    named: dict[str, torch.Tensor] = {}
    for name, shape in {"gate_up": (256, 256), "down": (256, 128)}.items():
        weight, scale = quantise_blocks(torch.randn(shape, device="cuda") / 16)
        named[name] = torch.stack([weight.view(torch.uint8)] * 2).view(torch.float8_e4m3fn)
        named[f"{name}_scale"] = torch.stack([scale] * 2)
    experts = TritonExperts(spec_of("fp8_block", 128, "cuda"))
    experts.attach(ExpertTensors(layer=0, tensors=named))
    plain = received(torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16))
    payload, scales = quantise_rows(plain.rows)
    sent = Received(
        layout=ReceiveLayout.TOKEN_ROWS,
        rows=payload,
        scales=scales,
        scale_form=ScaleForm.FP32_ROW,
        local_topk_ids=plain.local_topk_ids,
        row_weights=plain.row_weights,
    )
    got = experts.run(0, sent)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, experts.run(0, plain))
