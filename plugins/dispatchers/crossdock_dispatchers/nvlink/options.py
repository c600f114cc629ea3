"""Options of the ``nvlink`` dispatcher."""

from __future__ import annotations

import attrs
from crossdock.options import option

WIRES = ("native", "fp8")


@attrs.frozen(kw_only=True)
class NvlinkOptions:
    """How many multiprocessors move rows, and in which form."""

    programs: int = option(
        "programs of a transfer when nothing runs beside it, one a multiprocessor; 0 takes all of the device",
        default=0,
        validator=attrs.validators.ge(0),
    )
    overlap_programs: int = option(
        "programs of a transfer while other work runs beside it (two micro-batches in flight)",
        default=8,
        validator=attrs.validators.ge(1),
    )
    chunks: int = option(
        "pieces at most in which a program sends outputs home, so that summing starts before the last has arrived",
        default=8,
        validator=attrs.validators.ge(1),
    )
    wire: str = option(
        "form of the rows on the way out: native, or fp8 with one scale per 128 elements",
        default="native",
        validator=attrs.validators.in_(WIRES),
    )
