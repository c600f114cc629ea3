"""Server-sent events as OpenAI's clients read them: ``data:`` lines, ``[DONE]`` at the end, errors as events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import msgspec
from aiohttp import web

from crossdock.serving.http_errors import error_body

_ENCODER = msgspec.json.Encoder()
_DONE = b"data: [DONE]\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies such as nginx collect the answer otherwise.
    "X-Accel-Buffering": "no",
}


@attrs.define(kw_only=True, eq=False)
class EventStream:
    """The response starts when the first output is there, so that an error before it is a plain HTTP error."""

    request: web.Request
    headers: dict[str, str]
    _response: web.StreamResponse | None = None

    @property
    def has_started(self) -> bool:
        return self._response is not None

    async def begin(self) -> None:
        """Sends the headers; nothing to do later."""
        await self._started()

    async def send(self, events: Iterable[Any]) -> None:
        """Writes events (attrs values) in one piece."""
        data = b"".join([b"data: %b\n\n" % _ENCODER.encode(event) for event in events])
        if data:
            response = self._response or await self._started()
            await response.write(data)

    async def finish(self) -> web.StreamResponse:
        """Writes ``[DONE]`` and ends the response."""
        response = await self._started()
        await response.write(_DONE)
        await response.write_eof()
        return response

    async def fail(self, message: str, *, status: int, param: str | None) -> web.StreamResponse:
        """Ends a stream that has begun with one error event."""
        await self.send([error_body(message, status=status, param=param)])
        return await self.finish()

    async def _started(self) -> web.StreamResponse:
        if self._response is None:
            self._response = web.StreamResponse(headers=_HEADERS | self.headers)
            await self._response.prepare(self.request)
        return self._response
