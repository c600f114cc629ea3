"""The server's first completion: sent to itself over HTTP, so that what it prints is what a client gets."""

from __future__ import annotations

import aiohttp

from crossdock.serving.frontend import Frontend
from crossdock.serving.http_io import HEALTH_CHECK_HEADER
from crossdock.serving.start_lines import StartLines, say

PROMPT = "Experts are"
TOKENS = 24
TIMEOUT_S = 120.0


async def say_hello(frontend: Frontend, url: str, lines: StartLines) -> None:
    """Completes a short prompt and prints it with the URL on stdout; marked as a probe, so it is in no statistics."""
    text = frontend.tokenizer is not None
    room = max(1, min(TOKENS, frontend.model.context_tokens // 2))
    body = {"prompt": PROMPT if text else [1], "max_tokens": room, "temperature": 0.0}
    headers = {HEALTH_CHECK_HEADER: "1", **_authorization(frontend)}
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/completions", json=body, headers=headers) as response,
        ):
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        say(f"the first completion failed: {error}")
        return
    if response.status != 200:
        say(f"the first completion failed: {answer['error']['message']}")
        return
    lines.done("first completion")
    completion = answer["choices"][0]["text"]
    if text:
        print(f"{PROMPT!r} -> {completion!r}", flush=True)
    print(f"{frontend.model.model_id} is served at {url}/v1", flush=True)


def _authorization(frontend: Frontend) -> dict[str, str]:
    key = next(iter(frontend.api_keys), None)
    return {} if key is None else {"Authorization": f"Bearer {key}"}
