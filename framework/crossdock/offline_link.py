"""The engine's channel without a frontend: requests are known from the start, outputs are kept, and the loop stops when all have ended."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from crossdock.types.link import AddRequests, Incoming, Outgoing, Outputs, Stop
from crossdock.types.request import EngineOutput, EngineRequest


@attrs.define(eq=False)
class OfflineLink:
    """``RankLink`` of one rank. An attention-TP peer, which gets no requests, has none here."""

    requests: Sequence[EngineRequest] = ()
    outputs: dict[str, list[EngineOutput]] = attrs.field(factory=dict[str, list[EngineOutput]], init=False)
    _open: set[str] = attrs.field(factory=set[str], init=False)
    _is_started: bool = attrs.field(default=False, init=False)

    def poll(self, timeout_s: float | None) -> Sequence[Incoming]:
        """All requests at the first call, then nothing until the last of them has ended, then a stop; never waits."""
        if not self._is_started:
            self._is_started = True
            self._open = {request.rid for request in self.requests}
            if self.requests:
                return (AddRequests(requests=tuple(self.requests)),)
        return () if self._open else (Stop(),)

    def send(self, message: Outgoing) -> None:
        """Files outputs by request id; nobody listens to anything else."""
        if not isinstance(message, Outputs):
            return
        for output in message.outputs:
            self.outputs.setdefault(output.rid, []).append(output)
            if output.finish_reason is not None:
                self._open.discard(output.rid)
