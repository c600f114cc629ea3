"""A process ends with the one that started it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.timeout(60)
CHILD = """
import os, threading
from crossdock.launch.parent_death import die_with_parent
die_with_parent(PARENT_PID)
print(os.getpid(), flush=True)
threading.Event().wait()
"""
PARENT = """
import os, subprocess, sys, threading
code = CHILD.replace("PARENT_PID", str(os.getpid()))
subprocess.Popen([sys.executable, "-c", code])
threading.Event().wait()
"""


def test_the_child_of_a_killed_parent_is_ended() -> None:
    code = f"CHILD = {CHILD!r}\n{PARENT}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            child = psutil.Process(int(parent.stdout.readline()))
        finally:
            parent.kill()
        parent.wait()
        psutil.wait_procs([child], timeout=10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    code = CHILD.replace("PARENT_PID", str(1 << 22))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    assert done.returncode == -9
    assert done.stdout == b""
