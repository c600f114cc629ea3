"""A private folder for one run: sockets, the ranks' start files, jobs and results. Folders that a killed run left are removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import psutil

from crossdock.errors import ConfigFileError

PREFIX = "crossdock-run-"
OWNER_FILE = "owner"
STARTING_S = 60.0
"""A folder without an owner is younger than this, or its run was killed before it wrote one."""
MAX_SOCKET_PATH = 100
"""Unix socket paths are limited to 107 bytes; the socket's own name needs some of them."""


def make_runtime_folder(parent: Path | None = None) -> Path:
    """A new folder that only this user can enter, marked with this process; stale ones beside it are removed first.

    Raises:
        ConfigFileError: the folder cannot be made, or its path is too long for a socket.
    """
    base = Path(tempfile.gettempdir()) if parent is None else parent
    remove_stale_folders(base)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        (folder / OWNER_FILE).write_text(_identity(psutil.Process()), encoding="utf-8")
    except OSError as error:
        raise ConfigFileError(f"no folder for this run can be made in {base}: {error}; set TMPDIR to one") from error
    if len(os.fsencode(folder)) > MAX_SOCKET_PATH:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigFileError(
            f"{base} is too long a path for sockets (limit {MAX_SOCKET_PATH} bytes); set TMPDIR to a shorter one"
        )
    return folder


@contextlib.contextmanager
def runtime_folder() -> Generator[Path]:
    """A folder of ``make_runtime_folder`` that is removed at the end of the block."""
    folder = make_runtime_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale_folders(base: Path) -> None:
    """Removes folders of this user whose run has ended."""
    for folder in base.glob(f"{PREFIX}*"):
        try:
            if folder.stat().st_uid == os.getuid() and _is_stale(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # somebody else removed it


def _is_stale(folder: Path) -> bool:
    try:
        owner = (folder / OWNER_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > STARTING_S
    pid, _, _ = owner.partition(" ")
    try:
        return owner != _identity(psutil.Process(int(pid)))
    except (psutil.NoSuchProcess, ValueError):
        return True
    except psutil.AccessDenied:
        return False


def _identity(process: psutil.Process) -> str:
    """A pid alone is used again; with its start time it names one process."""
    return f"{process.pid} {process.create_time():.2f}"
