"""A server on a fake engine, in this process, for one scenario at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from aiohttp.test_utils import TestClient, TestServer
from crossdock.serving.app import make_app
from crossdock.serving.chat_template import load_chat_template
from crossdock.serving.engine_client import EngineClient
from crossdock.serving.frontend import Frontend, Phase
from crossdock.serving.metrics import ServerMetrics
from crossdock.serving.model_facts import read_model_facts
from crossdock.serving.replicas import Replica
from crossdock.serving.router import make_router
from crossdock.serving.tokenizer import load_tokenizer
from crossdock.testing.fake_engine import FakeEngine, FakeReplica, TokenRule, echo_token
from crossdock.testing.text_model import write_text_model
from crossdock.types.request import EngineRequest

MODEL = "tiny"
LIMIT_S = 30.0


@attrs.frozen(kw_only=True, eq=False)
class FakeServer:
    """What a scenario works with."""

    client: TestClient[Any, Any]
    frontend: Frontend
    engine: FakeEngine
    url: str

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        async with self.client.post(path, json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.client.get(path, **options) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: Any) -> list[str]:
        """``data:`` payloads of a streamed answer, ``[DONE]`` included."""
        async with self.client.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
        return [line.removeprefix("data: ") for line in text.split("\n\n") if line]

    def freeze_at(self, position: int) -> None:
        """The step loop stands still once an output has ``position`` tokens, until ``engine.running`` is set again."""

        def rule(request: EngineRequest, place: int) -> int:
            if place == position:
                self.engine.running.clear()
            return echo_token(request, place)

        for replica in self.engine.replicas:
            replica.rule = rule

    async def until(self, condition: Callable[[], bool]) -> None:
        """Gives way to other tasks until ``condition`` holds; the scenario's time limit ends a wait for ever."""
        while not condition():
            await asyncio.sleep(0.001)


@attrs.frozen(kw_only=True)
class ServerSetup:
    """Choices of a scenario."""

    folder: Path
    num_replicas: int = 1
    rule: TokenRule = echo_token
    eos_token_ids: frozenset[int] = frozenset()
    router: str = "round_robin"
    api_keys: frozenset[str] = frozenset()
    max_in_flight: int = 64
    max_body_bytes: int = 8 * 2**20
    phase: Phase = Phase.READY


@asynccontextmanager
async def fake_server(setup: ServerSetup) -> AsyncIterator[FakeServer]:
    replicas = tuple(
        FakeReplica(attn_dp_rank=rank, rule=setup.rule, eos_token_ids=setup.eos_token_ids)
        for rank in range(setup.num_replicas)
    )
    engine = FakeEngine(replicas=replicas)
    client = EngineClient(
        sender=engine,
        num_ranks=setup.num_replicas,
        replicas=tuple(Replica(attn_dp_rank=rank, leader=rank) for rank in range(setup.num_replicas)),
        router=make_router(setup.router),
        max_in_flight_per_replica=setup.max_in_flight,
    )
    engine.receive = client.receive
    tokenizer = load_tokenizer(setup.folder)
    metrics = ServerMetrics(MODEL, setup.num_replicas)
    client.on_outputs = lambda replica, _: metrics.replica_reported(replica)
    frontend = Frontend(
        model=read_model_facts(setup.folder, model_id=MODEL, max_sequence_tokens=None, created=1),
        tokenizer=tokenizer,
        chat_template=load_chat_template(setup.folder, {} if tokenizer is None else tokenizer.config),
        engine=client,
        metrics=metrics,
        info={"config": {}},
        api_keys=setup.api_keys,
        max_body_bytes=setup.max_body_bytes,
        phase=setup.phase,
    )
    server = TestServer(make_app(frontend))
    await server.start_server()
    steps = asyncio.create_task(engine.run())
    try:
        async with TestClient(server) as http:
            await client.wait_ready()
            yield FakeServer(client=http, frontend=frontend, engine=engine, url=str(server.make_url("/")))
    finally:
        steps.cancel()


Scenario = Callable[[FakeServer], Awaitable[None]]


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config, byte-level tokenizer and chat template; context 64."""
    return write_text_model(tmp_path_factory.mktemp("text_model") / "tiny")


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a context of 100000."""
    return write_text_model(tmp_path_factory.mktemp("long_model") / "long", context_tokens=100_000)


@pytest.fixture
def run_server(text_model: Path) -> Callable[..., None]:
    """Runs a scenario against a server with the given ``ServerSetup`` choices, under a time limit."""

    def run(scenario: Scenario, *, limit_s: float = LIMIT_S, **choices: Any) -> None:
        async def limited() -> None:
            async with (
                asyncio.timeout(limit_s),
                fake_server(ServerSetup(**{"folder": text_model, **choices})) as server,
            ):
                await scenario(server)

        asyncio.run(limited())

    return run
