"""``crossdock trace summary``: numbers and a picture of files that a profile wrote."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from crossdock.cli.main import main
from crossdock.observe.trace_files import write_trace
from crossdock.types.observer import Span


def spans(step: int) -> list[Span]:
    rows = (("dispatch_begin", "dispatch", 10.0), ("experts", "experts", 30.0), ("dispatch_end", "wait", 10.0))
    found: list[Span] = []
    begin = 100.0 * step
    for name, category, duration in rows:
        found.append(
            Span(
                step=step,
                micro_batch=0,
                layer=0,
                name=name,
                category=category,
                begin_us=begin,
                duration_us=duration,
            )
        )
        begin += duration
    return found


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"rank{rank}.trace.json" for rank in (0, 1)]
    for rank, path in enumerate(paths):
        write_trace(path, rank, [*spans(1), *spans(2)])
    return [str(path) for path in paths]


def test_each_rank_has_its_numbers(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "summary", *files, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["rank"], row["passes"], row["wall_us"], row["exposed_us"]) for row in rows] == [
        (0, 2, 100.0, 40.0),
        (1, 2, 100.0, 40.0),
    ]
    assert [row["rank_wait_us"] for row in rows] == [0.0, 0.0], "both came at the same moment"
    assert rows[0]["overlap_ratio"] == pytest.approx(0.6)
    assert rows[0]["bubble"] == pytest.approx(0.2)


def test_passes_that_two_files_of_a_rank_hold_count_once(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same file twice, and a profile beside the observer's file."""
    other = tmp_path / "profile.json"
    write_trace(other, 0, [*spans(2), *spans(3)])
    assert main(["trace", "summary", files[0], "--format", "json"]) == 0
    once = json.loads(capsys.readouterr().out)
    assert main(["trace", "summary", files[0], files[0], "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == once
    assert main(["trace", "summary", files[0], str(other), "--format", "json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert (both[0]["passes"], both[0]["exposed_us"]) == (3, 60.0)


def test_waiting_for_the_slower_rank_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = [attrs.evolve(span, begin_us=span.begin_us + 4.0) for span in spans(1)]
    for rank, found in enumerate((spans(1), slow)):
        write_trace(tmp_path / f"{rank}.json", rank, found)
    files = [str(tmp_path / f"{rank}.json") for rank in (0, 1)]
    assert main(["trace", "summary", *files, "--format", "json"]) == 0
    assert [row["rank_wait_us"] for row in json.loads(capsys.readouterr().out)] == [4.0, 0.0]
    assert main(["trace", "summary", files[0], "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["rank_wait_us"] is None


def test_people_get_a_table_and_a_picture(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "lanes.svg"
    assert main(["trace", "summary", *files, "--svg", str(picture)]) == 0
    assert "0.600" in capsys.readouterr().out
    assert picture.read_text().startswith("<svg")


def test_one_step_can_be_looked_at_alone(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "summary", files[0], "--step", "2", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["passes"] == 1


@pytest.mark.parametrize("words", [[], ["missing.json"]])
def test_no_file_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "summary", *words]) == 2
    assert "trace file" in (error := capsys.readouterr().err) or "missing.json" in error


def test_a_step_that_was_not_timed_is_said(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "summary", files[0], "--step", "9"]) == 2
    assert "no timed operation of step 9" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_a_usage_error(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "summary", *files, "--svg", "no/such/folder/lanes.svg"]) == 2
    assert "no/such/folder/lanes.svg: No such file" in capsys.readouterr().err
