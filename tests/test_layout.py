"""The repository watches itself: layout, plugins, hooks, names, docs, README and examples."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import crossdock
import pytest
from crossdock.points import POINTS, SPECS, hook_names
from crossdock.registry import load_plugin
from crossdock.testing.common_conformance import signature_text

ROOT = Path(__file__).parents[1]
FRAMEWORK = ROOT / "framework" / "crossdock"
KINDS = {
    "dispatchers": ("crossdock_dispatchers", {"dispatcher": ""}),
    "eplb_algos": (
        "crossdock_eplb_algos",
        {"eplb_algo": "eplb_algo", "expert_location": "expert_location", "rebalance_policy": "rebalance_policy"},
    ),
    "models": ("crossdock_models", {"model": "model", "experts": "experts", "strategy": "strategy"}),
    "attention": ("crossdock_attention", {"attention": "attention", "padding": "padding"}),
}
"""Kind -> (package, {point: folder in the package})."""
TOP_LEVEL = {
    "pyproject.toml", "README.md", "framework", "plugins", "tests", "examples", "docs", "Makefile", "constraints.txt",
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE",
}  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENTRY_POINTS = [
    (group.removeprefix("crossdock."), name, value)
    for group, points in PROJECT["project"]["entry-points"].items()
    for name, value in points.items()
]
MAX_LINES, MAX_CORE_LINES, MAX_FUNCTION_LINES = 400, 250, 80


def tracked(*patterns: str) -> list[Path]:
    """Files under version control; a build or a scratch folder is nobody's business."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def plugin_folders() -> Iterator[tuple[str, str, Path]]:
    """(point, module of plugin.py, folder) of every first-party plugin folder."""
    for kind, (package, points) in KINDS.items():
        for point, below in points.items():
            for folder in sorted((ROOT / "plugins" / kind / package / below).glob("*/plugin.py")):
                module = ".".join([package, *([below] if below else []), folder.parent.name, "plugin"])
                yield point, module, folder.parent
    for file in sorted((FRAMEWORK / "observe").glob("*/plugin.py")):
        yield "observer", f"crossdock.observe.{file.parent.name}.plugin", file.parent


def python_files() -> list[Path]:
    return [path for path in tracked("framework/*.py", "plugins/*.py") if path.suffix == ".py"]


def test_the_top_level_is_fixed() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in found if not name.startswith(".")} <= TOP_LEVEL


def test_every_plugin_folder_has_an_entry_point_and_every_entry_point_a_folder() -> None:
    folders = {(point, module) for point, module, _ in plugin_folders()}
    entries = {(point, value) for point, _, value in ENTRY_POINTS}
    assert folders == entries


def test_a_plugin_is_named_like_its_folder() -> None:
    for point, name, value in ENTRY_POINTS:
        folder = value.split(".")[-2].removesuffix("_")
        assert folder == name or (point == "model" and name.startswith(folder)), (point, name, value)


def test_every_plugin_folder_has_the_same_file_names_and_a_test_folder() -> None:
    missing: list[str] = []
    for point, _, folder in plugin_folders():
        missing += [f"{folder}/{name}" for name in ("__init__.py", "plugin.py") if not (folder / name).exists()]
        if point != "model" and not (folder / "options.py").exists():
            missing.append(f"{folder}/options.py")
    assert missing == []


def test_every_plugin_has_a_test() -> None:
    tests = "\n".join(str(path.relative_to(ROOT)) for path in tracked("tests/*.py"))
    for point, _, folder in plugin_folders():
        kind = folder.relative_to(ROOT).parts[1] if point != "observer" else "observe"
        name = folder.name.removesuffix("_")
        assert re.search(rf"tests/(plugins|framework)/{kind}/.*{name}", tests), f"no test names {point} {name}"


@pytest.mark.parametrize(("point", "name", "value"), ENTRY_POINTS)
def test_every_hook_has_the_signature_of_its_spec_and_a_docstring(point: str, name: str, value: str) -> None:
    module = importlib.import_module(load_plugin(point, name).module_name)
    implemented = [hook for hook in hook_names(point) if hasattr(module, hook)]
    assert f"make_{point}" in implemented
    for hook in implemented:
        function = getattr(module, hook)
        assert signature_text(function) == signature_text(getattr(SPECS[point], hook)), hook
        assert function.__doc__, f"{value}.{hook} has no docstring"


def test_every_point_has_one_spec_module_with_complete_docstrings() -> None:
    assert {path.stem for path in (FRAMEWORK / "specs").glob("*.py")} - {"__init__"} == set(POINTS)
    for point in POINTS:
        assert hook_names(point)[0] == f"make_{point}" or point == "model"
        for hook in hook_names(point):
            doc = getattr(SPECS[point], hook).__doc__ or ""
            assert doc.startswith("First result"), hook
            for part in ("Args:", "Returns:", "Declining:"):
                assert part in doc, f"{hook} does not say {part}"


def test_every_hook_plugin_and_error_is_in_the_docs() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in tracked("docs/*.md", "README.md"))
    for point in POINTS:
        for hook in hook_names(point):
            assert f"`{hook}`" in text, f"hook {hook} is not in the docs"
    for point, name, _ in ENTRY_POINTS:
        assert f"`{name}`" in text, f"{point} plugin {name} is not in the docs"
    import crossdock.errors as errors

    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.CrossdockError):
            assert f"`{name}`" in text, f"error {name} is not in the docs"
            assert name in (errors.__doc__ or ""), f"error {name} is not drawn in the tree"


def test_the_public_names_are_pinned() -> None:
    assert crossdock.__all__ == ["__version__"]
    assert crossdock.__version__ == PROJECT["project"]["version"]


def test_init_files_hold_a_docstring_only() -> None:
    for path in python_files():
        if path.name != "__init__.py" or path == FRAMEWORK / "__init__.py":
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert len(body) <= 1, path
        assert all(isinstance(node, ast.Expr) for node in body), path


def test_files_and_functions_stay_small() -> None:
    too_long: list[str] = []
    for path in python_files():
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        limit = (
            MAX_CORE_LINES
            if path.is_relative_to(FRAMEWORK) and not path.is_relative_to(FRAMEWORK / "testing")
            else MAX_LINES
        )
        if lines > limit:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {limit}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long.append(f"{path.relative_to(ROOT)}: {node.name} has {length} lines")
    assert too_long == []


def test_no_file_is_called_utils_and_none_holds_a_stub() -> None:
    wrong: list[str] = []
    for path in python_files():
        if path.stem in ("utils", "helpers", "util", "misc"):
            wrong.append(str(path))
        text = path.read_text(encoding="utf-8")
        if re.search(r"\bNotImplementedError\b|\bFIXME\b|\bXXX\b", text) or re.search(r"TODO(?!\(#\d+\))", text):
            wrong.append(f"{path}: stub or unnumbered TODO")
    assert wrong == []


def test_the_core_imports_triton_in_its_triton_files_only() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if path.is_relative_to(FRAMEWORK)
        and not (path.parent == FRAMEWORK / "ops" and path.stem.endswith("_triton"))
        and re.search(r"^\s*(import|from) triton\b", path.read_text(encoding="utf-8"), re.M)
    ]
    assert wrong == []


def test_public_names_of_the_core_have_docstrings() -> None:
    """Not asked for: the fields of the OpenAI protocol, and checks, whose names are sentences."""
    missing: list[str] = []
    for path in python_files():
        if not path.is_relative_to(FRAMEWORK) or path.is_relative_to(FRAMEWORK / "serving" / "protocol"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            missing.append(str(path.relative_to(ROOT)))
        for node in tree.body:
            is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_named and not node.name.startswith(("_", "check_")) and not ast.get_docstring(node):
                missing.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert missing == []


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", text, re.S)
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_every_readme_command_exists() -> None:
    """Make targets are in the Makefile, sub-commands in the command line, flags in their help, files in the tree."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in readme_commands():
        words = command.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.M), command
        elif words[0] == "crossdock":
            flags = [word.split("=")[0] for word in words if word.startswith("--")]
            verbs = [word for word in words[1:3] if re.fullmatch(r"[a-z]+", word)]
            shown = subprocess.run(
                [sys.executable, "-m", "crossdock", *verbs[: 2 if verbs[0] in ("plugins", "config", "bench") else 1], "--help"],
                capture_output=True, text=True, timeout=60, check=True,
            ).stdout  # fmt: skip
            for flag in flags:
                assert flag in shown, f"{command}: {flag} is not in the help"
        for word in words:
            if word.startswith(("examples/", "./examples/", "docs/")):
                assert (ROOT / word).exists(), command


def test_every_example_has_a_readme_and_a_script() -> None:
    for folder in sorted((ROOT / "examples").iterdir()):
        if folder.is_dir():
            assert re.fullmatch(r"\d\d_[a-z0-9_]+", folder.name)
            assert {"README.md", "run.py", "config.toml"} <= {path.name for path in folder.iterdir()}, folder


def test_every_example_is_run_by_a_test() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in tracked("tests/examples/*.py"))
    for folder in sorted((ROOT / "examples").iterdir()):
        if folder.is_dir():
            assert folder.name in tests, folder
