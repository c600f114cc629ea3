"""Fixtures of the whole test tree."""

import os
from collections import Counter

import pytest
import torch
from crossdock.testing.fixtures import rank_pool
from hypothesis import settings

if not torch.cuda.is_available():
    # Read when triton is first imported: kernels run interpreted on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in each run, and no clock: a busy machine is no failure.
settings.register_profile("crossdock", deadline=None, derandomize=True)
settings.load_profile("crossdock")

MATRIX_OUTCOME = "matrix_outcome"

__all__ = ["rank_pool"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many combinations of the plugin matrix matched the one-process reference, and how many were refused with which code.

    Here and not beside the matrix, because with xdist only this file is read by the process that prints.
    """
    outcomes = Counter(
        value
        for report in terminalreporter.getreports("passed")
        for name, value in getattr(report, "user_properties", ())
        if name == MATRIX_OUTCOME
    )
    if outcomes:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
        terminalreporter.write_line(f"plugin matrix: {sum(outcomes.values())} combinations: {counts}")
