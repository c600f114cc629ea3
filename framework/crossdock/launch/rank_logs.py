"""Logs of a process: stdlib logging with structlog in front, the rank bound once; a full disk costs the log, not the job."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

import structlog


class ForgivingFileHandler(logging.StreamHandler[TextIO]):
    """Writes to a file until the file system refuses; then says so once on stderr and goes on without."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_broken = False
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path.open("a", encoding="utf-8", buffering=1))

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_broken:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._is_broken = True
        print(
            f"crossdock: the log {self._path} cannot be written ({error.strerror}); going on without it",
            file=sys.stderr,
        )


def pass_logs_on() -> None:
    """For use as a library: lines go to the standard library's logging, where the program decides, and none to stdout.

    What the program has configured stays.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.KeyValueRenderer(key_order=["event"], repr_native_str=False),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def set_up_logs(*, rank: int | None, log_file: Path | None, level: int = logging.INFO) -> None:
    """Sends structlog's and the standard library's lines to ``log_file``, or to stderr without one; ``rank`` is in each line.

    A file that cannot be opened is one sentence on stderr, and the lines go there.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if log_file is not None:
        try:
            handler = ForgivingFileHandler(log_file)
        except OSError as error:
            print(
                f"crossdock: the log {log_file} cannot be opened ({error.strerror}); logging to stderr", file=sys.stderr
            )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
    ]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.dev.ConsoleRenderer(
                    colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
                ),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    if rank is not None:
        structlog.contextvars.bind_contextvars(rank=rank)
