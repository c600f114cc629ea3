"""A load generator for OpenAI-compatible servers, ours or others': aiohttp and numpy only. Result keys are those of vLLM's serving bench."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import attrs
import msgspec
import numpy as np

from crossdock.errors import RuntimeFault

TIMEOUT_S = 6 * 3600.0
MS = 1000.0


@attrs.frozen(kw_only=True)
class BenchLoad:
    """What is sent: random prompts of token ids, the same for the same seed."""

    num_prompts: int
    input_tokens: int
    output_tokens: int
    vocab_size: int
    request_rate: float = float("inf")
    """Requests a second, arrivals as a Poisson process; infinite sends all at once."""
    max_concurrency: int = 0
    """Requests at once; 0 is no limit."""
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """Token ids from 1 on: 0 is often padding."""
        draw = np.random.default_rng(self.seed)
        ids = draw.integers(1, max(2, self.vocab_size), size=(self.num_prompts, self.input_tokens))
        return [[int(token) for token in row] for row in ids]

    def arrivals_s(self) -> list[float]:
        """When each request is sent, from the start."""
        if self.request_rate == float("inf"):
            return [0.0] * self.num_prompts
        draw = np.random.default_rng(self.seed + 1)
        return [float(at) for at in np.cumsum(draw.exponential(1 / self.request_rate, self.num_prompts))]


@attrs.define(kw_only=True)
class RequestTimes:
    """One request as the client saw it."""

    begin_s: float
    token_s: list[float] = attrs.field(factory=list[float])
    """Arrival of each chunk with text or, from servers that count tokens in each chunk, with new tokens: not every token has text."""
    end_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.begin_s if self.token_s else self.end_s - self.begin_s

    @property
    def tpot_s(self) -> float:
        """Time per token after the first."""
        last = self.token_s[-1] if self.token_s else self.end_s
        return (last - self.begin_s - self.ttft_s) / max(1, self.output_tokens - 1)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Choice(msgspec.Struct):
    text: str | None = None


class _Event(msgspec.Struct):
    """What is read of an event; other fields are skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_EVENTS = msgspec.json.Decoder(_Event)


async def run_bench(base_url: str, model: str, load: BenchLoad) -> dict[str, Any]:
    """Sends the load and summarises it.

    Raises:
        RuntimeFault: no request succeeded; the message has the first error.
    """
    places = asyncio.Semaphore(load.max_concurrency or load.num_prompts)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base_url, timeout=timeout, connector=connector) as session:
        start_s = time.perf_counter()

        async def one(prompt: Sequence[int], at_s: float) -> RequestTimes:
            await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
            async with places:
                return await _timed_request(session, model, prompt, load.output_tokens)

        requests = [one(prompt, at_s) for prompt, at_s in zip(load.prompts(), load.arrivals_s(), strict=True)]
        times = await asyncio.gather(*requests)
        duration_s = time.perf_counter() - start_s
    return summary(times, duration_s, load)


async def server_facts(base_url: str) -> tuple[str, int | None]:
    """Model id and, where the server tells it, the vocabulary's size.

    Raises:
        RuntimeFault: nobody answers there, or it is no OpenAI-compatible server.
    """
    try:
        async with aiohttp.ClientSession(base_url) as session:
            async with session.get("/v1/models") as response:
                model = str((await response.json())["data"][0]["id"])
            async with session.get("/model_info") as response:
                info = await response.json() if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise RuntimeFault(f"no OpenAI-compatible server answers at {base_url}: {error}") from error
    size = info.get("vocab_size") if isinstance(info, dict) else None
    return model, size if isinstance(size, int) else None


def summary(times: Sequence[RequestTimes], duration_s: float, load: BenchLoad) -> dict[str, Any]:
    """Throughput and latencies of the requests that succeeded. Raises as ``run_bench``."""
    good = [one for one in times if one.error is None]
    if not good:
        raise RuntimeFault(f"none of {len(times)} requests succeeded; the first error: {times[0].error}")
    outputs = sum(one.output_tokens for one in good)
    inputs = sum(one.input_tokens for one in good)
    gaps = [later - earlier for one in good for earlier, later in itertools.pairwise(one.token_s)]
    latencies = {
        "ttft": [one.ttft_s for one in good],
        "tpot": [one.tpot_s for one in good if one.output_tokens > 1],
        "itl": gaps,
        "e2el": [one.end_s - one.begin_s for one in good],
    }
    return {
        "num_prompts": load.num_prompts,
        "request_rate": load.request_rate if load.request_rate != float("inf") else "inf",
        "max_concurrency": load.max_concurrency or None,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(times) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration_s,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
        **{key: value for name, values in latencies.items() for key, value in _statistics(name, values).items()},
    }


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = np.array(seconds or [0.0]) * MS
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }


async def _timed_request(
    session: aiohttp.ClientSession, model: str, prompt: Sequence[int], output_tokens: int
) -> RequestTimes:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    times = RequestTimes(begin_s=time.perf_counter())
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                times.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return times
            # By what has arrived, not by lines: aiohttp takes as long to find a line as everything else here.
            rest = b""
            async for piece in response.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    _take(line, times)
            _take(rest, times)
    except (aiohttp.ClientError, TimeoutError) as error:
        times.error = f"{type(error).__name__}: {error}"
    times.end_s = time.perf_counter()
    return times


def _take(line: bytes, times: RequestTimes) -> None:
    data = line.removeprefix(b"data: ").strip()
    if not data or data == b"[DONE]":
        return
    event = _EVENTS.decode(data)
    if event.error is not None:
        times.error = str(event.error.get("message"))
        return
    usage = event.usage
    has_more = usage is not None and usage.completion_tokens > times.output_tokens
    if event.choices and (has_more or event.choices[0].text):
        times.token_s.append(time.perf_counter())
    if usage is not None:
        times.input_tokens = usage.prompt_tokens
        times.output_tokens = usage.completion_tokens
