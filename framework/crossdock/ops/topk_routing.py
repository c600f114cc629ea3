"""Choice of experts from router logits: every rule of the supported families in one place."""

from __future__ import annotations

import attrs
import torch

from crossdock.ops.topk_routing_cpu import takes, topk_routing_cpu
from crossdock.ops.topk_routing_fused import can_fuse, topk_routing_fused
from crossdock.ops.topk_routing_torch import topk_routing_torch

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "sum_of_two_best")


@attrs.frozen(kw_only=True)
class TopkRule:
    """How scores become choices. The four switches ``renormalise``, ``routed_scaling``, groups and bias are independent.

    Sources: Mixtral and Qwen3-MoE (softmax, renormalise), DeepSeek-V2 (groups by their maximum), DeepSeek-V3 (sigmoid, correction bias for
    the choice only, groups by the sum of their two best biased scores).
    """

    top_k: int
    scoring: str = attrs.field(default="softmax", validator=attrs.validators.in_(SCORINGS))
    renormalise: bool = False
    routed_scaling: float = 1.0
    """Applied here and nowhere else."""
    num_groups: int = 1
    kept_groups: int = 1
    group_score: str = attrs.field(default="max", validator=attrs.validators.in_(GROUP_SCORES))


def topk_routing(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    rule: TopkRule,
    slots: torch.Tensor | None = None,
    padded_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token and their weights.

    Args:
        router_logits: [n, E] float32.
        correction_bias: [E] float32 added to the scores for the choice only, or None.
        rule: the model's rule.
        slots: [E] int64, the only slot of each expert, for ids of slots in place of experts; or None.
        padded_rows: [n] bool or [n, 1], rows that carry no token and get ids of -1; or None.

    Returns:
        ``topk_ids`` [n, K] int64, logical experts (or slots), and ``topk_weights`` [n, K] float32 with the routed scaling in them.

    Raises:
        ValueError: the experts cannot be split into the groups, or fewer than K experts are left to choose from.
    """
    num_experts = router_logits.shape[-1]
    if num_experts % rule.num_groups or not 0 < rule.kept_groups <= rule.num_groups:
        raise ValueError(
            f"topk_routing: {num_experts} experts, {rule.num_groups} groups of which {rule.kept_groups} are kept"
        )
    if rule.top_k > num_experts // rule.num_groups * rule.kept_groups:
        raise ValueError(f"topk_routing: top_k {rule.top_k} is more than the experts of {rule.kept_groups} kept groups")
    if can_fuse(router_logits, rule):
        return topk_routing_fused(router_logits, correction_bias, rule, slots, padded_rows)
    if takes(router_logits, correction_bias):
        ids, weights = topk_routing_cpu(router_logits, correction_bias, rule, slots)
    else:
        ids, weights = topk_routing_torch(router_logits, correction_bias, rule)
        ids = ids if slots is None else slots[ids]
    if padded_rows is not None:
        ids = ids.masked_fill(padded_rows.view(-1, 1), -1)
    return ids, weights
