"""Two micro-batches in turn: one computes while the other's rows travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossdock_models._shared.stages import two_batch_stages

if TYPE_CHECKING:
    from crossdock.types.model import Op
    from crossdock.types.step import ForwardMode
    from crossdock.types.strategy import StagePlan, StrategyCapabilities

    from crossdock_models.strategy.two_batch.options import TwoBatchOptions


class TwoBatch:
    """Steps in which all replicas have the same mode are cut in two."""

    def __init__(self, options: TwoBatchOptions) -> None:
        self._options = options
        self._capabilities = options.capabilities(mixes_modes=False)

    @property
    def capabilities(self) -> StrategyCapabilities:
        return self._capabilities

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        return two_batch_stages(ops, mode, lends_sms=self._options.lends_sms)
