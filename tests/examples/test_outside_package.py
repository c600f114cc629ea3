"""A package from outside: installed into an environment of its own, discovered, chosen by a config, conforming."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from crossdock.registry import installed
from crossdock.testing.outside_environment import OutsideEnvironment

EXAMPLE = Path(__file__).parents[2] / "examples" / "20_outside_package"
PLUGINS = {"dispatcher": "gather_scatter", "padding": "nearly_equal", "strategy": "by_layer"}

pytestmark = pytest.mark.xdist_group("outside_package")


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> OutsideEnvironment:
    environment = OutsideEnvironment.create(tmp_path_factory.mktemp("outside") / "env")
    environment.install(EXAMPLE)
    return environment


def test_it_is_discovered_there_and_not_here(outside: OutsideEnvironment) -> None:
    rows = json.loads(outside.run(["-m", "crossdock", "plugins", "list", "--format", "json"]).stdout)
    mine = {row["point"]: row for row in rows if row["distribution"] == "crossdock-outside"}
    assert {point: row["name"] for point, row in mine.items()} == PLUGINS
    assert all((row["version"], row["api"]) == ("1.0.0", 1) for row in mine.values())
    assert {"alltoallv", "allgatherv"} <= {row["name"] for row in rows}
    for point, name in PLUGINS.items():
        assert name not in {plugin.name for plugin in installed(point)}


def test_it_is_chosen_by_a_config_and_its_options_are_read(outside: OutsideEnvironment) -> None:
    words = ["-m", "crossdock", "config", "validate", "--config", str(EXAMPLE / "config.toml")]
    out = outside.run(words).stdout
    for point, name in PLUGINS.items():
        assert f"{point}: {name} (crossdock-outside 1.0.0" in out
    refused = outside.run([*words, "--set", "padding.tolerance=-1"], check=False)
    assert refused.returncode == 2
    assert "[padding] tolerance: tolerance must be at least 0.0, found -1" in refused.stderr


def test_it_passes_the_conformance_kit(outside: OutsideEnvironment) -> None:
    out = outside.run(["-m", "crossdock", "plugins", "check", "crossdock-outside"], timeout_s=300).stdout
    closing = out.splitlines()[-1]
    assert re.fullmatch(r"\d+ passed, 0 failed, [01] not checked", closing), (
        out
    )  # it has no capacity that could be exceeded
    assert out.count("dispatcher gather_scatter") >= 10


def test_its_own_tests_pass(outside: OutsideEnvironment) -> None:
    out = outside.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests"), "-k", "padding or strategy"],
        timeout_s=300,
    ).stdout
    assert re.search(r"\d+ passed", out), out


def test_two_ranks_with_its_plugins_give_the_logits_of_one_process(outside: OutsideEnvironment) -> None:
    out = outside.run([str(EXAMPLE / "run.py")], timeout_s=300).stdout
    assert "3 prompts on 2 ranks with gather_scatter and nearly_equal" in out
    match = re.search(r"largest difference: (\S+) of the largest logit", out)
    assert match is not None, out
    assert float(match[1]) <= 1e-5


@pytest.mark.parametrize("point", ["dispatcher", "padding", "strategy"])
def test_a_package_written_by_plugins_new_passes_as_written(
    point: str, outside: OutsideEnvironment, tmp_path: Path
) -> None:
    folder = tmp_path / point
    outside.run(["-m", "crossdock", "plugins", "new", point, f"fresh_{point}", "--folder", str(folder)])
    outside.install(folder)
    out = outside.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)], timeout_s=300).stdout
    assert re.search(r"\d+ passed", out), out
    assert "failed" not in out
