"""Counts of the plugin matrix at the end of the output."""

from __future__ import annotations

from collections import Counter

import pytest

OUTCOME = "matrix_outcome"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many combinations matched the one-process reference, and how many were refused with which code."""
    reports = terminalreporter.getreports("passed")
    outcomes = Counter(
        value for report in reports for name, value in getattr(report, "user_properties", ()) if name == OUTCOME
    )
    if outcomes:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
        terminalreporter.write_line(f"plugin matrix: {sum(outcomes.values())} combinations: {counts}")
