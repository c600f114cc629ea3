"""The private folder of a run: unique, closed to others, removed when its run is gone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from crossdock.errors import ConfigFileError
from crossdock.launch.runtime_folder import OWNER_FILE, make_runtime_folder, remove_stale_folders, runtime_folder


def test_two_runs_have_two_folders_that_only_this_user_can_enter(tmp_path: Path) -> None:
    first, second = make_runtime_folder(tmp_path), make_runtime_folder(tmp_path)
    assert first != second
    assert first.is_dir()
    assert second.is_dir()
    assert stat.S_IMODE(first.stat().st_mode) == 0o700


def test_folders_of_ended_runs_are_removed_and_others_kept(tmp_path: Path) -> None:
    own = make_runtime_folder(tmp_path)
    ended, reused, starting, cut_short = (
        tmp_path / f"crossdock-run-{name}" for name in ("ended", "reused", "starting", "cut_short")
    )
    for folder in (ended, reused, starting, cut_short):
        folder.mkdir()
    os.utime(cut_short, (0, 0))
    (ended / OWNER_FILE).write_text("4194303 1.00")
    (reused / OWNER_FILE).write_text(f"{psutil.Process().pid} 1.00")  # the pid lives, but it is another process
    remove_stale_folders(tmp_path)
    assert own.exists()
    assert not ended.exists()
    assert not reused.exists()
    assert starting.exists()  # no owner yet
    assert not cut_short.exists()


def test_the_folder_of_a_block_is_gone_after_it_and_one_whose_process_was_killed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os; from crossdock.launch.runtime_folder import *\nwith runtime_folder(): os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=60)
    assert killed.returncode == -9
    [left] = tmp_path.iterdir()
    with runtime_folder() as folder:
        assert not left.exists()
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_path_too_long_for_sockets_is_refused_with_the_way_out(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    with pytest.raises(ConfigFileError, match="TMPDIR"):
        make_runtime_folder(deep)
    assert not list(deep.iterdir())


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match="TMPDIR"):
        make_runtime_folder(tmp_path / "absent")
