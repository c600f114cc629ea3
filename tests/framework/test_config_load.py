"""Layers of a configuration: what wins, what is kept, where each value came from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
from crossdock.config import Config, PluginChoice
from crossdock.config_codec import decode_config, encode_config
from crossdock.config_load import Layer, LoadedConfig, file_layer, flag_layers, load_config, set_layer
from crossdock.config_render import config_differences, config_tables, render_config, resolved_config
from crossdock.errors import ConfigFileError, ConfigValueError


def toml_layer(text: str) -> Layer:
    return Layer(source="file test.toml", table=tomllib.loads(text))


def problems(*layers: Layer) -> tuple[str, ...]:
    with pytest.raises(ConfigValueError) as error:
        load_config(layers)
    return error.value.problems


def booleans() -> list[tuple[str, bool]]:
    """Dotted path and default of every boolean in the schema."""
    found: list[tuple[str, bool]] = []
    for table, values in config_tables(Config()).items():
        found.extend((f"{table}.{key}", value) for key, value in values.items() if isinstance(value, bool))
    return found


def value_of(config: Config, path: str) -> Any:
    table, _, key = path.partition(".")
    return config_tables(config)[table][key]


@pytest.mark.parametrize(("path", "default"), booleans())
def test_each_boolean_takes_the_opposite_of_its_default_from_a_file_and_survives_a_round_trip(
    path: str, default: bool
) -> None:
    table, _, key = path.partition(".")
    loaded = load_config([toml_layer(f"[{table}]\n{key} = {str(not default).lower()}\n")])
    assert value_of(loaded.config, path) is (not default)
    again = load_config([toml_layer(render_config(loaded, resolved=True))])
    assert value_of(again.config, path) is (not default)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("[checkpoint]\nseed = 0", "checkpoint.seed", 0),
        ("[checkpoint]\npath = ''", "checkpoint.path", ""),
        ("[observer]\nnames = []", "observer.names", []),
        ("[dispatcher]\nrows = 0\nmode = ''\nlist = []\nflag = false", "dispatcher.flag", False),
        ("[server]\nport = 0", "server.port", 0),
    ],
)
def test_zero_empty_and_false_in_a_file_are_values(text: str, path: str, value: object) -> None:
    loaded = load_config([toml_layer(text)])
    assert value_of(loaded.config, path) == value
    assert loaded.sources[path] == "file test.toml"
    again = load_config([toml_layer(render_config(loaded, resolved=True))])
    assert value_of(again.config, path) == value


def test_flags_win_over_set_which_wins_over_the_file_which_wins_over_the_default() -> None:
    file = toml_layer("[scheduler]\nchunk_tokens = 100\npage_tokens = 8\nmax_step_tokens = 700\n")
    assigned = set_layer(["scheduler.chunk_tokens=200", "scheduler.page_tokens=4"])
    flags = flag_layers({"--chunk": ("scheduler.chunk_tokens", 300)})
    loaded = load_config([file, assigned, *flags])
    limits = loaded.config.scheduler
    assert (limits.chunk_tokens, limits.page_tokens, limits.max_step_tokens) == (300, 4, 700)
    assert limits.max_running_requests == Config().scheduler.max_running_requests
    assert loaded.sources == {
        "scheduler.chunk_tokens": "--chunk",
        "scheduler.page_tokens": "--set",
        "scheduler.max_step_tokens": "file test.toml",
    }


def test_a_flag_that_repeats_the_default_still_wins_over_the_file() -> None:
    default = Config().server.port
    loaded = load_config([toml_layer("[server]\nport = 9"), *flag_layers({"--port": ("server.port", default)})])
    assert loaded.config.server.port == default
    assert loaded.sources["server.port"] == "--port"


def test_naming_another_plugin_drops_the_options_of_the_first() -> None:
    file = toml_layer("[dispatcher]\nname = 'deepep'\nmode = 'auto'\n")
    assert load_config([file]).config.dispatcher == PluginChoice(name="deepep", options={"mode": "auto"})
    other = load_config([file, set_layer(["dispatcher.name=alltoallv"])])
    assert other.config.dispatcher == PluginChoice(name="alltoallv")
    assert "dispatcher.mode" not in other.sources
    same = load_config([file, set_layer(["dispatcher.name=deepep", "dispatcher.rows=8"])])
    assert same.config.dispatcher.options == {"mode": "auto", "rows": 8}


def test_options_that_were_set_without_a_name_go_to_the_plugin_that_a_flag_names() -> None:
    layers = [set_layer(["strategy.min_decode_rows=2"]), *flag_layers({"--strategy": ("strategy.name", "two_batch")})]
    assert load_config(layers).config.strategy == PluginChoice(name="two_batch", options={"min_decode_rows": 2})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("x=1", 1),
        ("x=true", True),
        ("x=[1, 2]", [1, 2]),
        ("x='quoted = kept'", "quoted = kept"),
        ("x=alltoallv", "alltoallv"),
        ("x=/a/path.toml", "/a/path.toml"),
        ("x=", ""),
        ("x=a=b", "a=b"),
        ("x=0.5", 0.5),
        ("x=[ [0, 1], [1, 0] ]", "[ [0, 1], [1, 0] ]"),
        ('x={"a": [1]}', '{"a": [1]}'),
    ],
)
def test_set_takes_toml_values_and_bare_strings(word: str, value: object) -> None:
    assert set_layer([f"dispatcher.{word}"]).table == {"dispatcher": {"x": value}}


@pytest.mark.parametrize("words", [["noequals"], ["=3"], ["a.=3"], ["a=1", "a.b=2"]])
def test_a_set_word_that_makes_no_sense_is_named(words: list[str]) -> None:
    with pytest.raises(ConfigValueError, match=f"--set '{words[-1]}'"):
        set_layer(words)


def test_all_problems_of_all_tables_are_reported_with_path_source_and_suggestion() -> None:
    file = toml_layer(
        "[parallel]\nranks = 4\nattn_dp_size = 3\n[schedular]\nx = 1\n[scheduler]\nchunk_tokens = 'a'\nchunk_tokns = 3\n"
        "[server]\nport = 99999\n[padding]\nname = 3\n[observer]\nnames = 'prometheus'\n"
    )
    found = problems(file, set_layer(["eplb.interval=0"]))
    told = "\n".join(found)
    for part in (
        "[schedular]: no such table (did you mean 'scheduler'?)",
        "[scheduler] chunk_tokens: expected an integer, found 'a' (a string) (from file test.toml)",
        "[scheduler]: unknown key 'chunk_tokns' (did you mean 'chunk_tokens'?)",
        "[server] port: port must be from 0 to 65535",
        "[padding] name: expected the name of a padding plugin, found 3",
        "[observer] names: expected a list of names, found 'prometheus'",
        "[eplb] interval: interval must be at least 1, found 0 (from --set)",
        "must be ranks = 4",
    ):
        assert part in told, part
    assert len(found) == 8


def test_a_value_where_a_table_belongs_is_told() -> None:
    (found,) = problems(Layer(source="file", table={"server": 3}))
    assert found.startswith("[server]: expected a table, found 3")


def test_a_missing_file_a_folder_and_broken_toml_are_one_sentence_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"nothing\.toml does not exist"):
        file_layer(tmp_path / "nothing.toml")
    with pytest.raises(ConfigFileError, match="is a folder"):
        file_layer(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[server]\nport = \n")
    with pytest.raises(ConfigFileError, match=r"broken\.toml is not TOML: .*line 2"):
        file_layer(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigFileError, match="cannot be read"):
        file_layer(broken)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    assert load_config([file_layer(empty)]) == LoadedConfig(config=Config(), sources={})


def test_the_resolved_config_names_every_source_and_reads_back_to_the_same() -> None:
    loaded = load_config(
        [
            toml_layer(
                "[parallel]\nranks = 8\nattn_dp_size = 4\n[observer]\nnames = ['prometheus']\n[observer.prometheus]\nfolder = 'x'\n"
            ),
            *flag_layers({"--dispatcher": ("dispatcher.name", "alltoallv")}),
        ]
    )
    text = render_config(loaded, resolved=True)
    lines = dict(line.split(" # ") for line in text.splitlines() if " # " in line)
    assert lines["ranks = 8"] == "file test.toml"
    assert lines["attn_tp_size = 2"] == "derived"
    assert lines["moe_ep_size = 8"] == "derived"
    assert lines['name = "alltoallv"'] == "--dispatcher"
    assert lines["page_tokens = 16"] == "default"
    again = load_config([toml_layer(text)])
    assert resolved_config(again.config) == resolved_config(loaded.config)
    assert render_config(again, resolved=False).count("=") == text.count(" = ")


def test_what_was_not_stated_is_left_out_unless_resolved() -> None:
    loaded = load_config([toml_layer("[server]\nport = 1\n")])
    assert render_config(loaded, resolved=False) == "[server]\nport = 1 # file test.toml\n"
    assert render_config(load_config([]), resolved=False) == ""


def test_differences_are_listed_by_path_and_derived_widths_count() -> None:
    first, second = Config(), load_config([set_layer(["parallel.ranks=2", "dispatcher.x=1"])]).config
    assert config_differences(first, first) == ()
    assert config_differences(first, second) == (
        "parallel.ranks: 1 -> 2",
        "parallel.attn_tp_size: 1 -> 2",
        "parallel.moe_ep_size: 1 -> 2",
        "dispatcher.x: 'unset' -> 1",
    )


def test_a_config_travels_as_json_and_nothing_else_is_decoded() -> None:
    config = load_config([set_layer(["dispatcher.x=[1, {y = 2}]", "observer.names=['a']", "observer.a.b=1"])]).config
    assert decode_config(encode_config(config)) == config
    with pytest.raises(Exception, match="port"):
        decode_config(b'{"server": {"port": "x"}}')


def test_every_value_of_the_schema_has_a_line_of_help() -> None:
    for table in attrs.fields(Config):
        value = getattr(Config(), table.name)
        if isinstance(value, PluginChoice) or table.name == "observer":
            continue
        for field in attrs.fields(type(value)):
            assert field.metadata.get("help"), f"{table.name}.{field.name}"
