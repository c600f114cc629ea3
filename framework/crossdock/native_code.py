"""Builds the C kernels of ``ops/cpu`` with the machine's own compiler at first use, and loads them.

No binary is shipped: the compiler sees this machine's vector instructions. The library is kept in the user's cache folder under a name
that says what it was made from and for. Without a compiler everything works through torch; callers get the reason instead of a library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

import attrs

_SOURCES = Path(__file__).parent / "ops" / "cpu"
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_UNFINISHED = "building-"
"""Libraries are built under a name that begins so."""
_BUILD_LIMIT_S = 180
"""About 8 s of one core; machines are busy when several ranks start."""


@attrs.frozen(kw_only=True, eq=False)
class NativeCode:
    """The loaded kernels, or why there are none."""

    library: ctypes.CDLL | None
    reason: str
    """Where the library came from, or what is missing."""


@functools.cache
def native_code() -> NativeCode:
    """The kernels for this machine; built once a machine and cache folder, loaded once a process. Never raises."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return NativeCode(library=None, reason=f"no C compiler found ({', '.join(_COMPILERS)})")
    return build_native_code(compiler, cache_folder())


def build_native_code(compiler: str, folder: Path | None, sources: Sequence[Path] = ()) -> NativeCode:
    """Builds into ``folder``, or for None into a folder that is removed once the library is loaded."""
    files = tuple(sources) or tuple(sorted(_SOURCES.glob("*.c")))
    try:
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="crossdock-") as temporary:
                return _loaded(_built(compiler, files, Path(temporary) / "kernels.so"))
        target = folder / f"kernels-{_fingerprint(compiler, files)}.so"
        with _build_lock(folder):
            for left in folder.glob(f"{_UNFINISHED}*"):  # of a build that was killed
                left.unlink()
            built = target if target.exists() else _built(compiler, files, target)
        return _loaded(built)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        return NativeCode(
            library=None, reason=f"{compiler} could not build the CPU kernels: {str(output).strip()[-400:]}"
        )


def cache_folder() -> Path | None:
    """Where libraries are kept: the user's own cache folder, which others cannot write to; None where there is none."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "crossdock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except (OSError, RuntimeError):
        return None
    return folder if owner == os.getuid() and os.access(folder, os.W_OK | os.X_OK) else None


@contextlib.contextmanager
def _build_lock(folder: Path) -> Generator[None, None, None]:
    """Ranks that start together build once: the others wait and find the library."""
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _built(compiler: str, files: Sequence[Path], target: Path) -> Path:
    """Compiles to a name of its own and renames: a build that is cut short leaves no half library behind."""
    handle, name = tempfile.mkstemp(prefix=_UNFINISHED, suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        subprocess.run(
            [compiler, *_FLAGS, *map(str, files), "-o", name, "-lm"],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_LIMIT_S,
        )
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def _loaded(path: Path) -> NativeCode:
    return NativeCode(library=ctypes.CDLL(str(path)), reason=f"built by the machine's compiler: {path.name}")


def _fingerprint(compiler: str, files: Sequence[Path]) -> str:
    """Sources, flags, compiler and processor: a home folder may be shared by different machines."""
    digest = hashlib.sha256()
    headers = sorted(files[0].parent.glob("*.h"))
    for path in (*files, *headers):
        digest.update(path.read_bytes())
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=_BUILD_LIMIT_S
    )
    digest.update("\n".join((*_FLAGS, version.stdout, platform.machine(), _processor())).encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """Model and instruction sets, where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
