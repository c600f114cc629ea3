"""Packages that ``plugins new`` writes: formatted, loadable, conforming."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crossdock.cli.new_plugin import TEMPLATES, write_package
from crossdock.errors import UsageError
from crossdock.testing.conformance import Outcome, PluginCase, run_check
from crossdock.testing.fake_distribution import write_distribution
from crossdock.testing.suites import checks_of
from crossdock.testing.world import RankPool

OWN_FILES = {"model": ("config.py", "tiny_config.json")}
NEEDS_RANKS = frozenset({"dispatcher", "padding", "strategy"})
"""Installed and checked in an environment of their own, see tests/examples."""


@pytest.mark.parametrize("point", TEMPLATES)
def test_a_written_package_is_formatted_and_clean(point: str, tmp_path: Path) -> None:
    folder = write_package(point, "brand_new", tmp_path / "package")
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {
        "pyproject.toml",
        "README.md",
        "tests/test_brand_new.py",
        *(f"src/crossdock_brand_new/{name}" for name in ("__init__.py", "py.typed", "plugin.py", f"{point}.py")),
        *(f"src/crossdock_brand_new/{name}" for name in OWN_FILES.get(point, ("options.py", "capabilities.py"))),
    }
    project = Path(__file__).parents[3] / "pyproject.toml"
    for words in (["format", "--check"], ["check"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", "--config", str(project), str(folder)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout


@pytest.fixture
def fresh_pool() -> Iterator[Callable[[int], RankPool]]:
    """Pools of this test alone: processes that started earlier do not see a package written now."""
    pools: dict[int, RankPool] = {}
    yield lambda world_size: pools.setdefault(world_size, RankPool(world_size))
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("point", sorted(set(TEMPLATES) - NEEDS_RANKS))
def test_a_written_plugin_passes_the_checks_of_its_point(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_pool: Callable[[int], RankPool]
) -> None:
    name = f"fresh_{point}"
    folder = write_package(point, name, tmp_path / "package")
    source = folder / "src"
    write_distribution(
        source,
        f"crossdock-fresh-{point}",
        entry_points={f"crossdock.{point}": {name: f"crossdock_{name}.plugin"}},
        modules={},
    )
    monkeypatch.syspath_prepend(str(source))
    monkeypatch.setenv("PYTHONPATH", str(source))
    results = [run_check(check, PluginCase(point=point, name=name, pool_of=fresh_pool)) for check in checks_of(point)]
    assert [f"{result.check}: {result.message}" for result in results if result.outcome is Outcome.FAILED] == []
    assert sum(result.outcome is Outcome.PASSED for result in results) >= 4


def test_names_and_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match="is not an empty folder"):
        write_package("padding", "mine", tmp_path / "full")
    for name in ("Mine", "my-plugin", "1st", "class", ""):
        with pytest.raises(UsageError, match="lower-case letters"):
            write_package("padding", name, tmp_path / "new")
    for name in ("attention", "dispatchers", "models"):
        with pytest.raises(UsageError, match=f"crossdock_{name} would hide the one of crossdock"):
            write_package("padding", name, tmp_path / "new")
    with pytest.raises(UsageError, match="padding plugin 'cost' is installed already, by crossdock 0"):
        write_package("padding", "cost", tmp_path / "new")
    with pytest.raises(UsageError, match="did you mean 'padding'"):
        write_package("paddin", "mine", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_package_can_be_written_anew_while_it_is_installed_and_its_name_used_for_another_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(tmp_path, "crossdock-mine", entry_points={"crossdock.padding": {"mine": "mine"}}, modules={})
    monkeypatch.syspath_prepend(str(tmp_path))
    write_package("padding", "mine", tmp_path / "again")
    write_package("observer", "cost", tmp_path / "cost")
