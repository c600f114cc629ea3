"""The registry: six errors in order, nothing left behind, only the selected name imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from crossdock.errors import (
    DuplicatePlugin,
    NoHookImplemented,
    PluginDeclined,
    PluginError,
    PluginImportFailed,
    UnknownHook,
    UnknownPlugin,
    WrongHookApiVersion,
    WrongPluginResult,
)
from crossdock.hookapi import HOOK_API_VERSION
from crossdock.plugin_call import build, call_hook
from crossdock.points import POINTS
from crossdock.registry import installed, load_plugin
from crossdock.testing.fake_distribution import write_distribution
from crossdock.types.padding import PaddingPolicy

Install = Callable[..., None]

GOOD = """
from crossdock.hookapi import hookimpl
HOOK_API_VERSION = 1

class Policy:
    def choose(self, counts): return None
    def captured_mode(self): return None

@hookimpl
def make_padding(options):
    return Policy()
"""
HOOKLESS = "HOOK_API_VERSION = 1\n"


def install_padding(install: Install, source: str, name: str = "mine", distribution: str = "mine-dist") -> None:
    module = f"{distribution.replace('-', '_')}_{name}.plugin"
    install(distribution, entry_points={"crossdock.padding": {name: module}}, modules={module: source})


def test_a_name_that_is_not_installed_is_answered_with_the_installed_names_and_the_nearest(install: Install) -> None:
    install("d", entry_points={"crossdock.dispatcher": {"deepep": "d.plugin"}}, modules={"d.plugin": ""})
    for asked in ("depep", "deep_ep", "DeepEP", "deep-ep"):
        with pytest.raises(UnknownPlugin) as error:
            load_plugin("dispatcher", asked)
        assert f"no dispatcher plugin {asked!r} (did you mean 'deepep'?)" in str(error.value)
        assert "allgatherv, alltoallv, deepep" in str(error.value)


def test_a_point_that_does_not_exist_is_answered_with_the_points() -> None:
    with pytest.raises(UnknownPlugin, match="did you mean 'dispatcher'"):
        load_plugin("dispatchers", "allgatherv")


def test_a_name_provided_twice_names_both_distributions_and_loads_nothing(install: Install) -> None:
    install_padding(install, GOOD, distribution="first-dist")
    install_padding(install, GOOD, distribution="second-dist")
    with pytest.raises(DuplicatePlugin, match=r"first-dist 1\.0 and second-dist 1\.0"):
        load_plugin("padding", "mine")
    assert "first_dist_mine" not in sys.modules
    assert "second_dist_mine" not in sys.modules
    assert [plugin.distribution for plugin in installed("padding") if plugin.name == "mine"] == [
        "first-dist",
        "second-dist",
    ]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import a_module_that_nobody_has", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("raise ImportError('no driver')", "ImportError: no driver"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    ],
)
def test_an_import_that_fails_is_told_with_its_cause(install: Install, source: str, told: str) -> None:
    install_padding(install, source)
    with pytest.raises(PluginImportFailed) as error:
        load_plugin("padding", "mine")
    assert told in str(error.value)
    assert "padding plugin 'mine' (mine-dist 1.0)" in str(error.value)
    assert error.value.__cause__ is not None


def test_a_failed_import_names_the_extra_that_installs_what_is_missing(install: Install) -> None:
    install(
        "gpu-dist",
        entry_points={"crossdock.padding": {"mine": "gpu_dist.plugin"}},
        modules={"gpu_dist.plugin": "import nobodys_deep_ep"},
        requires=["numpy", "repackaged-nobodys-deep-ep==1.0; extra == 'gpu'"],
    )
    with pytest.raises(PluginImportFailed, match=r"pip install 'gpu-dist\[gpu\]'"):
        load_plugin("padding", "mine")


def test_a_heavy_import_inside_the_hook_fails_with_the_same_advice(install: Install) -> None:
    install(
        "gpu-dist",
        entry_points={"crossdock.padding": {"mine": "gpu_dist.plugin"}},
        modules={"gpu_dist.plugin": GOOD.replace("return Policy()", "import nobodys_deep_ep")},
        requires=["nobodys-deep-ep; extra == 'gpu'"],
    )
    plugin = load_plugin("padding", "mine")
    with pytest.raises(PluginImportFailed, match=r"gpu-dist\[gpu\]"):
        call_hook(plugin, "make_padding", options={})


def test_an_entry_point_whose_attribute_is_missing_or_no_module_is_a_failed_import(install: Install) -> None:
    for number, attribute in enumerate(("absent", "make_padding")):
        install(
            f"dist{number}",
            entry_points={"crossdock.padding": {f"mine{number}": f"dist{number}.plugin:{attribute}"}},
            modules={f"dist{number}.plugin": GOOD},
        )
        with pytest.raises(PluginImportFailed):
            load_plugin("padding", f"mine{number}")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (GOOD.replace("VERSION = 1", "VERSION = 7"), "is written for hook API 7"),
        (GOOD.replace("HOOK_API_VERSION = 1", ""), "states no HOOK_API_VERSION"),
        (GOOD.replace("VERSION = 1", "VERSION = '1'"), "is written for hook API '1'"),
    ],
)
def test_another_hook_api_version_names_both(install: Install, source: str, told: str) -> None:
    install_padding(install, source)
    with pytest.raises(WrongHookApiVersion) as error:
        load_plugin("padding", "mine")
    assert told in str(error.value)
    assert f"this is hook API {HOOK_API_VERSION}" in str(error.value)


def test_a_misspelt_hook_is_refused_and_the_known_ones_are_named(install: Install) -> None:
    install_padding(install, GOOD + "\n@hookimpl\ndef make_paddin(options):\n    return None\n")
    with pytest.raises(UnknownHook, match=r"\(make_padding, padding_capabilities\).*make_paddin"):
        load_plugin("padding", "mine")


def test_a_hook_that_is_marked_optional_may_be_unknown(install: Install) -> None:
    install_padding(install, GOOD + "\n@hookimpl(optionalhook=True)\ndef make_later(options):\n    return None\n")
    assert load_plugin("padding", "mine").name == "mine"


def test_an_argument_that_the_spec_does_not_have_is_refused(install: Install) -> None:
    install_padding(install, GOOD.replace("make_padding(options)", "make_padding(options, colour)"))
    with pytest.raises(UnknownHook, match="colour"):
        load_plugin("padding", "mine")


@pytest.mark.parametrize("source", [HOOKLESS, GOOD.replace("@hookimpl\n", "")], ids=["no function", "not marked"])
def test_a_plugin_without_the_points_hook_is_refused(install: Install, source: str) -> None:
    install_padding(install, source)
    with pytest.raises(NoHookImplemented, match=r"implements no make_padding.*hookimpl"):
        load_plugin("padding", "mine")


def test_the_version_is_checked_before_the_hooks(install: Install) -> None:
    install_padding(install, GOOD.replace("VERSION = 1", "VERSION = 2").replace("make_padding", "make_paddin"))
    with pytest.raises(WrongHookApiVersion):
        load_plugin("padding", "mine")


def test_a_plugin_that_fails_a_check_leaves_no_hook_active(install: Install) -> None:
    install_padding(install, GOOD + "\n@hookimpl\ndef make_paddin(options):\n    return None\n", name="half")
    install_padding(install, GOOD, name="whole", distribution="whole-dist")
    with pytest.raises(UnknownHook):
        load_plugin("padding", "half")
    plugin = load_plugin("padding", "whole")
    assert len(plugin.relay.make_padding.get_hookimpls()) == 1


def test_loading_twice_imports_once_and_gives_the_same_plugin(install: Install) -> None:
    counter = "import builtins\nbuiltins.loads_of_mine = getattr(builtins, 'loads_of_mine', 0) + 1\n"
    install_padding(install, counter + GOOD)
    first, second = load_plugin("padding", "mine"), load_plugin("padding", "mine")
    import builtins

    assert vars(builtins).pop("loads_of_mine") == 1
    assert (first.module_name, first.version, first.api) == (second.module_name, second.version, second.api)
    assert len(second.relay.make_padding.get_hookimpls()) == 1


def test_only_the_selected_name_is_imported(install: Install) -> None:
    install_padding(install, "raise SystemExit(1)", name="broken", distribution="broken-dist")
    install_padding(install, GOOD, name="good", distribution="good-dist")
    assert load_plugin("padding", "good").distribution == "good-dist"
    assert {plugin.name for plugin in installed("padding")} >= {"broken", "good"}
    assert "broken_dist_broken" not in sys.modules


def test_several_names_may_point_to_one_module() -> None:
    two, three = load_plugin("model", "deepseek_v2"), load_plugin("model", "deepseek_v3")
    assert two.module_name == three.module_name
    assert (two.name, three.name) == ("deepseek_v2", "deepseek_v3")


def test_the_name_decides_whatever_the_order_of_installation(install: Install) -> None:
    for name in ("zeta", "alpha", "middle"):
        install_padding(install, GOOD.replace("Policy", f"Policy_{name}"), name=name, distribution=f"{name}-dist")
    for name in ("middle", "zeta", "alpha"):
        made = build(load_plugin("padding", name), PaddingPolicy, options={})
        assert type(made).__name__ == f"Policy_{name}"


def test_a_declining_plugin_is_an_error_that_names_the_others(install: Install) -> None:
    install_padding(install, GOOD.replace("return Policy()", "return None"))
    with pytest.raises(PluginDeclined, match=r"make_padding returned None.*cost"):
        build(load_plugin("padding", "mine"), PaddingPolicy, options={})


def test_an_object_without_the_protocols_methods_is_refused(install: Install) -> None:
    install_padding(install, GOOD.replace("def captured_mode", "def captured"))
    with pytest.raises(WrongPluginResult, match="returned a Policy without captured_mode"):
        build(load_plugin("padding", "mine"), PaddingPolicy, options={})


def test_every_point_has_an_error_for_an_unknown_name() -> None:
    for point in POINTS:
        with pytest.raises(PluginError, match=f"no {point} plugin 'nobodys'"):
            load_plugin(point, "nobodys")


PROCESSES = """
import json, multiprocessing, sys
from crossdock.registry import installed, load_plugin

def names(queue=None):
    found = [[load_plugin(p, "mine").module_name, [x.name for x in installed(p)]] for p in ("dispatcher", "model")]
    queue.put(found) if queue is not None else None
    return found

if __name__ == "__main__":
    everything = [names()]
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        for rank in range(2):
            queue = context.Queue()
            process = context.Process(target=names, args=(queue,))
            process.start()
            everything.append(queue.get(timeout=60))
            process.join(60)
    print(json.dumps(everything))
"""


def test_forked_and_spawned_processes_load_the_same_plugins_in_the_same_order(tmp_path: Path) -> None:
    for point in ("dispatcher", "model"):
        source = GOOD.replace("make_padding(options)", f"make_{point}(spec)")
        write_distribution(
            tmp_path,
            f"third-{point}",
            entry_points={f"crossdock.{point}": {"mine": f"third_{point}.plugin"}},
            modules={f"third_{point}.plugin": source},
        )
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env={"PYTHONPATH": str(tmp_path)}
    )
    assert ran.returncode == 0, ran.stderr
    everything = json.loads(ran.stdout)
    assert len(everything) == 5
    assert all(found == everything[0] for found in everything)


@pytest.mark.parametrize("order", ["wrapper first", "wrapper last", "wrapper in the middle"])
def test_a_wrapper_is_outermost_whatever_the_order_of_registration(order: str) -> None:
    """What the oldest allowed pluggy must do; older ones put a wrapper behind a plain implementation marked trylast."""
    import pluggy

    spec, impl = pluggy.HookspecMarker("order"), pluggy.HookimplMarker("order")
    called: list[str] = []

    class Spec:
        @spec
        def told(self) -> None: ...

    class Wrapper:
        @impl(wrapper=True, tryfirst=True)
        def told(self):
            called.append("wrapper")
            return (yield)

    class Plain:
        @impl
        def told(self) -> None:
            called.append("plain")

    class Last:
        @impl(trylast=True)
        def told(self) -> None:
            called.append("last")

    wrapper, others = Wrapper(), [Plain(), Last()]
    position = {"wrapper first": 0, "wrapper in the middle": 1, "wrapper last": 2}[order]
    manager = pluggy.PluginManager("order")
    manager.add_hookspecs(Spec)
    for plugin in [*others[:position], wrapper, *others[position:]]:
        manager.register(plugin)
    manager.hook.told()
    assert called == ["wrapper", "plain", "last"]
