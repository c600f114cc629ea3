"""``crossdock plugins``: list, check and write plugins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from cyclopts import App

from crossdock.cli.flags import ConfigFlags
from crossdock.errors import PluginError, UnknownPlugin
from crossdock.options import nearest
from crossdock.points import POINTS
from crossdock.registry import InstalledPlugin, installed, load_plugin

plugins_app = App(name="plugins", help="List, check and write plugins.")

_NO_FLAGS = ConfigFlags()


@plugins_app.command(name="list")
def list_(*, format: Literal["table", "json"] = "table", matrix: bool = False, flags: ConfigFlags = _NO_FLAGS) -> None:
    """List installed plugins; one that cannot be loaded is listed with the reason.

    Parameters
    ----------
    format
        ``json`` prints [{point, name, distribution, version, api}].
    matrix
        Print which combinations work together on the configured layout and device, and why the others do not.
    """
    if matrix:
        _print_matrix(flags, format)
        return
    rows = [_row(plugin) for point in POINTS for plugin in installed(point)]
    if format == "json":
        print(json.dumps(rows, indent=2))
        return
    _print_table(("point", "name", "distribution", "version", "api"), [list(map(_cell, row.values())) for row in rows])


@plugins_app.command
def check(
    package: str,
    /,
    *,
    point: str | None = None,
    name: str | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> int:
    """Run the conformance suite of every plugin that a distribution provides; exit 1 when a check fails.

    Parameters
    ----------
    package
        Name of an installed distribution.
    point
        Only plugins of this point.
    name
        Only plugins of this name.
    device
        cuda puts the tensors of dispatchers and experts on GPUs, one a rank.
    """
    from crossdock.comm import take_device
    from crossdock.testing.suites import check_plugins

    take_device(device, 0)

    provided = [
        plugin for plugin in _provided_by(package) if point in (None, plugin.point) and name in (None, plugin.name)
    ]
    if not provided:
        raise UnknownPlugin(
            f"distribution {package!r} provides no plugin of point {point or 'any'} and name {name or 'any'}"
        )
    results = check_plugins(provided, report=print, device=device)
    counts = {
        outcome: sum(result.outcome.value == outcome for result in results)
        for outcome in ("passed", "failed", "not checked")
    }
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


@plugins_app.command
def new(point: str, name: str, /, *, folder: Path | None = None) -> None:
    """Write a complete package with one plugin and one test that passes as written.

    Parameters
    ----------
    point
        Extension point, for instance dispatcher or padding.
    name
        Name of the plugin.
    folder
        Where to write; a new folder crossdock-NAME here when left out.
    """
    from crossdock.cli.new_plugin import write_package

    written = write_package(point, name, folder)
    print(f"wrote {written}; next: pip install -e {written} && pytest {written}")


def _provided_by(package: str) -> list[InstalledPlugin]:
    everything = [plugin for point in POINTS for plugin in installed(point)]
    wanted = package.casefold().replace("_", "-")
    provided = [plugin for plugin in everything if plugin.distribution.casefold().replace("_", "-") == wanted]
    if not provided:
        known = tuple(dict.fromkeys(plugin.distribution for plugin in everything))
        raise UnknownPlugin(
            f"no installed distribution {package!r} provides plugins{nearest(package, known)}; these do: {', '.join(known)}"
        )
    return provided


def _row(plugin: InstalledPlugin) -> dict[str, Any]:
    row: dict[str, Any] = {
        "point": plugin.point,
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
    }
    try:
        return {**row, "api": load_plugin(plugin.point, plugin.name).api}
    except PluginError as error:
        return {**row, "api": None, "error": str(error)}


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _print_table(header: tuple[str, ...], rows: list[list[str]]) -> None:
    """Columns by width; what goes beyond the header (a reason) stands below its row."""
    widths = [max(len(row[column]) for row in [list(header), *rows]) for column in range(len(header))]
    for row in [list(header), *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
        for extra in row[len(header) :]:
            print(f"    {extra}")


def _print_matrix(flags: ConfigFlags, format: str) -> None:
    from crossdock.compatibility_matrix import MATRIX_POINTS, selection_matrix

    rows, broken = selection_matrix(flags.load().config)
    if format == "json":
        table = [
            {**dict(zip(MATRIX_POINTS, row.names, strict=True)), "codes": [refusal.code for refusal in row.refusals]}
            for row in rows
        ]
        print(json.dumps(table, indent=2))
        return
    cells = [[*row.names, ", ".join(dict.fromkeys(r.code for r in row.refusals)) or "ok"] for row in rows]
    _print_table((*MATRIX_POINTS, "result"), cells)
    sentences = {refusal.code: refusal.sentence for row in rows for refusal in row.refusals}
    for code, sentence in sentences.items():
        print(f"{code}: for instance, {sentence}")
    for refusal in broken:
        print(f"{refusal.code}: {refusal.sentence}")
