"""The frame of the conformance kit: a suite is a tuple of checks, each a sentence that must hold for a plugin of its point.

A suite lives in ``crossdock.testing.<point>_conformance`` as ``CHECKS`` and is listed in ``crossdock.testing.suites``. A check raises
``AssertionError`` (or anything else) when it does not hold, and ``NotCheckable`` when something is missing here (a device, a package).
"""

from __future__ import annotations

import enum
import traceback
from collections.abc import Callable, Mapping, Sequence

import attrs

from crossdock.testing.world import RankPool


class NotCheckable(Exception):
    """The check cannot be made in this environment; the message says what is missing."""


@attrs.frozen(kw_only=True, eq=False)
class PluginCase:
    """The plugin under test."""

    point: str
    name: str
    options: Mapping[str, object] = attrs.field(factory=dict[str, object])
    pool_of: Callable[[int], RankPool]
    """Real processes with gloo: ``case.pool_of(2).run(function, ...)``; started once, shared by all checks."""
    device: str = "cpu"
    """Where tensors lie; with ``cuda`` the pools' ranks have a GPU each."""
    tolerance: float = 0.0
    """Relative error that the plugin may make besides rounding: of a lossy wire that its options ask for."""


@attrs.frozen(kw_only=True, eq=False)
class Check:
    """One sentence about a plugin; ``run`` returns when it holds."""

    name: str
    """The sentence in snake_case, for instance ``a_rank_without_rows_joins``."""
    run: Callable[[PluginCase], None]


class Outcome(enum.Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@attrs.frozen(kw_only=True)
class CheckResult:
    """One check of one plugin."""

    point: str
    plugin: str
    check: str
    outcome: Outcome
    message: str = ""
    """Traceback of a failure, or what is missing."""


def check_of(function: Callable[[PluginCase], None]) -> Check:
    """A check named like the function, without its leading ``check_``."""
    return Check(name=function.__name__.removeprefix("check_"), run=function)


def run_check(check: Check, case: PluginCase) -> CheckResult:
    """One check on one plugin; never raises."""
    outcome, message = Outcome.PASSED, ""
    try:
        check.run(case)
    except NotCheckable as missing:
        outcome, message = Outcome.NOT_CHECKED, str(missing)
    except Exception:  # noqa: BLE001 - whatever a plugin raises is a failed check
        outcome, message = Outcome.FAILED, traceback.format_exc()
    return CheckResult(point=case.point, plugin=case.name, check=check.name, outcome=outcome, message=message)


def run_suite(checks: Sequence[Check], case: PluginCase) -> tuple[CheckResult, ...]:
    """Every check of a suite on one plugin."""
    return tuple(run_check(check, case) for check in checks)
