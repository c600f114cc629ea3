"""Building the C kernels: cached, safe against neighbours, and never an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from crossdock.native_code import build_native_code, cache_folder

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


@needs_compiler
def test_it_builds_once_and_loads_again(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    first = build_native_code(str(COMPILER), folder, [source])
    assert first.library is not None, first.reason
    assert first.library.answer() == 42
    built = [path.stat().st_mtime_ns for path in folder.glob("*.so")]
    assert build_native_code(str(COMPILER), folder, [source]).library is not None
    assert [path.stat().st_mtime_ns for path in folder.glob("*.so")] == built


@needs_compiler
def test_what_a_killed_build_left_is_removed_by_the_next(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "building-cut.so").write_bytes(b"half a library")
    assert build_native_code(str(COMPILER), folder, [source]).library is not None
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {"kernels", "build.lock"}


@needs_compiler
def test_another_source_gets_another_library(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    build_native_code(str(COMPILER), folder, [source])
    source.write_text("int answer(void) { return 43; }\n")
    again = build_native_code(str(COMPILER), folder, [source])
    assert again.library is not None
    assert again.library.answer() == 43
    assert len(list(folder.glob("*.so"))) == 2


@needs_compiler
def test_processes_that_start_together_build_once(source: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    compiler = tmp_path / "counting-cc"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo built >> {log} ;; esac\nexec {COMPILER} "$@"\n'
    )
    compiler.chmod(0o755)
    folder = tmp_path / "cache"
    folder.mkdir()
    code = (
        "import sys; from pathlib import Path; from crossdock.native_code import build_native_code; "
        "found = build_native_code(sys.argv[1], Path(sys.argv[2]), [Path(sys.argv[3])]); sys.exit(found.library is None)"
    )
    arguments = [sys.executable, "-c", code, str(compiler), str(folder), str(source)]
    processes = [subprocess.Popen(arguments) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert log.read_text().split() == ["built"]


@needs_compiler
def test_without_a_cache_folder_it_still_loads(source: Path) -> None:
    code = build_native_code(str(COMPILER), None, [source])
    assert code.library is not None
    assert code.library.answer() == 42


@needs_compiler
def test_a_source_that_does_not_compile_is_a_reason_not_an_error(source: Path, tmp_path: Path) -> None:
    source.write_text("int answer(void) { return }\n")
    code = build_native_code(str(COMPILER), tmp_path, [source])
    assert code.library is None
    assert "could not build the CPU kernels" in code.reason
    assert not list(tmp_path.glob("*.so"))


def test_a_compiler_that_is_not_there_is_a_reason_not_an_error(source: Path, tmp_path: Path) -> None:
    code = build_native_code(str(tmp_path / "no-compiler"), tmp_path, [source])
    assert code.library is None
    assert "could not build" in code.reason


def test_the_cache_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "crossdock"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("no folder")
    assert cache_folder() is None


def test_a_compiler_whose_messages_are_not_utf8_is_a_reason_not_an_error(source: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "latin-cc"
    compiler.write_bytes(b"#!/bin/sh\necho 'gcc f\xfcr alle'\necho 'Fehler: gro\xdf' >&2\n[ \"$1\" = --version ]\n")
    compiler.chmod(0o755)
    code = build_native_code(str(compiler), tmp_path, [source])
    assert code.library is None
    assert "Fehler: gro" in code.reason
