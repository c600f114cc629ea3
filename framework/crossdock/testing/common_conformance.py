"""What must hold for a plugin of any point: cheap import, hooks as specified, unknown options refused."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from crossdock.errors import ConfigValueError
from crossdock.groups import resolve_sizes
from crossdock.plugin_call import call_hook
from crossdock.points import SPECS, hook_names
from crossdock.registry import load_plugin
from crossdock.testing.conformance import NotCheckable, PluginCase, check_of
from crossdock.types.capability import Environment

HEAVY_MODULES = ("torch", "triton", "transformers", "deep_ep", "deep_gemm", "aiohttp", "zmq", "scipy")
"""Modules that a ``plugin.py`` must not import: they belong inside the hook."""
UNKNOWN_OPTION = "an_option_that_nobody_has"


def signature_text(function: Callable[..., Any]) -> str:
    """Parameters and return annotation as written, so that nothing needs to be imported to compare them."""
    signature = inspect.signature(function)
    parameters = [f"{name}: {parameter.annotation}" for name, parameter in signature.parameters.items()]
    return f"({', '.join(parameters)}) -> {signature.return_annotation}"


def check_importing_it_loads_nothing_heavy(case: PluginCase) -> None:
    module = load_plugin(case.point, case.name).module_name
    code = (
        "import importlib, json, sys; importlib.import_module(sys.argv[1]); "
        "print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, module, *HEAVY_MODULES], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(ran.stdout) == [], f"importing {module} loads {ran.stdout.strip()}; import it inside the hook"


def check_its_hooks_have_the_signature_of_the_spec(case: PluginCase) -> None:
    plugin = load_plugin(case.point, case.name)
    module = sys.modules[plugin.module_name]
    for hook in hook_names(case.point):
        implementation = getattr(module, hook, None)
        if implementation is None:
            continue
        wanted, found = signature_text(getattr(SPECS[case.point], hook)), signature_text(implementation)
        assert found == wanted, f"{hook} is {found}, the spec says {wanted}"


def check_an_unknown_option_is_refused_by_name(case: PluginCase) -> None:
    if case.point == "model":
        raise NotCheckable("models have no options")
    plugin = load_plugin(case.point, case.name)
    env = Environment(device="cpu", sizes=resolve_sizes(ranks=1), dtype="float32")
    message = ""
    try:
        call_hook(plugin, f"{case.point}_capabilities", options={**case.options, UNKNOWN_OPTION: 1}, env=env)
    except ConfigValueError as error:
        message = str(error)
    assert message, (
        f"{case.point}_capabilities took the unknown option {UNKNOWN_OPTION!r}; read options with read_options"
    )
    assert UNKNOWN_OPTION in message, f"the message does not name the key: {message}"


CHECKS = (
    check_of(check_importing_it_loads_nothing_heavy),
    check_of(check_its_hooks_have_the_signature_of_the_spec),
    check_of(check_an_unknown_option_is_refused_by_name),
)
