"""Writes a package with one plugin of a point and one test, from the templates in the package data."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
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
from crossdock.points import POINTS


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
        "observer": _template("Observer", "observer", "ObserverCapabilities", "ObserverSpec"),
    }
)
"""Points that a package can be written for; an attention backend or a model starts as a copy of a first-party one."""


def write_package(point: str, name: str, folder: Path | None = None) -> Path:
    """Writes the package and returns its folder.

    Raises:
        UsageError: no such point, a name that is no identifier, or a folder that is not empty.
    """
    if point not in TEMPLATES:
        if point in POINTS:
            raise UsageError(
                f"there is no template for {point}; copy one of the first-party {point} plugins, they are a page or two each"
            )
        raise UsageError(
            f"no extension point {point!r}{nearest(point, tuple(TEMPLATES))}; there are: {', '.join(TEMPLATES)}"
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"plugin name {name!r}: use lower-case letters, digits and _, not a keyword of Python")
    target = folder if folder is not None else Path(f"crossdock-{name.replace('_', '-')}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists and is not an empty folder; name another one with --folder")
    values = _values(point, name)
    package = values["package"]
    targets = {
        "pyproject.toml": "pyproject.toml.jinja",
        "README.md": "README.md.jinja",
        f"src/{package}/__init__.py": "init.py.jinja",
        f"src/{package}/plugin.py": "plugin.py.jinja",
        f"src/{package}/options.py": "options.py.jinja",
        f"src/{package}/capabilities.py": "capabilities.py.jinja",
        f"src/{package}/{point}.py": f"{point}.py.jinja",
        f"tests/test_{name}.py": "test.py.jinja",
    }
    environment = _environment()
    for path, template in targets.items():
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(environment.get_template(template).render(values), encoding="utf-8")
    (target / f"src/{package}/py.typed").touch()
    return target


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
        "distribution": f"crossdock-{name.replace('_', '-')}",
        "package": f"crossdock_{name}",
        "class_name": "".join(part.capitalize() for part in name.split("_")),
        "crossdock_version": crossdock.__version__,
        "hook_api_version": HOOK_API_VERSION,
        "result": template.result,
        "result_module": template.result_module,
        "result_imports": ", ".join(sorted(imports)),
        "capabilities": template.capabilities,
        "capability_imports": ", ".join(sorted(from_capability)),
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
