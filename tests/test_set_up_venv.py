"""``make venv`` on a machine that lacks something: one sentence with the name of the package, exit 2, nothing made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "set-up-venv"
BROKEN = {
    "python3-venv": 'case "$*" in *ensurepip*) exit 1;; esac; exec {python} "$@"',
    "Python 3.11 or newer is needed": 'case "$*" in *version_info*) exit 1;; esac; exec {python} "$@"',
}


@pytest.mark.parametrize("told", [*BROKEN, "'nowhere-python' is missing"])
def test_what_is_missing_is_one_sentence(tmp_path: Path, told: str) -> None:
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(SCRIPT, tmp_path / ".ci")
    python = "nowhere-python"
    if told in BROKEN:
        wrapper = tmp_path / "python"
        wrapper.write_text(f"#!/bin/sh\n{BROKEN[told].format(python=sys.executable)}\n")
        wrapper.chmod(0o755)
        python = str(wrapper)
    ran = subprocess.run(
        ["bash", script], env={**os.environ, "PYTHON": python}, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("crossdock: ")
    assert told in line
    assert not (tmp_path / ".venv").exists()
