"""``crossdock config``: show, validate and compare configurations."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from crossdock.cli.flags import ConfigFlags
from crossdock.compatibility import check_selection
from crossdock.config_load import file_layer, load_config
from crossdock.config_render import config_differences, render_config

config_app = App(name="config", help="Show, validate and compare configurations.")

_NO_FLAGS = ConfigFlags()


@config_app.command
def show(*, resolved: bool = False, flags: ConfigFlags = _NO_FLAGS) -> None:
    """Print the configuration as TOML that can be read back.

    Parameters
    ----------
    resolved
        Every value, defaults and derived widths included, with a comment where it came from.
    """
    print(render_config(flags.load(), resolved=resolved), end="")


@config_app.command
def validate(*, flags: ConfigFlags = _NO_FLAGS) -> None:
    """Check values, plugins and their options, and whether the selection works together; no rank is started."""
    loaded = flags.load()
    selection = check_selection(loaded.config)
    for line in selection.lines():
        print(line)


@config_app.command
def diff(first: Path, second: Path, /) -> int:
    """Print every value in which two files differ, defaults included; exit 1 when there is one.

    Parameters
    ----------
    first
        A TOML file.
    second
        Another.
    """
    left, right = (load_config([file_layer(path)]).config for path in (first, second))
    differences = config_differences(left, right)
    for line in differences:
        print(line)
    return 1 if differences else 0
