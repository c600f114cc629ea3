"""``topk_routing`` by the C kernel of ``cpu/topk_routing.c``: one call where torch takes four to twelve operators."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from crossdock.native_code import native_code

if TYPE_CHECKING:
    from crossdock.ops.topk_routing import TopkRule


class _Arguments(ctypes.Structure):
    """``struct topk_routing`` of ``cpu/topk_routing.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "bias", "slots", "ids", "weights")),
        *((name, ctypes.c_int64) for name in ("rows", "experts", "row_stride", "slots_stride", "top_k")),
        *((name, ctypes.c_int64) for name in ("groups", "kept_groups")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("is_softmax", "renormalise", "group_is_sum_of_two")),
    )


def takes(router_logits: torch.Tensor, correction_bias: torch.Tensor | None) -> bool:
    """True when the kernel can choose from these scores: float32 on the CPU, each row in one piece."""
    return (
        router_logits.dtype is torch.float32
        and not router_logits.is_cuda
        and router_logits.stride(-1) == 1
        and (correction_bias is None or (correction_bias.dtype is torch.float32 and correction_bias.is_contiguous()))
        and native_code().library is not None
    )


def topk_routing_cpu(
    router_logits: torch.Tensor, correction_bias: torch.Tensor | None, rule: TopkRule, slots: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, E] -> ids [n, K] int64, of slots where those are given, and weights [n, K] float32, best first; only where ``takes``.

    The caller has checked the sizes. Of equal experts the first is chosen.

    Raises:
        MemoryError: no scratch memory.
    """
    library = native_code().library
    assert library is not None, "takes() was asked first"
    rows, experts = router_logits.shape
    ids = torch.empty((rows, rule.top_k), dtype=torch.int64)
    weights = torch.empty((rows, rule.top_k), dtype=torch.float32)
    arguments = _Arguments(
        logits=router_logits.data_ptr(),
        bias=None if correction_bias is None else correction_bias.data_ptr(),
        slots=None if slots is None else slots.data_ptr(),
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        rows=rows,
        experts=experts,
        row_stride=router_logits.stride(0),
        slots_stride=0 if slots is None else slots.stride(0),
        top_k=rule.top_k,
        groups=rule.num_groups,
        kept_groups=rule.kept_groups,
        scaling=rule.routed_scaling,
        is_softmax=rule.scoring == "softmax",
        renormalise=rule.renormalise,
        group_is_sum_of_two=rule.group_score == "sum_of_two_best",
    )
    if library.crossdock_topk_routing(ctypes.byref(arguments)):
        raise MemoryError(f"topk_routing: no memory for the scores of {experts} experts")
    return ids, weights
