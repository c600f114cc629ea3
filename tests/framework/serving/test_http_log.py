"""What aiohttp logs about bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web
from crossdock.serving.http_log import http_logger


@pytest.mark.parametrize(
    ("raw", "said"),
    [(b"GET / HTTP/1.1\r\nHost: x\r\nX-Bad: \x00\r\n\r\n", "header"), (b"GET / WRONG\r\n\r\n", "refused")],
)
def test_a_malformed_request_is_400_and_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, raw: bytes, said: str
) -> None:
    async def scenario() -> bytes:
        runner = web.AppRunner(web.Application(), logger=http_logger())
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
            writer.write(raw)
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return answer
        finally:
            await runner.cleanup()

    with caplog.at_level(logging.DEBUG):
        assert b" 400 " in asyncio.run(scenario())
    (record,) = [record for record in caplog.records if record.name == "crossdock.http"]
    assert record.exc_info is None
    assert record.levelname == "WARNING"
    assert said in record.getMessage()
    assert "\n" not in record.getMessage()


def test_an_error_of_ours_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    logger = http_logger()
    assert len(logger.filters) == len(http_logger().filters)
    with caplog.at_level(logging.DEBUG):
        try:
            raise ValueError("ours")
        except ValueError:
            logger.exception("Error handling request")
    assert caplog.records[-1].exc_info
