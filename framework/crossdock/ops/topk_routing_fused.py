# Launch options (num_warps, ...) are no parameters of the kernel.
# pyright: reportCallIssue=false
"""``topk_routing`` in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from crossdock.ops.early_launch import early_launch
from crossdock.ops.tile_size import block_of

if TYPE_CHECKING:
    from crossdock.ops.topk_routing import TopkRule


def can_fuse(router_logits: torch.Tensor, rule: TopkRule) -> bool:
    """Rows on a GPU; where groups are left out, experts and groups in powers of two."""
    num_experts = router_logits.shape[1]
    sizes_fit = block_of(num_experts) == num_experts and block_of(rule.num_groups) == rule.num_groups
    return router_logits.is_cuda and (rule.kept_groups == rule.num_groups or sizes_fit)


def topk_routing_fused(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    rule: TopkRule,
    slots: torch.Tensor | None = None,
    padded_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, E] float32 -> ids [n, K] int64 and weights [n, K] float32, best first; the caller has checked the sizes.

    slots [E] int64: written instead of the experts' ids; padded_rows [n] bool: rows that get ids of -1.
    """
    num_rows, num_experts = router_logits.shape
    device = router_logits.device
    topk_ids = torch.empty(num_rows, rule.top_k, dtype=torch.int64, device=device)
    topk_weights = torch.empty(num_rows, rule.top_k, dtype=torch.float32, device=device)
    if num_rows == 0:
        return topk_ids, topk_weights
    # Imported at the first call: CPU installations have no triton.
    from crossdock.ops.topk_routing_triton import topk_routing_kernel

    topk_routing_kernel[(num_rows,)](
        router_logits,
        router_logits if correction_bias is None else correction_bias,
        topk_ids if slots is None else slots,
        topk_ids if padded_rows is None else padded_rows,
        topk_ids,
        topk_weights,
        num_experts,
        rule.routed_scaling,
        router_logits.stride(0),
        top_k=rule.top_k,
        top_k_block=block_of(rule.top_k),
        block=block_of(num_experts),
        num_groups=rule.num_groups,
        kept_groups=rule.kept_groups,
        two_best=rule.group_score != "max" and num_experts > rule.num_groups,
        is_softmax=rule.scoring == "softmax",
        has_bias=correction_bias is not None,
        has_slots=slots is not None,
        has_padding=padded_rows is not None,
        renormalise=rule.renormalise,
        num_warps=1 if num_experts <= 256 else 4,
        **early_launch(router_logits),
    )
    return topk_ids, topk_weights
