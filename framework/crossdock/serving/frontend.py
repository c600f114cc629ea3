"""What handlers work with: the served model, the engine, metrics, and in which phase the server is."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import AsyncGenerator, Generator
from typing import Any

import attrs
from aiohttp import web

from crossdock.errors import OverloadedError
from crossdock.serving.chat_template import ChatTemplate
from crossdock.serving.choices import ChoiceDelta, choice_deltas
from crossdock.serving.engine_client import EngineClient
from crossdock.serving.generation import GenerationPlan
from crossdock.serving.logprob_format import LogprobFormat
from crossdock.serving.metrics import ServerMetrics
from crossdock.serving.model_facts import ModelFacts
from crossdock.serving.request_body import UnknownKeys
from crossdock.serving.tokenizer import TextTokenizer


class Phase(enum.Enum):
    """Of the server as a whole. Requests are taken in ``ready`` only."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@attrs.define(kw_only=True, eq=False)
class Frontend:
    """One server. Values that never change are set by ``crossdock.serving.server``."""

    model: ModelFacts
    tokenizer: TextTokenizer | None
    chat_template: ChatTemplate
    engine: EngineClient
    metrics: ServerMetrics
    info: dict[str, Any]
    """Resolved config, versions and process map for ``/server_info``."""
    api_keys: frozenset[str] = frozenset()
    max_body_bytes: int
    phase: Phase = Phase.STARTING
    started: float = attrs.Factory(time.time)
    unknown_keys: UnknownKeys = attrs.Factory(UnknownKeys)
    active: dict[str, str] = attrs.Factory(dict)
    """Running client requests: our id to the client's ``X-Request-Id``."""

    @property
    def logprob_format(self) -> LogprobFormat:
        return LogprobFormat(tokenizer=self.tokenizer)

    def check_takes_requests(self) -> None:
        """Raises ``OverloadedError`` (503) while starting, draining or failed."""
        if self.phase is not Phase.READY:
            what = {
                Phase.STARTING: "the server is starting",
                Phase.DRAINING: "the server is shutting down",
                Phase.FAILED: f"the engine has failed: {self.engine.failure}",
            }[self.phase]
            raise OverloadedError(f"{what}; try again later", retry_after_s=5, http_status=503)

    def deltas(self, plan: GenerationPlan) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Measured deltas of a plan. Close it (``contextlib.aclosing``): closing aborts what still runs."""
        return self.metrics.measured(choice_deltas(plan, self.engine, self.tokenizer), plan)

    @contextlib.contextmanager
    def running(self, request_id: str, client_id: str) -> Generator[None]:
        """Lists a request as running, for draining and ``/abort_request``."""
        self.active[request_id] = client_id
        try:
            yield
        finally:
            del self.active[request_id]


FRONTEND: web.AppKey[Frontend] = web.AppKey("frontend", Frontend)
