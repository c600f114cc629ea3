"""``crossdock config``: show, validate and compare configurations."""

from __future__ import annotations

from pathlib import Path

import attrs
from cyclopts import App

from crossdock.cli.flags import ConfigFlags
from crossdock.config_load import file_layer, load_config
from crossdock.config_render import config_differences, render_config
from crossdock.errors import UsageError
from crossdock.option_defaults import with_plugin_defaults
from crossdock.rank_plan import plan_rank

config_app = App(name="config", help="Show, validate and compare configurations.")

_NO_FLAGS = ConfigFlags()


@config_app.command
def show(file: Path | None = None, /, *, resolved: bool = False, flags: ConfigFlags = _NO_FLAGS) -> None:
    """Print the configuration as TOML that can be read back.

    Parameters
    ----------
    file
        TOML file, as ``--config``.
    resolved
        Every value, defaults (those of the chosen plugins too) and derived widths included, with a comment where it came from.
    """
    loaded = _with_file(flags, file).load()
    if resolved:
        loaded = attrs.evolve(loaded, config=with_plugin_defaults(loaded.config))
    print(render_config(loaded, resolved=resolved), end="")


@config_app.command
def validate(file: Path | None = None, /, *, flags: ConfigFlags = _NO_FLAGS) -> None:
    """Check values, checkpoint facts, plugins and their options, and whether all of it works together; no rank is started.

    Parameters
    ----------
    file
        TOML file, as ``--config``.
    """
    plan = plan_rank(_with_file(flags, file).load().config, 0)
    print(f"checkpoint: {plan.folder} ({plan.info.model_type}, {plan.info.num_layers} layers, {plan.dtype})")
    if plan.num_physical_experts:
        print(f"experts: {plan.num_physical_experts} slots over moe_ep_size = {plan.sizes.moe_ep_size} ranks")
    for line in plan.selection.lines():
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


def _with_file(flags: ConfigFlags, file: Path | None) -> ConfigFlags:
    """Raises ``UsageError`` when a file is given twice."""
    if file is None:
        return flags
    if flags.config is not None:
        raise UsageError(f"two configurations, {str(file)!r} and --config {str(flags.config)!r}; give one")
    return attrs.evolve(flags, config=file)
