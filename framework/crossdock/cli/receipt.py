"""``crossdock receipt``: what two runs chose and did differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from cyclopts import App

from crossdock.config_render import table_differences
from crossdock.errors import UsageError

receipt_app = App(name="receipt", help="Compare receipts.")
_NAMED_BY = ("point", "dp_rank", "rank")
"""Keys by which a receipt's lists of tables are told apart, so that a plugin more does not shift the others."""


@receipt_app.command
def diff(first: Path, second: Path, /) -> int:
    """Print every value in which two receipts differ; exit 1 when there is one.

    Parameters
    ----------
    first
        A receipt as JSON: of ``--receipt``, or of ``GET /receipt``.
    second
        Another.
    """
    lines = table_differences(_read(first), _read(second))
    for line in lines:
        print(line)
    return 1 if lines else 0


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"receipt {str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict) or "schema_version" not in value:
        raise UsageError(f"{str(path)!r} is no receipt: it has no schema_version")
    return cast("dict[str, Any]", _by_name(value))


def _by_name(value: Any) -> Any:
    """``value`` with its lists of tables as tables, named by what tells their entries apart, else by place."""
    if isinstance(value, dict):
        return {str(key): _by_name(inner) for key, inner in cast("dict[str, Any]", value).items()}
    if not isinstance(value, list):
        return value
    entries: list[Any] = value
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        return entries
    name = next((key for key in _NAMED_BY if len({str(entry.get(key)) for entry in entries}) == len(entries)), None)
    return {
        str(place) if name is None else str(entry.get(name)): _by_name(entry) for place, entry in enumerate(entries)
    }
