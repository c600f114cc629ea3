"""Building the C kernels: cached, safe against neighbours, and never an error."""

from __future__ import annotations

import shutil
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
    built = [path.stat().st_mtime_ns for path in folder.iterdir()]
    assert build_native_code(str(COMPILER), folder, [source]).library is not None
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == built


@needs_compiler
def test_another_source_gets_another_library(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    build_native_code(str(COMPILER), folder, [source])
    source.write_text("int answer(void) { return 43; }\n")
    again = build_native_code(str(COMPILER), folder, [source])
    assert again.library is not None
    assert again.library.answer() == 43
    assert len(list(folder.iterdir())) == 2


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
