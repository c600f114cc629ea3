"""What a plugin can do, and where it was asked: the values of the compatibility check (DESIGN section 4)."""

from __future__ import annotations

import attrs

from crossdock.types.model import ModelInfo
from crossdock.types.parallel import ParallelSizes


@attrs.frozen(kw_only=True)
class Environment:
    """Facts that a ``*_capabilities`` hook may look at: no device is touched and torch is not imported to make one."""

    device: str
    """``cpu`` or ``cuda``."""
    sizes: ParallelSizes
    dtype: str
    """Name of the compute dtype: ``float32`` or ``bfloat16``."""
    packages: frozenset[str] = frozenset()
    """Importable top-level modules of this environment."""
    num_nodes: int = 1
    max_rows_per_rank: int = 0
    """Most rows that one replica can bring to a step; 0 when unknown."""
    max_decode_rows: int = 0
    """Most rows of one replica in a step without prefill; 0 when unknown."""
    graph_capture: bool = False
    """True when steps are to be captured in device graphs."""
    model: ModelInfo | None = None
    """Facts of the checkpoint; None where no checkpoint is known (``plugins list --matrix``)."""


@attrs.frozen(kw_only=True)
class Refusal:
    """Why something cannot run, and the nearest thing that does."""

    code: str
    """Machine-readable, snake_case, stable: ``device_not_supported``, ``package_missing``, ..."""
    sentence: str
    """One sentence for a person, with the nearest thing that works."""
    needed: int | None = None
    """The number that would do, where the reason is a number."""


@attrs.frozen(kw_only=True)
class PaddingCapabilities:
    """A padding policy; any policy works everywhere, so there is nothing to refuse but a wrong option."""

    modes: frozenset[str] = frozenset({"max_len", "sum_len"})
    """Padding modes that ``choose`` may return."""


@attrs.frozen(kw_only=True)
class EplbAlgoCapabilities:
    """What a placement planner can plan for."""

    needs_load: bool = True
    uses_current: bool = False
    """True when the plan depends on the placement in force."""
    supports_dead_gpus: bool = False


@attrs.frozen(kw_only=True)
class RebalancePolicyCapabilities:
    """What a rebalance policy must be told."""

    needs_plan: bool = False
    """True when it asks for the gain and the price of a finished plan before it answers."""


@attrs.frozen(kw_only=True)
class ModelCapabilities:
    """What a model definition runs with."""

    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    strategies: frozenset[str] | None = None
    """Names of strategies it declares ops for; None for any."""


@attrs.frozen(kw_only=True)
class ObserverCapabilities:
    """Which events an observer wants; the core skips building the others."""

    events: frozenset[str] = frozenset({"step", "load", "rebalance", "fault"})
