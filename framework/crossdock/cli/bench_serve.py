"""``crossdock bench serve``: latency and throughput of a running server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

DEFAULT_VOCABULARY = 1000


def bench_serve(
    *,
    base_url: str = "http://127.0.0.1:8000",
    model: str | None = None,
    num_prompts: int = 100,
    random_input_len: int = 128,
    random_output_len: int = 32,
    request_rate: float = float("inf"),
    max_concurrency: int = 0,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Send random prompts to an OpenAI-compatible server and report TTFT, TPOT, ITL, end-to-end latency and throughput.

    Parameters
    ----------
    base_url
        Where the server listens, without /v1.
    model
        Model id; the first one that the server lists without it.
    num_prompts
        Requests in all.
    random_input_len
        Tokens of each prompt.
    random_output_len
        Tokens to generate for each, whatever the model's end of text.
    request_rate
        Requests a second (Poisson arrivals); inf sends all at once.
    max_concurrency
        Requests at once; 0 is no limit.
    seed
        Of prompts and arrivals.
    out
        JSON file for the result; without it the JSON goes to stdout.
    """
    from crossdock.serving.bench_client import BenchLoad, run_bench, server_facts

    async def run() -> dict[str, object]:
        served, vocab_size = await server_facts(base_url)
        load = BenchLoad(
            num_prompts=num_prompts,
            input_tokens=random_input_len,
            output_tokens=random_output_len,
            vocab_size=vocab_size or DEFAULT_VOCABULARY,
            request_rate=request_rate,
            max_concurrency=max_concurrency,
            seed=seed,
        )
        chosen = model or served
        return {"base_url": base_url, "model_id": chosen, **await run_bench(base_url, chosen, load)}

    text = json.dumps(asyncio.run(run()), indent=1)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")
