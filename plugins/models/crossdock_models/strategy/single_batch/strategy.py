"""One micro-batch; the shared experts run while routed rows travel, on a GPU in a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossdock.types.model import OpKind
from crossdock.types.strategy import StagePlan, StrategyCapabilities

from crossdock_models._shared.stages import with_shared_after

if TYPE_CHECKING:
    from crossdock.types.model import Op
    from crossdock.types.step import ForwardMode

    from crossdock_models.strategy.single_batch.options import SingleBatchOptions

_ANCHORS = {"dispatch": OpKind.DISPATCH_BEGIN, "combine": OpKind.COMBINE_BEGIN}


class SingleBatch:
    """Puts the shared experts behind the begin of the transfer that they are to hide."""

    def __init__(self, options: SingleBatchOptions) -> None:
        self._anchor = _ANCHORS[options.hides]

    @property
    def capabilities(self) -> StrategyCapabilities:
        return StrategyCapabilities()

    def plan(self, ops: Sequence[Op], mode: ForwardMode) -> StagePlan:
        return StagePlan(stages=(tuple(with_shared_after(ops, self._anchor)),), beside=frozenset({OpKind.SHARED}))
