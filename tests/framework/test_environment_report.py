"""What ``crossdock env`` says: facts of torch, and for optional wheels whether they fit."""

from __future__ import annotations

import importlib.metadata

import pytest
from crossdock.environment_report import OPTIONAL_WHEELS, OptionalWheel, environment_report
from crossdock.native_code import NativeCode

ROOT_EXTRAS = {wheel.extra: wheel.requirement for wheel in OPTIONAL_WHEELS}


def test_sections_and_torch_facts_are_there() -> None:
    report = environment_report()
    assert set(report) == {"versions", "machine", "torch", "optional"}
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["torch"]["gloo"] is True


def test_a_wheel_that_does_not_fit_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = OptionalWheel(module="nobodys", extra="x", requirement="nobodys==1", torch_minor="1.0", python_tag="cp27")
    monkeypatch.setattr("crossdock.environment_report.OPTIONAL_WHEELS", (wheel,))
    told = environment_report()["optional"]["nobodys"]
    assert told.startswith("pip install 'crossdock[x]' (nobodys==1): it needs torch 1.0, found")
    assert "it needs Python cp27" in told


def test_a_wheel_that_is_there_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = OptionalWheel(module="attrs", extra="x", requirement="attrs", torch_minor="1.0")
    monkeypatch.setattr("crossdock.environment_report.OPTIONAL_WHEELS", (wheel,))
    assert environment_report()["optional"]["attrs"] == "installed"


def test_the_requirements_are_those_of_the_extras() -> None:
    declared = importlib.metadata.requires("crossdock") or []
    for extra, requirement in ROOT_EXTRAS.items():
        assert any(line.startswith(requirement.split("==")[0]) and extra in line for line in declared), requirement


def test_a_machine_without_a_compiler_hears_that_kernels_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = NativeCode(library=None, reason="no C compiler found (cc, gcc, clang)")
    monkeypatch.setattr("crossdock.environment_report.native_code", lambda: missing)
    told = environment_report()["machine"]["cpu_kernels"]
    assert told == "absent, torch operators run instead and are slower: no C compiler found (cc, gcc, clang)"
