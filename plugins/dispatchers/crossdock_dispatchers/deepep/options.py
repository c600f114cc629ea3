"""Options of the ``deepep`` dispatcher."""

from __future__ import annotations

from typing import Literal

import attrs
from crossdock.options import option


def _is_even(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 2 or value % 2:
        raise ValueError(f"{attribute.name} must be even and at least 2, got {value}")


@attrs.frozen(kw_only=True)
class DeepEpOptions:
    """Which protocols run, and how."""

    mode: Literal["auto", "normal", "low_latency"] = option(
        "auto: normal in steps in which any replica prefills, else low_latency; or one of them always", default="auto"
    )
    wire: Literal["auto", "bf16", "fp8"] = option(
        "form of the rows on the way out; auto: fp8 where the experts plugin takes it and the weights are fp8",
        default="auto",
    )
    num_sms: int = option(
        "multiprocessors of the normal protocol's kernels when nothing runs beside them, even",
        default=20,
        validator=_is_even,
    )
    overlap_sms: int = option(
        "the same while other work runs beside them (two micro-batches in flight)", default=12, validator=_is_even
    )
    low_latency_rows: int = option(
        "most rows that a rank sends in a low-latency step, at most 1024; 0: as many as the scheduler's limits need",
        default=0,
        validator=attrs.validators.ge(0),
    )
