"""Requests drawn from ``/openapi.json`` by an independent client: no crash, every answer as the document says."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunServer = Callable[..., None]
WORDS = (
    "--checks=all",
    # Rules across fields (prompt or messages, lengths against the context) are 400 and have no place in a schema.
    "--exclude-checks=positive_data_acceptance",
    # The fake engine has no experts to place.
    "--exclude-path-regex=^/placement",
    "--phases=coverage,fuzzing",
    "--max-examples=4",
    "--seed=3",
    "--request-timeout=20",
    "--workers=1",
    "--no-color",
)


@pytest.mark.timeout(240)
def test_every_endpoint_keeps_to_the_openapi_document(run_server: RunServer, tmp_path: Path) -> None:
    async def scenario(server: Any) -> None:
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}openapi.json", *WORDS),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        try:
            out, _ = await client.communicate()
        finally:
            if client.returncode is None:
                client.kill()
        text = out.decode()
        assert client.returncode == 0, text
        assert server.frontend.engine.num_in_flight == 0

    run_server(scenario, limit_s=200)
