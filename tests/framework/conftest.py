"""Fixtures of the core's tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crossdock.testing.fake_distribution import write_distribution


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``install("name", entry_points=..., modules=...)`` for the length of one test; imported modules are forgotten afterwards."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def write(name: str, **values: object) -> None:
        write_distribution(site, name, **values)  # type: ignore[arg-type]
        importlib.invalidate_caches()

    yield write
    for module in set(sys.modules) - before:
        if str(site) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]
