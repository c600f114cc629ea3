"""Reading options: strict types, all errors at once, paths and suggestions."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import pytest
from crossdock.config import at_least
from crossdock.errors import ConfigValueError
from crossdock.options import nearest, option, option_help, read_options


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen(kw_only=True)
class Inner:
    depth: int = 1


@attrs.frozen(kw_only=True)
class Options:
    mode: Literal["auto", "normal"] = "auto"
    rows: int = option("rows in a buffer", default=3, validator=at_least(1))
    slots: int = option("slots", default=3, validator=at_least(2))
    ratio: float = 1.0
    flag: bool = True
    names: tuple[str, ...] = ()
    limit: int | None = None
    colour: Colour = Colour.RED
    inner: Inner = attrs.field(factory=Inner)
    anything: Mapping[str, object] = attrs.field(factory=dict[str, object])


@attrs.frozen(kw_only=True)
class Required:
    path: str


def problems(table: Mapping[str, object], options_class: type[Any] = Options) -> list[str]:
    with pytest.raises(ConfigValueError) as error:
        read_options(options_class, table, where="[dispatcher]")
    assert str(error.value) == "; ".join(error.value.problems)
    return list(error.value.problems)


def test_values_are_taken_as_toml_gives_them() -> None:
    read = read_options(
        Options,
        {
            "mode": "normal",
            "ratio": 2,
            "names": ["a"],
            "limit": 4,
            "colour": "blue",
            "inner": {"depth": 2},
            "anything": {"x": [1]},
        },
        where="[dispatcher]",
    )
    assert read == Options(
        mode="normal", ratio=2.0, names=("a",), limit=4, colour=Colour.BLUE, inner=Inner(depth=2), anything={"x": [1]}
    )


@pytest.mark.parametrize("table", [{"flag": False}, {"ratio": 0}, {"names": []}, {"anything": {}}])
def test_empty_and_false_values_are_kept(table: dict[str, object]) -> None:
    read = read_options(Options, table, where="[dispatcher]")
    (key,) = table
    found = getattr(read, key)
    assert not found
    assert found is not None


def test_every_problem_is_reported_at_once_with_its_path() -> None:
    found = problems({"mod": 1, "rows": "3", "slots": 0, "inner": {"dept": 1, "depth": 2.5}, "names": [1, "a", True]})
    assert "[dispatcher] rows: expected an integer, found '3' (a string)" in found
    assert "[dispatcher] slots: slots must be at least 2, found 0" in found
    assert "[dispatcher] inner.depth: expected an integer, found 2.5 (a number)" in found
    assert "[dispatcher] inner: unknown key 'dept' (did you mean 'depth'?); accepted: depth" in found
    assert "[dispatcher] names[0]: expected a string, found 1 (an integer)" in found
    assert "[dispatcher] names[2]: expected a string, found True (a boolean)" in found
    assert any(
        problem.startswith("[dispatcher]: unknown key 'mod' (did you mean 'mode'?); accepted: mode, rows")
        for problem in found
    )
    assert len(found) == 7


def test_two_values_out_of_range_are_both_reported() -> None:
    assert problems({"rows": 0, "slots": 1}) == [
        "[dispatcher] rows: rows must be at least 1, found 0",
        "[dispatcher] slots: slots must be at least 2, found 1",
    ]


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"flag": 1}, "expected true or false, found 1 (an integer)"),
        ({"rows": True}, "expected an integer, found True (a boolean)"),
        ({"ratio": False}, "expected a number, found False (a boolean)"),
        ({"names": "ab"}, "expected a list, found 'ab' (a string)"),
        ({"limit": "x"}, "expected an integer, found 'x' (a string)"),
        ({"inner": 3}, "expected a table, found 3 (an integer)"),
        ({"anything": []}, "expected a table, found [] (a list)"),
        ({"mode": "norml"}, "expected one of 'auto', 'normal', found 'norml' (did you mean 'normal'?)"),
        ({"colour": "green"}, "expected one of 'red', 'blue', found 'green'"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_and_never_converted(table: dict[str, object], told: str) -> None:
    (problem,) = problems(table)
    assert problem.endswith(f": {told}")


def test_a_choice_that_is_spelt_like_a_number_may_be_written_as_one() -> None:
    @attrs.frozen(kw_only=True)
    class Engine:
        ahead: Literal["auto", "0", "1"] = "auto"

    assert read_options(Engine, {"ahead": 0}, where="[scheduler]").ahead == "0"
    assert read_options(Engine, {"ahead": "1"}, where="[scheduler]").ahead == "1"
    for value in (2, True, 0.0):
        (problem,) = problems({"ahead": value}, Engine)
        assert problem.endswith(f"ahead: expected one of 'auto', '0', '1', found {value!r}")


def test_a_missing_required_key_is_named() -> None:
    assert problems({}, Required) == ["[dispatcher] path: this key is required"]


def test_a_class_without_fields_accepts_no_key() -> None:
    @attrs.frozen(kw_only=True)
    class Nothing:
        pass

    assert problems({"x": 1}, Nothing) == ["[dispatcher]: unknown key 'x'; accepted: none"]


def test_help_is_kept_with_the_field() -> None:
    assert option_help(attrs.fields(Options).rows) == "rows in a buffer"
    assert option_help(attrs.fields(Options).mode) == ""


def test_the_nearest_word_ignores_case_and_dashes() -> None:
    assert nearest("Deep-EP", ("deepep", "alltoallv")) == " (did you mean 'deepep'?)"
    assert nearest("xyz", ("deepep",)) == ""
