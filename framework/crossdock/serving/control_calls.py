"""Verbs sent to replica leaders and the replies that are still awaited."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from crossdock.errors import RuntimeFault
from crossdock.types.link import Control, ControlReply, Incoming


class RankSender(Protocol):
    """The part of ``FrontendLink`` that is needed here; tests put a fake engine behind it."""

    async def send(self, rank: int, message: Incoming) -> None: ...

    async def send_all(self, ranks: Sequence[int], message: Incoming) -> None: ...


@attrs.define(eq=False)
class _Call:
    waiting: set[int]
    done: asyncio.Future[None]
    replies: dict[int, ControlReply] = attrs.Factory(dict)
    was_woken_for: bool = False


@attrs.define(eq=False)
class ControlCalls:
    """Pairs replies with calls by ``call_id``."""

    _open: dict[int, _Call] = attrs.Factory(dict)
    _ids: itertools.count[int] = attrs.Factory(itertools.count)

    @property
    def need_wake(self) -> bool:
        """Ranks may have parked before a verb reached them; one wake after it is enough, since each link keeps order."""
        return any(not call.was_woken_for for call in self._open.values())

    def woken(self) -> None:
        """A wake went out after every verb that is open now."""
        for call in self._open.values():
            call.was_woken_for = True

    async def call(
        self, sender: RankSender, leaders: Sequence[int], verb: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> list[ControlReply]:
        """Sends a verb to ``leaders``; their replies in that order.

        Raises:
            RuntimeFault: a leader did not answer in time, or answered with an error.
        """
        call_id = next(self._ids)
        call = _Call(set(leaders), asyncio.get_running_loop().create_future())
        self._open[call_id] = call
        try:
            await sender.send_all(leaders, Control(verb=verb, call_id=call_id, arguments=dict(arguments)))
            await asyncio.wait_for(call.done, timeout_s)
        except TimeoutError as error:
            raise RuntimeFault(f"{verb}: ranks {sorted(call.waiting)} did not answer within {timeout_s:g} s") from error
        finally:
            del self._open[call_id]
        errors = [f"rank {reply.rank}: {reply.error}" for reply in call.replies.values() if reply.error]
        if errors:
            raise RuntimeFault(f"{verb}: {'; '.join(errors)}")
        return [call.replies[leader] for leader in leaders]

    def reply(self, reply: ControlReply) -> None:
        """A leader's answer; one that comes after its call has ended is dropped."""
        call = self._open.get(reply.call_id)
        if call is None:
            return
        call.waiting.discard(reply.rank)
        call.replies[reply.rank] = reply
        if not call.waiting and not call.done.done():
            call.done.set_result(None)

    def fail(self, message: str) -> None:
        """No more replies will come."""
        for call in self._open.values():
            if not call.done.done():
                call.done.set_exception(RuntimeFault(message))
