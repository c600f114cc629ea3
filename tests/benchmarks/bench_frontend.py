"""CPU of the frontend per request and per token, with a fake engine: no model, no ranks, one process, CPU clock.

Run: ``python tests/benchmarks/bench_frontend.py [--requests 64] [--tokens 64]``. The client's and the fake engine's share is measured by
itself (handlers that answer at once, tokens that nobody reads) and is not taken off: the figures are upper limits. The probe is a fixed
piece of Python in the same process; its ratio compares machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from crossdock.config import CheckpointConfig, Config, ParallelConfig, ServerConfig
from crossdock.rank_plan import plan_rank
from crossdock.serving.app import make_app
from crossdock.serving.frontend import Frontend, Phase
from crossdock.serving.frontend_build import make_frontend
from crossdock.testing.fake_engine import FakeEngine, FakeReplica
from crossdock.testing.text_model import write_text_model
from crossdock.types.request import EngineRequest, SamplingParams

REPLICAS = 2
ROUNDS = 3
BATCH = 32
MS = 1e3
US = 1e6


def frontend_on(engine: FakeEngine, folder: Path) -> Frontend:
    """The server's own frontend; the engine stands where the link does."""
    config = Config(
        checkpoint=CheckpointConfig(path=str(folder), load_format="random"),
        parallel=ParallelConfig(ranks=REPLICAS, attn_dp_size=REPLICAS),
        server=ServerConfig(router="least_tokens"),
    )
    frontend = make_frontend(config, plan_rank(config, 0), engine)
    engine.receive = frontend.engine.receive
    frontend.phase = Phase.READY
    return frontend


async def requests_cpu_s(client: TestClient[Any, Any], body: dict[str, Any], count: int) -> float:
    """CPU of ``count`` requests, ``BATCH`` at once."""
    places = asyncio.Semaphore(BATCH)

    async def one() -> None:
        async with places, client.post("/v1/completions", json=body) as response:
            assert response.status == 200
            await response.read()

    begin = time.process_time()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.process_time() - begin


async def empty_cpu_s(client: TestClient[Any, Any], count: int) -> float:
    """CPU of as many requests to a handler that does nothing: HTTP itself, both ends of it."""
    begin = time.process_time()
    for _ in range(count):
        async with client.get("/ping") as response:
            await response.read()
    return time.process_time() - begin


async def engine_cpu_s(frontend: Frontend, count: int, tokens: int) -> float:
    """CPU of the fake engine and the engine client alone: outputs that nobody turns into text."""
    ended = asyncio.Semaphore(0)
    begin = time.process_time()
    for index in range(count):
        sampling = SamplingParams(max_new_tokens=tokens)
        request = EngineRequest(rid=f"bench-{index}", prompt_ids=(70, 71), sampling=sampling)
        await frontend.engine.submit([request], lambda output: ended.release() if output.finish_reason else None)
    for _ in range(count):
        await ended.acquire()
    return time.process_time() - begin


def probe_s() -> float:
    """A fixed piece of Python: JSON of a small object, ten thousand times."""
    value = {"choices": [{"index": 0, "text": "token", "finish_reason": None}], "id": "x" * 32}
    begin = time.process_time()
    for _ in range(10_000):
        json.loads(json.dumps(value))
    return time.process_time() - begin


async def measure(folder: Path, count: int, tokens: int) -> dict[str, float]:
    """Medians of the rounds."""
    engine = FakeEngine(replicas=tuple(FakeReplica(attn_dp_rank=rank) for rank in range(REPLICAS)))
    frontend = frontend_on(engine, folder)
    server = TestServer(make_app(frontend))
    await server.start_server()
    steps = asyncio.create_task(engine.run())
    async with TestClient(server) as client:
        await frontend.engine.wait_ready()
        short = {"prompt": "the quick brown fox", "max_tokens": 1}
        long = {"prompt": "the quick brown fox", "max_tokens": tokens}
        await requests_cpu_s(client, short, BATCH)
        rounds: list[dict[str, float]] = []
        for _ in range(ROUNDS):
            one = await requests_cpu_s(client, short, count)
            whole = await requests_cpu_s(client, long, count)
            streamed = await requests_cpu_s(client, {**long, "stream": True}, count)
            alone = await engine_cpu_s(frontend, count, tokens)
            rounds.append(
                {
                    "request_ms": one / count * MS,
                    "ping_ms": await empty_cpu_s(client, count) / count * MS,
                    "token_us": (whole - one) / (count * (tokens - 1)) * US,
                    "streamed_token_us": (streamed - one) / (count * (tokens - 1)) * US,
                    "engine_token_us": alone / (count * tokens) * US,
                    "probe_ms": probe_s() * MS,
                }
            )
    steps.cancel()
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_text_model(Path(folder) / "tiny", context_tokens=4096)
        figures = asyncio.run(measure(model, arguments.requests, arguments.tokens))
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
