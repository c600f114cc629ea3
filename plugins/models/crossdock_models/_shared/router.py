"""The router of a MoE layer: float32 logits and the model's rule."""

from __future__ import annotations

import torch
from crossdock.ops.float_linear import FloatLinear
from crossdock.ops.topk_routing import TopkRule, topk_routing


class TopkRouter:
    """Logits in float32 whatever the model's dtype, so that near ties do not fall another way in bf16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rule: TopkRule) -> None:
        """``weight`` [E, H] in the dtype of the rows; ``bias`` [E] float32, for the choice only."""
        self._linear = FloatLinear(weight.float(), weight.dtype)
        self._bias = bias
        self._rule = rule

    @property
    def bias(self) -> torch.Tensor | None:
        return self._bias

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, E] float32."""
        return self._linear(hidden_states)

    def select(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, E] -> logical ids [n, K] int64 and weights [n, K] float32 with the routed scaling in them."""
        return topk_routing(logits, bias, self._rule)

    def select_slots(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        slots: torch.Tensor,
        padded_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with the only slot of each expert, and -1 in padded rows."""
        return topk_routing(logits, bias, self._rule, slots, padded_rows)
