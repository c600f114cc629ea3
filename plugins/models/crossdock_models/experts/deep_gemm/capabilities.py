"""What the ``deep_gemm`` experts plugin takes; neither torch nor the library, so that it can be asked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crossdock.types.capability import Refusal
from crossdock.types.dispatch import ReceiveLayout, WireDtype
from crossdock.types.experts import ExpertsCapabilities

if TYPE_CHECKING:
    from crossdock.types.capability import Environment

ALIGNMENT = 128
"""Rows of a segment of one expert are a multiple of this; also the elements that share a scale."""
WHEEL = "pip install 'crossdock[deepgemm]' (sgl-deep-gemm==0.1.5, for torch 2.11 and CUDA 13)"


def deep_gemm_capabilities(*, fp8_weights: bool) -> ExpertsCapabilities:
    """Rows in places and rows by token; fp8 rows only beside fp8 weights."""
    wire_dtypes = {WireDtype.NATIVE, WireDtype.FP8_BLOCK} if fp8_weights else {WireDtype.NATIVE}
    return ExpertsCapabilities(
        layouts=(ReceiveLayout.EXPERT_MAJOR, ReceiveLayout.TOKEN_ROWS, ReceiveLayout.REPLICATED),
        devices=frozenset({"cuda"}),
        weight_dtypes=frozenset({"bfloat16", "fp8_block"}),
        wire_dtypes=frozenset(wire_dtypes),
        expert_alignment=ALIGNMENT,
        graph_capture=True,
    )


def deep_gemm_answer(env: Environment) -> ExpertsCapabilities | Refusal:
    """The capabilities, or why it cannot run where ``env`` says."""
    moe = env.model.moe if env.model is not None else None
    if env.device == "cuda" and "deep_gemm" not in env.packages:
        return Refusal(
            code="package_missing",
            sentence=f"experts deep_gemm needs the module deep_gemm: {WHEEL}; or choose experts 'triton'",
        )
    if env.device == "cuda" and "triton" not in env.packages:
        return Refusal(code="package_missing", sentence="experts deep_gemm needs triton; choose experts 'torch'")
    if moe is not None:
        inner_size = moe.intermediate_size // env.sizes.moe_tp_size
        if moe.hidden_size % ALIGNMENT or inner_size % ALIGNMENT:
            sentence = (
                f"experts deep_gemm needs sizes that are multiples of {ALIGNMENT}, found hidden {moe.hidden_size} and intermediate "
                f"{inner_size} a rank; choose experts 'triton'"
            )
            return Refusal(code="shape_not_supported", sentence=sentence)
    return deep_gemm_capabilities(fp8_weights=moe is not None and moe.weight_dtype == "fp8_block")
