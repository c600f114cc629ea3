"""The routed experts of a config; torch is not imported."""

from __future__ import annotations

import attrs
from crossdock.errors import CheckpointError
from crossdock.types.model import MoeSpec
from crossdock.types.parallel import ParallelSizes, RankPlace

from crossdock_models._shared.quantisation import Quantisation
from crossdock_models._shared.shards import expert_shard


@attrs.frozen(kw_only=True)
class MoeFields:
    """Which layers hold routed experts, and their sizes. No layers: the model is dense."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    num_groups: int = 1

    def spec(
        self, hidden_size: int, quantisation: Quantisation, sizes: ParallelSizes, place: RankPlace
    ) -> MoeSpec | None:
        """What the core builds dispatcher and experts for; None for a dense model.

        Raises:
            CheckpointError: the experts cannot be split as configured, or a token cannot choose as many as it should.
        """
        if not self.layers:
            return None
        if not 0 < self.top_k <= self.num_experts or self.num_experts % self.num_groups:
            raise CheckpointError(
                f"config.json: {self.top_k} of {self.num_experts} experts in {self.num_groups} groups cannot be chosen"
            )
        is_fp8 = quantisation.covers(f"model.layers.{self.layers[0]}.mlp.experts.0.gate_proj.weight")
        expert_shard(self.intermediate_size, sizes, place, fp8_block=is_fp8)
        return MoeSpec(
            layers=self.layers,
            num_logical_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=hidden_size,
            intermediate_size=self.intermediate_size,
            num_groups=self.num_groups,
            weight_dtype="fp8_block" if is_fp8 else "native",
        )
