"""Log lines carry the rank; a file system that refuses costs one sentence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from crossdock.launch.rank_logs import pass_logs_on, set_up_logs


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_lines_of_both_libraries_have_the_rank(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-3.log"
    set_up_logs(rank=3, log_file=path)
    structlog.get_logger("a").info("joined", ranks=4)
    logging.getLogger("b").warning("from the standard library")
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    assert all("rank=3" in line for line in lines)
    assert "joined" in lines[0]
    assert "ranks=4" in lines[0]
    assert "from the standard library" in lines[1]


def test_a_full_disk_is_told_once_and_logging_goes_on_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "full.log"
    path.symlink_to("/dev/full")
    set_up_logs(rank=0, log_file=path)
    for number in range(3):
        structlog.get_logger().info("line", number=number)
    told = [line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line]
    assert len(told) == 1
    assert "No space left" in told[0]


def test_a_file_that_cannot_be_opened_sends_lines_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "taken"
    folder.mkdir()
    set_up_logs(rank=1, log_file=folder)
    structlog.get_logger().info("still there")
    told = capsys.readouterr().err
    assert "cannot be opened" in told
    assert "still there" in told


def test_as_a_library_lines_go_where_the_program_sends_them_and_none_to_stdout(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    structlog.reset_defaults()
    pass_logs_on()
    with caplog.at_level(logging.INFO):
        structlog.get_logger("a").info("memory plan", size=3)
    assert [record.getMessage() for record in caplog.records] == ["event=memory plan size=3"]
    assert capsys.readouterr().out == ""


def test_what_a_program_has_configured_stays() -> None:
    structlog.configure(processors=[])
    pass_logs_on()
    assert structlog.get_config()["processors"] == []
