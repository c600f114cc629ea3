"""Writes a package with one plugin of a point and one test, from the templates in the package data."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

import attrs
import jinja2

import crossdock
from crossdock.cli.flags import PATHS
from crossdock.errors import UsageError
from crossdock.hookapi import HOOK_API_VERSION
from crossdock.options import nearest
from crossdock.registry import installed


@attrs.frozen(kw_only=True)
class PointTemplate:
    """Types in the hooks of a point."""

    result: str
    result_module: str
    capabilities: str
    spec: str = ""
    """Type of the hook's second argument, empty where it has options only."""
    capabilities_module: str = "capability"
    """Module of ``crossdock.types`` that holds the capabilities."""


def _template(
    result: str, module: str, capabilities: str, spec: str = "", own_capabilities: bool = False
) -> PointTemplate:
    return PointTemplate(
        result=result,
        result_module=f"crossdock.types.{module}",
        capabilities=capabilities,
        spec=spec,
        capabilities_module=module if own_capabilities else "capability",
    )


TEMPLATES: Mapping[str, PointTemplate] = MappingProxyType(
    {
        "padding": _template("PaddingPolicy", "padding", "PaddingCapabilities"),
        "dispatcher": _template("Dispatcher", "dispatch", "DispatcherCapabilities", "DispatcherSpec", True),
        "experts": _template("Experts", "experts", "ExpertsCapabilities", "ExpertsSpec", True),
        "strategy": _template("Strategy", "strategy", "StrategyCapabilities", "", True),
        "expert_location": _template("Picker", "location", "PickerCapabilities", "PickerSpec", True),
        "eplb_algo": _template("EplbAlgo", "placement", "EplbAlgoCapabilities"),
        "rebalance_policy": _template("RebalancePolicy", "rebalance", "RebalancePolicyCapabilities"),
        "attention": _template("Attention", "attention", "AttentionCapabilities", "AttentionSpec", True),
        "model": _template("Model", "model", "ModelCapabilities", "ModelSpec"),
        "observer": _template("Observer", "observer", "ObserverCapabilities", "ObserverSpec"),
    }
)
"""Every point, with what its hooks take and give."""


def write_package(point: str, name: str, folder: Path | None = None) -> Path:
    """Writes the package and returns its folder.

    Raises:
        UsageError: no such point, a name that is no identifier, that of a package of crossdock or of an installed plugin of the point, or a
            folder that is not empty.
    """
    if point not in TEMPLATES:
        raise UsageError(
            f"no extension point {point!r}{nearest(point, tuple(TEMPLATES))}; there are: {', '.join(TEMPLATES)}"
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"plugin name {name!r}: use lower-case letters, digits and _, not a keyword of Python")
    package = f"crossdock_{name}"
    if package in _own_packages():
        raise UsageError(
            f"plugin name {name!r}: its package {package} would hide the one of crossdock; take another name"
        )
    _check_name_is_free(point, name)
    target = folder if folder is not None else Path(_distribution(name))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not an empty folder; name another one with --folder")
    values = _values(point, name)
    targets = {
        "pyproject.toml": "pyproject.toml.jinja",
        "README.md": "README.md.jinja",
        f"src/{package}/__init__.py": "init.py.jinja",
        f"src/{package}/{point}.py": f"{point}.py.jinja",
        **{f"src/{package}/{path}": template for path, template in _own_files(point).items()},
        f"tests/test_{name}.py": "test.py.jinja",
    }
    environment = _environment()
    for path, template in targets.items():
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(environment.get_template(template).render(values), encoding="utf-8")
    (target / f"src/{package}/py.typed").touch()
    return target


def _distribution(name: str) -> str:
    return f"crossdock-{name.replace('_', '-')}"


def _check_name_is_free(point: str, name: str) -> None:
    """A second plugin of a name stops both from loading; a package that is written anew may be installed already."""
    for plugin in installed(point):
        if plugin.name == name and plugin.distribution != _distribution(name):
            raise UsageError(
                f"{point} plugin {name!r} is installed already, by {plugin.distribution} {plugin.version}, and neither would be"
                " loaded beside the other; take another name"
            )


def _own_packages() -> frozenset[str]:
    """Modules that crossdock's own plugins are in."""
    return frozenset(entry.module.partition(".")[0] for entry in distribution("crossdock").entry_points)


def _own_files(point: str) -> Mapping[str, str]:
    """A model is chosen by its checkpoint, so it has a config to read in place of options."""
    if point == "model":
        return {
            "plugin.py": "model_plugin.py.jinja",
            "config.py": "model_config.py.jinja",
            "tiny_config.json": "tiny_config.json.jinja",
        }
    return {f"{name}.py": f"{name}.py.jinja" for name in ("plugin", "options", "capabilities")}


def _values(point: str, name: str) -> dict[str, object]:
    template = TEMPLATES[point]
    imports, from_capability = [template.result], ["Environment", "Refusal"]
    (from_capability if template.capabilities_module == "capability" else imports).append(template.capabilities)
    if template.spec:
        imports.append(template.spec)
    return {
        "point": point,
        "name": name,
        "table": f"observer.{name}" if point == "observer" else point,
        "distribution": _distribution(name),
        "package": f"crossdock_{name}",
        "class_name": "".join(part.capitalize() for part in name.split("_")),
        "crossdock_version": crossdock.__version__,
        "hook_api_version": HOOK_API_VERSION,
        "result": template.result,
        "type_imports": sorted(
            (
                f"from crossdock.types.capability import {', '.join(sorted(from_capability))}",
                f"from {template.result_module} import {', '.join(sorted(imports))}",
            )
        ),
        "capabilities": template.capabilities,
        "capabilities_head": _capabilities_head(point, template.capabilities),
        "signature": "options: Mapping[str, object]" + (f", spec: {template.spec}" if template.spec else ""),
        "has_spec": bool(template.spec),
        "flagged": tuple(PATHS),
    }


def _capabilities_head(point: str, capabilities: str) -> str:
    """The head of the hook, broken as a formatter would at 120 columns."""
    arguments = "options: Mapping[str, object], env: Environment"
    head = f"def {point}_capabilities({arguments}) -> {capabilities} | Refusal | None:"
    if len(head) <= 120:
        return head
    return f"def {point}_capabilities(\n    {arguments}\n) -> {capabilities} | Refusal | None:"


def _environment() -> jinja2.Environment:
    def load(name: str) -> str:
        return files("crossdock").joinpath("templates", name).read_text(encoding="utf-8")

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
