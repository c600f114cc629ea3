"""Installed distributions that exist for one test: metadata and modules in a folder that is put on ``sys.path``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_distribution(
    site: Path,
    name: str,
    *,
    version: str = "1.0",
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str],
    requires: Sequence[str] = (),
) -> None:
    """Writes what an installer would write into ``site``.

    Args:
        site: the folder; put it on ``sys.path`` (or ``PYTHONPATH``) to install everything in it.
        name: of the distribution.
        version: of the distribution.
        entry_points: group -> name -> value, for instance ``{"crossdock.padding": {"mine": "mine.plugin"}}``.
        modules: dotted module name -> source; packages in between are made.
        requires: requirement strings, with ``; extra == 'x'`` for extras.
    """
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(metadata) + "\n", encoding="utf-8")
    lines: list[str] = []
    for group, points in entry_points.items():
        lines.append(f"[{group}]")
        lines += [f"{point} = {value}" for point, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for module, source in modules.items():
        *packages, last = module.split(".")
        folder = site
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{last}.py").write_text(source, encoding="utf-8")
