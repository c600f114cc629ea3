"""The way of a generating request from body to answer, the same for completions, chat and ``/generate``."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

from aiohttp import web

from crossdock.errors import CrossdockError, RequestError
from crossdock.serving.choices import ChoiceDelta
from crossdock.serving.frontend import FRONTEND, Frontend
from crossdock.serving.generation import GenerationPlan
from crossdock.serving.http_io import error_status, is_health_check, json_response, typed_body
from crossdock.serving.request_ids import REQUEST_ID_HEADER, request_id
from crossdock.serving.sse import EventStream

Body = TypeVar("Body", bound="StreamBody")


class StreamBody(Protocol):
    """What of a body the way depends on."""

    @property
    def stream(self) -> bool | None: ...


class Answer(Protocol):
    """Builds one endpoint's response, or its chunks, from the deltas of a plan."""

    def take(self, delta: ChoiceDelta) -> None:
        """Keeps one delta for ``response``."""
        ...

    def response(self) -> Any:
        """The whole answer, choices in index order."""
        ...

    def chunks(self, batch: list[ChoiceDelta]) -> Iterable[Any]:
        """Events of a stream for what has arrived."""
        ...

    def last_chunks(self) -> Iterable[Any]:
        """Events after the last delta."""
        ...


async def answered(
    request: web.Request,
    body_class: type[Body],
    make_plan: Callable[[Body, Frontend, bool], Awaitable[GenerationPlan]],
    make_answer: Callable[[Body, Frontend, GenerationPlan], Answer],
) -> web.StreamResponse:
    """Reads the body, plans, generates, answers in one piece or as a stream.

    Args:
        request: of a generating endpoint.
        body_class: what its body is read as.
        make_plan: (body, frontend, is a health probe) -> the checked plan.
        make_answer: (body, frontend, plan) -> the endpoint's answer.

    Raises:
        RequestError, OverloadedError, RuntimeFault: before anything was sent; a later error is an event of the stream.
    """
    frontend = request.app[FRONTEND]
    frontend.check_takes_requests()
    body = await typed_body(request, body_class)
    plan = await make_plan(body, frontend, is_health_check(request))
    answer = make_answer(body, frontend, plan)
    if body.stream:
        return await _streamed(frontend, plan, request, answer)
    with frontend.running(plan.request_id, request_id()):
        async with contextlib.aclosing(frontend.deltas(plan)) as batches:
            async for batch in batches:
                for delta in batch:
                    answer.take(delta)
    return json_response(answer.response())


async def _streamed(
    frontend: Frontend, plan: GenerationPlan, request: web.Request, answer: Answer
) -> web.StreamResponse:
    """An error before the first event is raised (a plain HTTP error); a later one is sent as an event. ``[DONE]`` ends both."""
    stream = EventStream(request=request, headers={REQUEST_ID_HEADER: request_id()})
    try:
        with frontend.running(plan.request_id, request_id()):
            async with contextlib.aclosing(frontend.deltas(plan)) as batches:
                async for batch in batches:
                    if not stream.has_started:
                        await stream.begin()
                    await stream.send(answer.chunks(batch))
        await stream.send(answer.last_chunks())
        return await stream.finish()
    except CrossdockError as error:
        if not stream.has_started:
            raise
        field = error.field if isinstance(error, RequestError) else None
        return await stream.fail(str(error), status=error_status(error), param=field)
