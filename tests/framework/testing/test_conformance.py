"""The frame of the conformance kit: a check that fails, cannot be made, or breaks is told apart; nothing passes by accident."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from crossdock.errors import PluginError
from crossdock.points import POINTS
from crossdock.registry import installed
from crossdock.testing.conformance import NotCheckable, Outcome, PluginCase, check_of, run_check, run_suite
from crossdock.testing.fake_distribution import write_distribution
from crossdock.testing.suites import SUITES, check_plugins, checks_of
from crossdock.testing.world import RankPool

PADDING = """
from crossdock.hookapi import hookimpl
from crossdock.types.step import PaddingMode
HOOK_API_VERSION = 1

class Policy:
    asked = 0
    def choose(self, counts):
        self.asked += 1
        return list(PaddingMode)[self.asked % 2]
    def captured_mode(self):
        return "max_len"

@hookimpl
def make_padding(options):
    import torch
    return Policy()
"""


def no_pool(world_size: int) -> RankPool:
    raise AssertionError(f"nobody needs {world_size} ranks here")


def case(**fields: object) -> PluginCase:
    values: dict[str, object] = {"point": "padding", "name": "cost", "pool_of": no_pool, **fields}
    return PluginCase(**values)  # type: ignore[arg-type]


def check_it_holds(case: PluginCase) -> None:
    assert case.name == "cost"


def check_it_fails(case: PluginCase) -> None:
    assert case.name == "other", "the name is wrong"


def check_it_breaks(case: PluginCase) -> None:
    raise KeyError("lost")


def check_it_cannot_be_made(case: PluginCase) -> None:
    raise NotCheckable("no GPU")


def test_each_outcome_is_told_with_its_reason() -> None:
    checks = [check_of(check) for check in (check_it_holds, check_it_fails, check_it_breaks, check_it_cannot_be_made)]
    results = run_suite(checks, case())
    assert [result.check for result in results] == ["it_holds", "it_fails", "it_breaks", "it_cannot_be_made"]
    assert [result.outcome for result in results] == [
        Outcome.PASSED,
        Outcome.FAILED,
        Outcome.FAILED,
        Outcome.NOT_CHECKED,
    ]
    assert "the name is wrong" in results[1].message
    assert "KeyError" in results[2].message
    assert results[3].message == "no GPU"


def test_every_point_has_checks_of_its_own() -> None:
    assert set(SUITES) == set(POINTS)
    for point in POINTS:
        own = checks_of(point)
        assert len(own) > 3, point
        assert len({check.name for check in own}) == len(own)


def test_a_policy_that_remembers_and_answers_with_a_string_fails_the_kit(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathlib import Path

    site = Path(str(tmp_path))
    write_distribution(
        site, "bad-padding", entry_points={"crossdock.padding": {"bad": "bad.plugin"}}, modules={"bad.plugin": PADDING}
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    lines: list[str] = []
    plugins = [plugin for plugin in installed("padding") if plugin.name == "bad"]
    results = {result.check: result.outcome for result in check_plugins(plugins, report=lines.append)}
    assert results["captured_steps_have_one_padding_mode"] is Outcome.FAILED
    assert results["the_answer_depends_on_the_counts_alone"] is Outcome.FAILED
    assert results["an_unknown_option_is_refused_by_name"] is Outcome.FAILED
    assert results["importing_it_loads_nothing_heavy"] is Outcome.PASSED
    assert any(line.startswith("failed      padding bad: captured steps") for line in lines)


def test_a_plugin_that_cannot_be_loaded_fails_every_check() -> None:
    results = [run_check(check, case(name="nobodys")) for check in checks_of("padding")]
    assert {result.outcome for result in results} == {Outcome.FAILED}
    assert all(PluginError.__name__ in result.message or "nobodys" in result.message for result in results)


def test_a_suite_never_raises() -> None:
    broken: Callable[[PluginCase], None] = check_it_breaks
    assert run_check(check_of(broken), case()).outcome is Outcome.FAILED


def test_a_suite_that_runs_on_a_cpu_is_not_checked_on_a_gpu() -> None:
    own = checks_of("padding")[len(checks_of("nobodys_point")) :]
    results = [run_check(check, case(name="cost", device="cuda")) for check in own]
    assert results
    assert {result.outcome for result in results} == {Outcome.NOT_CHECKED}
    assert {result.message for result in results} == {"the suite of this point runs on a CPU only"}


def test_a_plugin_for_another_device_is_not_checked_there() -> None:
    own = checks_of("experts")[len(checks_of("nobodys_point")) :]
    results = [run_check(check, case(point="experts", name="deep_gemm")) for check in own]
    assert {result.outcome for result in results} == {Outcome.NOT_CHECKED}
    assert {result.message for result in results} == {"runs on cuda only"}
