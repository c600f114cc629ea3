"""Verbs sent to replica leaders and the replies that are still awaited."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Protocol

import attrs

from crossdock.errors import RequestError, RuntimeFault
from crossdock.types.link import ControlReply, Incoming


class RankSender(Protocol):
    """The part of ``FrontendLink`` that is needed here; tests put a fake engine behind it."""

    async def send(self, rank: int, message: Incoming) -> None: ...

    async def send_all(self, ranks: Sequence[int], message: Incoming) -> None: ...


@attrs.define(eq=False)
class _Call:
    leaders: tuple[int, ...]
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

    def open(self, leaders: Sequence[int]) -> int:
        """Begins a call to ``leaders``; its id. From now on ``reply`` and ``fail`` reach it."""
        call_id = next(self._ids)
        self._open[call_id] = _Call(tuple(leaders), set(leaders), asyncio.get_running_loop().create_future())
        return call_id

    async def replies(self, call_id: int, verb: str, timeout_s: float) -> list[ControlReply]:
        """Waits for the replies of a call and closes it; they are in the order of its leaders.

        Raises:
            RuntimeFault: a leader did not answer in time, or the engine failed.
            RequestError: a leader refused the verb; the engine goes on.
        """
        call = self._open[call_id]
        try:
            await asyncio.wait_for(call.done, timeout_s)
        except TimeoutError as error:
            raise RuntimeFault(f"{verb}: ranks {sorted(call.waiting)} did not answer within {timeout_s:g} s") from error
        finally:
            del self._open[call_id]
        errors = [f"rank {reply.rank}: {reply.error}" for reply in call.replies.values() if reply.error]
        if errors:
            raise RequestError(f"{verb}: {'; '.join(errors)}")
        return [call.replies[leader] for leader in call.leaders]

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
