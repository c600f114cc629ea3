"""What is installed is read once, and again when it changes."""

import importlib.metadata
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from crossdock.installation import entry_points, top_level_modules
from crossdock.testing.fake_distribution import write_distribution

GROUP = "crossdock.padding"


def install(site: Path, name: str, changed_s: int) -> None:
    """``changed_s`` stands for the clock, whose ticks are longer than an installation here."""
    write_distribution(site, name, entry_points={GROUP: {name: f"{name}.plugin"}}, modules={f"{name}.plugin": ""})
    os.utime(site, (changed_s, changed_s))


def test_metadata_is_read_once_for_all_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    read = Mock(wraps=importlib.metadata.entry_points)
    monkeypatch.setattr(importlib.metadata, "entry_points", read)
    for group in (GROUP, "crossdock.dispatcher", GROUP):
        entry_points(group)
    assert read.call_count == 1


def test_a_distribution_that_comes_or_goes_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    install(tmp_path, "first", changed_s=1)
    assert {"first", "cost"} <= {found.entry.name for found in entry_points(GROUP)}
    install(tmp_path, "second", changed_s=2)
    found = {found.entry.name: found for found in entry_points(GROUP)}
    assert {"first", "second"} <= found.keys()
    assert (found["second"].distribution, found["second"].version) == ("second", "1.0")
    assert {"first", "second"} <= top_level_modules()
    monkeypatch.setattr(sys, "path", sys.path[1:])
    assert "first" not in {found.entry.name for found in entry_points(GROUP)}
    assert "first" not in top_level_modules()


def test_a_path_that_is_not_there_holds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = entry_points(GROUP)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "gone")])
    assert entry_points(GROUP) == before
