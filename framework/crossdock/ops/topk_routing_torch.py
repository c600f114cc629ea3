"""Expert choice in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from crossdock.ops.topk_routing import TopkRule

RENORM_EPS = 1e-20
"""Keeps the division finite when all chosen sigmoid scores underflow, as DeepSeek-V3 does."""


def topk_routing_torch(
    router_logits: torch.Tensor, correction_bias: torch.Tensor | None, rule: TopkRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, E] -> ids [n, K] int64 and weights [n, K] float32."""
    # Scores, and what the choice looks at
    logits = router_logits.float()
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    # Groups that may not be chosen from
    if rule.kept_groups < rule.num_groups:
        choice = _mask_groups(choice, rule)
    # Best experts; weights come from the scores without bias
    if choice is scores:
        weights, ids = torch.topk(scores, rule.top_k, dim=-1)
    else:
        ids = torch.topk(choice, rule.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
    if rule.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + RENORM_EPS)
    if rule.routed_scaling != 1.0:
        weights = weights * rule.routed_scaling
    return ids, weights


def _mask_groups(choice: torch.Tensor, rule: TopkRule) -> torch.Tensor:
    """Minus infinity, not zero, for excluded groups: with a negative bias every allowed score may lie below zero."""
    grouped = choice.unflatten(-1, (rule.num_groups, -1))
    if rule.group_score == "max":
        group_scores = grouped.amax(-1)
    else:
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.topk(group_scores, rule.kept_groups, dim=-1).indices
    excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, kept, False)
    masked: torch.Tensor = grouped.masked_fill(excluded.unsqueeze(-1), float("-inf"))
    return masked.flatten(-2)
