"""Numbers of ``[eplb]`` that the manager works with."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class EplbSettings:
    """See ``crossdock.config.EplbConfig``."""

    interval: int
    max_step_bytes: int
    late_s: float
    expert_share: float
    link_gbps: float
