"""Options of the strategies with two micro-batches."""

from __future__ import annotations

from typing import Literal

import attrs
from crossdock.options import option
from crossdock.types.strategy import OverlapLimits, StrategyCapabilities


@attrs.frozen(kw_only=True)
class OverlapOptions:
    """When a step is cut in two, and where."""

    gate: Literal["auto", "always"] = option(
        "auto: a step overlaps when it is large enough, rows travel, and measured times say that it gains; "
        "always: whenever every replica's rows can be cut",
        default="auto",
    )
    min_prefill_rows: int = option(
        "rows of the largest replica below which a step with prompt rows is not cut",
        default=512,
        validator=attrs.validators.ge(0),
    )
    min_decode_rows: int = option(
        "the same for steps of decode rows alone", default=32, validator=attrs.validators.ge(0)
    )
    balance_threshold: float = option(
        "smallest share of rows of a half before a sequence is cut instead; 0 never cuts one",
        default=0.48,
        validator=attrs.validators.and_(attrs.validators.ge(0.0), attrs.validators.le(0.5)),
    )
    lends_sms: bool = option(
        "experts leave the multiprocessors alone that the dispatcher says its transfers use (prefill; kernels that take a budget); "
        "false pays where transfers are short and the experts' kernels hold none that they do not use",
        default=True,
    )

    def capabilities(self, *, mixes_modes: bool) -> StrategyCapabilities:
        """Of a strategy with these options."""
        limits = OverlapLimits(
            min_prefill_rows=self.min_prefill_rows,
            min_decode_rows=self.min_decode_rows,
            balance_threshold=self.balance_threshold,
            mixes_modes=mixes_modes,
            is_gated=self.gate == "auto",
        )
        return StrategyCapabilities(micro_batches=2, overlap=limits)
