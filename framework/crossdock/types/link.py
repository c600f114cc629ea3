"""How a rank talks to the frontend. The engine knows this protocol only; serving implements it over ZeroMQ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import attrs

from crossdock.types.request import EngineOutput, EngineRequest, ReplicaLoad


@attrs.frozen(kw_only=True)
class AddRequests:
    """New requests for this replica."""

    requests: tuple[EngineRequest, ...]


@attrs.frozen(kw_only=True)
class AbortRequests:
    """Requests that nobody waits for any more."""

    rids: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Wake:
    """Sent to every rank when any rank gets work while all are parked: exactly one a park.

    A rank keeps the largest ``step`` it has seen. Parking after step ``s`` with ``s <= step`` already seen means going on
    at once, because the frontend heard of the park from a faster rank; a smaller ``step`` is an old wake and is ignored.
    Work alone never ends a park, or one rank would step without the others.
    """

    step: int
    """The park it ends: ``Parked.step``."""


@attrs.frozen(kw_only=True)
class Stop:
    """Leave the step loop together with the other ranks: finish nothing more, exit 0."""


@attrs.frozen(kw_only=True)
class Control:
    """A named verb for all replica leaders: ``flush_cache``, ``receipt``, recorder and profile verbs, placement."""

    verb: str
    call_id: int
    arguments: dict[str, Any] = attrs.Factory(dict)


Incoming: TypeAlias = AddRequests | AbortRequests | Wake | Stop | Control


@attrs.frozen(kw_only=True)
class Outputs:
    """New tokens, and the load when a report is due."""

    outputs: tuple[EngineOutput, ...]
    load: ReplicaLoad | None = None


@attrs.frozen(kw_only=True)
class Ready:
    """The rank can take requests."""

    rank: int
    receipt: dict[str, Any]


@attrs.frozen(kw_only=True)
class Parked:
    """This replica parked after step number ``step``; work sent from now on must wake every rank."""

    rank: int
    step: int


@attrs.frozen(kw_only=True)
class ControlReply:
    """A rank's answer to a ``Control``."""

    rank: int
    call_id: int
    result: dict[str, Any]
    error: str | None = None


@attrs.frozen(kw_only=True)
class Fatal:
    """The rank ends because of this; one sentence."""

    rank: int
    message: str
    culprit_rank: int | None = None
    exit_code: int = 1
    """Of the rank's process: 2 when the user's input cannot be used."""


Outgoing: TypeAlias = Outputs | Ready | Parked | ControlReply | Fatal


class RankLink(Protocol):
    """One rank's end of its channel to the frontend. Every rank has one; only leaders get requests."""

    def poll(self, timeout_s: float | None) -> Sequence[Incoming]:
        """Messages that arrived. 0 returns at once, None waits (parked) without using the CPU."""
        ...

    def send(self, message: Outgoing) -> None: ...
