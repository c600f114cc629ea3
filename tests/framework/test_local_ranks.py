"""Rank processes of a job: all end well, or the first failure is told and nobody is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from crossdock.errors import RankLost, RuntimeFault, UsageError
from crossdock.local_ranks import run_local_ranks

MODULE = "paper_rank"
PAPER_RANK = """
import os, signal, sys, time
from pathlib import Path
from crossdock.errors import CheckpointError
from crossdock.local_ranks import end_with_parent, write_error

end_with_parent()
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
(folder / f"pid_{rank}").write_text(str(os.getpid()))
what = (folder / f"do_{rank}").read_text()
if what == "usage":
    sys.exit(write_error(folder, rank, CheckpointError("tensor x is missing")))
if what == "bug":
    sys.exit(write_error(folder, rank, ZeroDivisionError("by zero")))
if what == "silent":
    print("the disk is on fire", file=sys.stderr)
    sys.exit(7)
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "hang":
    time.sleep(600)
if what == "threads":
    (folder / f"threads_{rank}").write_text(os.environ["OMP_NUM_THREADS"])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / f"{MODULE}.py").write_text(PAPER_RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def run(folder: Path, *deeds: str, threads: int = 1) -> None:
    for rank, deed in enumerate(deeds):
        (folder / f"do_{rank}").write_text(deed)
    run_local_ranks(MODULE, folder, len(deeds), threads)


def assert_nobody_is_left(folder: Path) -> None:
    for file in folder.glob("pid_*"):
        assert not Path("/proc", file.read_text()).exists()


def test_ranks_that_end_well_just_end(folder: Path) -> None:
    run(folder, "threads", "threads", threads=3)
    assert [(folder / f"threads_{rank}").read_text() for rank in (0, 1)] == ["3", "3"]


@pytest.mark.parametrize(
    ("deed", "kind", "words"),
    [
        ("usage", UsageError, "^tensor x is missing$"),
        ("bug", RuntimeFault, "unexpected ZeroDivisionError: by zero"),
        ("silent", RankLost, "rank 1 ended with exit code 7; its last words: the disk is on fire"),
        ("killed", RankLost, "rank 1 was ended by signal SIGKILL"),
    ],
)
def test_the_first_failure_is_told_quickly_and_the_other_ranks_are_ended(
    folder: Path, deed: str, kind: type[Exception], words: str
) -> None:
    started = time.monotonic()
    with pytest.raises(kind, match=words):
        run(folder, "hang", deed)
    assert time.monotonic() - started < 30
    assert_nobody_is_left(folder)
