"""What transformers' own class would choose after each token, and how close it was: in the head and in every router."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

HEAD_MARGIN = 1e-3
"""Best two logits; closer ones may swap when sums are taken in another order, fp32."""
ROUTING_MARGIN = 1e-5
"""Last chosen and first left-out expert of a router, as sigmoid scores; closer ones may swap likewise."""
SOFTMAX_STEEPEST = 0.25
"""Of a probability over its logit. Softmax routers are compared by logits, a choice among which hangs on nothing else: where one expert takes
nearly everything, the others' probabilities lie close together however far apart they are."""


@attrs.frozen(kw_only=True, eq=False)
class OracleChoices:
    """Of one sequence, for each of its positions."""

    best: torch.Tensor
    """[n] int64: greedy next token."""
    head_margin: torch.Tensor
    """[n] float32: best less second logit."""
    routing_margin: torch.Tensor
    """[n] float32: smallest margin of any router for this token."""

    def is_certain(self, place: int) -> bool:
        """The choice after ``place`` does not hang on the order of sums."""
        margins = float(self.head_margin[place]), float(self.routing_margin[place])
        return margins[0] > HEAD_MARGIN and margins[1] > ROUTING_MARGIN


class GreedyOracle:
    """transformers' class of a checkpoint folder, read with its own code; routers are watched from outside."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        make: Any = AutoModelForCausalLM
        self._model: torch.nn.Module = make.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self._config: Any = self._model.config
        self._margins: list[torch.Tensor] = []
        for name, module in self._model.named_modules():
            if name.endswith(".gate"):
                module.register_forward_pre_hook(self._watch)

    def choices(self, ids: Sequence[int]) -> OracleChoices:
        """One pass over a sequence."""
        self._margins.clear()
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(ids)])).logits[0].float()
        assert self._margins, "the model has no router that could be watched"
        top = logits.topk(2, dim=-1)
        return OracleChoices(
            best=top.indices[:, 0],
            head_margin=top.values[:, 0] - top.values[:, 1],
            routing_margin=torch.stack(self._margins).amin(0),
        )

    def _watch(self, gate: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
        self._margins.append(self._router_margin(gate, hidden @ gate.weight.float().T))

    def _router_margin(self, gate: Any, logits: torch.Tensor) -> torch.Tensor:
        """[n]: how far the last chosen expert, and the last chosen group, are ahead of the next."""
        top_k = self._config.num_experts_per_tok
        if self._config.model_type != "deepseek_v3":
            return SOFTMAX_STEEPEST * _margin(logits, top_k)
        scores = logits.sigmoid() + gate.e_score_correction_bias.float()
        groups = scores.view(len(scores), self._config.n_group, -1)
        strength = groups.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(strength).scatter(1, strength.topk(self._config.topk_group).indices, 1.0)
        allowed = scores.masked_fill(kept.repeat_interleave(groups.shape[-1], 1) == 0, float("-inf"))
        return torch.minimum(_margin(strength, self._config.topk_group), _margin(allowed, top_k))


def _margin(scores: torch.Tensor, chosen: int) -> torch.Tensor:
    if chosen >= scores.shape[-1]:
        return torch.full((len(scores),), float("inf"))
    ordered = scores.topk(chosen + 1, dim=-1).values
    return ordered[:, chosen - 1] - ordered[:, chosen]
