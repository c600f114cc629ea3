"""Two micro-batches in turn, also in steps in which some replicas prefill while others decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossdock_models._shared.stages import two_batch_stages

if TYPE_CHECKING:
    from crossdock.types.model import Op
    from crossdock.types.step import ForwardMode
    from crossdock.types.strategy import StagePlan, StrategyCapabilities

    from crossdock_models.strategy.two_batch_mixed.options import TwoBatchMixedOptions


class TwoBatchMixed:
    """Each replica is cut by the rule of its own mode; all follow one stage plan, so the order of collectives does not change."""

    def __init__(self, options: TwoBatchMixedOptions) -> None:
        self._options = options
        self._capabilities = options.capabilities(mixes_modes=True)

    @property
    def capabilities(self) -> StrategyCapabilities:
        return self._capabilities

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        return two_batch_stages(ops, mode, lends_sms=self._options.lends_sms)
