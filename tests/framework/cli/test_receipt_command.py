"""``crossdock receipt diff``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from crossdock.cli.main import main


def write(path: Path, **changes: Any) -> Path:
    receipt = {
        "schema_version": 1,
        "plugins": [{"point": "dispatcher", "name": "alltoallv"}, {"point": "strategy", "name": "sequential"}],
        "counts": {"padding": {"max_len": 3}},
        **changes,
    }
    path.write_text(json.dumps(receipt))
    return path


def test_equal_receipts_have_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["receipt", "diff", str(write(tmp_path / "a")), str(write(tmp_path / "b"))]) == 0
    assert capsys.readouterr().out == ""


def test_each_differing_value_is_a_line_and_plugins_are_told_apart_by_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins = [
        {"point": "padding", "name": "cost"},
        {"point": "dispatcher", "name": "allgatherv"},
        {"point": "strategy", "name": "sequential"},
    ]
    changed = write(tmp_path / "b", plugins=plugins, counts={"padding": {"max_len": 3, "sum_len": 1}})
    assert main(["receipt", "diff", str(write(tmp_path / "a")), str(changed)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "plugins.dispatcher.name: 'alltoallv' -> 'allgatherv'",
        "plugins.padding.point: 'unset' -> 'padding'",
        "plugins.padding.name: 'unset' -> 'cost'",
        "counts.padding.sum_len: 'unset' -> 1",
    ]


@pytest.mark.parametrize(
    ("text", "told"), [("{", "cannot be read as JSON"), ("[]", "no receipt"), ("{}", "no receipt")]
)
def test_a_file_that_is_no_receipt_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    (tmp_path / "b").write_text(text)
    assert main(["receipt", "diff", str(write(tmp_path / "a")), str(tmp_path / "b")]) == 2
    assert told in capsys.readouterr().err
