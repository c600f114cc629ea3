"""aiohttp's own messages: bytes that are no HTTP are the sender's mistake and get one line, not a traceback."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError


class MalformedRequests(logging.Filter):
    """Shortens the record of a request that could not be parsed."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "malformed HTTP request refused: %s", (" ".join(error.message.split())[:200],)
            record.exc_info, record.exc_text = None, None
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        return True


def http_logger() -> logging.Logger:
    """The logger to run an application with; filtered once however often it is asked for."""
    logger = logging.getLogger("crossdock.http")
    if not any(isinstance(one, MalformedRequests) for one in logger.filters):
        logger.addFilter(MalformedRequests())
    return logger
