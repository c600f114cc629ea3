"""SwiGLU experts on rows by token, replicated rows and rows sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog
import torch
from crossdock.errors import ConfigValueError
from crossdock.ops.grouped_mlp import GroupedMlp, GroupedMlpForm, best_form, row_invariant_form
from crossdock.ops.grouped_mlp_cpu import unsupported_reason
from crossdock.types.dispatch import ReceiveLayout

from crossdock_models.experts.torch.capabilities import torch_experts_capabilities

if TYPE_CHECKING:
    from crossdock.types.dispatch import Received
    from crossdock.types.experts import ExpertsCapabilities, ExpertsSpec, ExpertTensors

    from crossdock_models.experts.torch.options import TorchExpertsOptions

_LOG = structlog.get_logger(__name__)


class TorchExperts:
    """Experts that compute from the checkpoint form itself: there is no derived form, so memory is the weights and nothing else."""

    def __init__(self, options: TorchExpertsOptions, spec: ExpertsSpec) -> None:
        self._options = options
        self._spec = spec
        self._layers: dict[int, GroupedMlp] = {}
        self._form: GroupedMlpForm | None = None

    @property
    def capabilities(self) -> ExpertsCapabilities:
        return torch_experts_capabilities(self._options.form)

    @property
    def form(self) -> GroupedMlpForm | None:
        """The form that runs, None before the first ``attach``."""
        return self._form

    def attach(self, tensors: ExpertTensors) -> None:
        form = self._chosen_form(tensors)
        if self._form is None:
            self._form = form
        self._layers[tensors.layer] = GroupedMlp(tensors.tensors, form)

    def refresh(self, layer: int, slots: Sequence[int]) -> None:
        """Nothing is derived from the tensors, so there is nothing to rebuild."""

    def run(self, layer: int, received: Received, sm_budget: int | None = None) -> torch.Tensor:
        ids, weights = _ids_and_weights(received)
        return self._layers[layer].run(received.rows, ids, weights)

    def _chosen_form(self, tensors: ExpertTensors) -> GroupedMlpForm:
        chosen = self._options.form
        if chosen == "auto":
            if self._spec.row_invariant:
                form, why_not_faster = row_invariant_form(tensors.tensors)
            else:
                form, why_not_faster = best_form(tensors.tensors, self._spec.dtype)
            if why_not_faster and self._form is None and tensors.tensors["gate_up"].device.type == "cpu":
                _LOG.info("experts run in torch operators", form=form, reason=why_not_faster)
            return form
        reason = unsupported_reason(tensors.tensors) if chosen == "native" else ""
        if reason:
            raise ConfigValueError([f"[experts] form: 'native' cannot run here: {reason}; take 'auto'"])
        return chosen


def _ids_and_weights(received: Received) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, K] local ids and float32 weights; rows sorted by expert become rows with one expert each."""
    if received.layout is ReceiveLayout.FLAT:
        counts = torch.as_tensor(received.counts, dtype=torch.int64, device=received.rows.device)
        ids = torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts)[:, None]
        weights = None if received.row_weights is None else received.row_weights[:, None]
    else:
        assert received.local_topk_ids is not None, "rows by token come with local ids"
        ids, weights = received.local_topk_ids, received.row_weights
    return ids, torch.ones(ids.shape, device=ids.device) if weights is None else weights
