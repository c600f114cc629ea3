"""The command line: one line on stderr, exit codes, familiar flags, no torch where none is needed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from crossdock.cli.app import COMMANDS
from crossdock.cli.familiar import FAMILIAR_FLAGS, translate_familiar_flags
from crossdock.cli.main import main
from crossdock.errors import UsageError

CONFIG = "[parallel]\nranks = 4\nattn_dp_size = 2\n[dispatcher]\nname = 'alltoallv'\n"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("crossdock: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("form", ["two words", "one word"])
def test_both_forms_of_the_config_flag_read_the_file(
    capsys: pytest.CaptureFixture[str], config_file: Path, form: str
) -> None:
    words = ["--config", str(config_file)] if form == "two words" else [f"--config={config_file}"]
    code, out, _ = run(capsys, "config", "show", *words)
    assert code == 0
    assert tomllib.loads(out) == tomllib.loads(CONFIG)


def test_flags_and_set_win_over_the_file_in_the_resolved_output(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    _, out, _ = run(
        capsys, "config", "show", "--resolved", "--config", str(config_file), "--ranks", "8", "--set", "server.port=0"
    )
    assert "ranks = 8 # --ranks" in out
    assert "port = 0 # --set" in out
    assert f"attn_dp_size = 2 # file {config_file}" in out
    assert "attn_tp_size = 4 # derived" in out


def test_a_flag_that_repeats_the_default_wins_over_the_file(
    capsys: pytest.CaptureFixture[str], config_file: Path
) -> None:
    _, out, _ = run(
        capsys,
        "config",
        "show",
        "--config",
        str(config_file),
        "--dispatcher",
        "allgatherv",
        "--ranks",
        "1",
        "--attn-dp",
        "0",
    )
    shown = tomllib.loads(out)
    assert shown["parallel"] == {"ranks": 1, "attn_dp_size": 0}
    assert shown["dispatcher"] == {"name": "allgatherv"}


def test_files_that_cannot_be_read_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("a = [1,\n\n")
    assert "does not exist" in failed(capsys, "config", "show", "--config", str(tmp_path / "no.toml"))
    assert "is a folder" in failed(capsys, "config", "show", f"--config={tmp_path}")
    assert "broken.toml is not TOML" in failed(capsys, "config", "validate", "--config", str(broken))


def test_an_empty_file_is_the_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    assert run(capsys, "config", "show", "--config", str(empty)) == (0, "", "")


def test_the_resolved_config_holds_the_options_of_the_chosen_plugins_and_reads_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--ranks", "2", "--dispatcher", "alltoallv"]
    sets = [
        "strategy.name=two_batch",
        "strategy.min_decode_rows=7",
        'observer.names=["prometheus"]',
        "observer.prometheus.every_steps=5",
    ]
    code, text, _ = run(capsys, "config", "show", "--resolved", *words, *(f"--set={one}" for one in sets))
    assert code == 0
    assert "min_decode_rows = 7 # --set" in text
    assert "min_prefill_rows = 512 # default of two_batch" in text
    assert "one_round_bytes = 262144 # default of alltoallv" in text
    assert 'folder = "" # default of prometheus' in text
    assert "every_steps = 5 # --set" in text
    file = tmp_path / "resolved.toml"
    file.write_text(text)
    code, again, _ = run(capsys, "config", "show", "--resolved", str(file))
    assert code == 0
    assert tomllib.loads(again) == tomllib.loads(text)
    assert "default" not in again.replace('"default"', "")


def test_a_plugin_that_cannot_be_asked_is_shown_as_stated(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "config", "show", "--resolved", "--set", "padding.name=nobodys", "--set", "padding.x=1")
    assert code == 0
    assert 'name = "nobodys" # --set\nx = 1 # --set' in text


@pytest.mark.parametrize("words", [["show"], ["show", "--resolved"], ["validate"]])
def test_the_file_of_a_configuration_needs_no_flag(
    capsys: pytest.CaptureFixture[str], words: list[str], config_file: Path
) -> None:
    with_flag = run(capsys, "config", *words, "--config", str(config_file))
    assert with_flag[0] == 0
    assert run(capsys, "config", *words, str(config_file)) == with_flag


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["confg"], 'Unknown command "confg". Did you mean "config"?'),
        (["config", "shw"], 'Did you mean "show"?'),
        (["config", "show", "--rank", "3"], "Unknown option: --rank. Did you mean --ranks?"),
        (["config", "show", "--ranks", "x"], "--ranks"),
        (["config", "show", "--ranks", "1.5"], "--ranks"),
        (["config", "show", "--device", "tpu"], "cpu"),
        (["config", "validate", "/nowhere.toml"], "does not exist"),
        (["config", "validate", "a.toml", "--config", "b.toml"], "give one"),
        (["plugins", "new", "dispacher", "x"], "did you mean 'dispatcher'?"),
        (["plugins", "new", "padding", "Bad-Name"], "lower-case letters"),
        (["plugins", "check", "crossdok"], "did you mean 'crossdock'?"),
        (["config", "validate", "--dispatcher", "alltoal"], "did you mean 'alltoallv'?"),
        (["config", "validate", "--ranks", "4", "--moe-ep", "2", "--dispatcher", "alltoallv"], "[a2a_needs_full_ep]"),
        (["config", "validate", "--ranks", "2", "--attn-cp", "2"], "[attn_cp_refused]"),
        (["config", "validate", "--set", "scheduler.chunk_token=3"], "did you mean 'chunk_tokens'?"),
        (["config", "validate", "--set", "checkpoint.path=/nowhere"], "does not exist"),
        (["config", "validate", "--ranks", "3", "--moe-ep", "3", "--attn-dp", "3"], "eplb.slots = 33"),
    ],
)
def test_wrong_usage_is_one_line_with_a_hint_and_exit_2(
    capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert told in failed(capsys, *words)


def test_a_valid_configuration_is_told_point_by_point(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    code, out, err = run(capsys, "config", "validate", "--config", str(config_file))
    assert (code, err) == (0, "")
    assert "dispatcher: alltoallv (crossdock" in out
    assert "crossdock-mini (deepseek_v3, 7 layers, bfloat16)" in out
    assert "experts: 32 slots over moe_ep_size = 4 ranks" in out


def test_diff_exits_1_when_files_differ(capsys: pytest.CaptureFixture[str], config_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(CONFIG.replace("alltoallv", "allgatherv"))
    assert run(capsys, "config", "diff", str(config_file), str(other)) == (
        1,
        "dispatcher.name: 'alltoallv' -> 'allgatherv'\n",
        "",
    )
    assert run(capsys, "config", "diff", str(config_file), str(config_file)) == (0, "", "")


def test_the_list_of_plugins_is_json_with_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plugins", "list", "--format", "json")
    rows = json.loads(out)
    assert code == 0
    assert {
        "point": "dispatcher",
        "name": "alltoallv",
        "distribution": "crossdock",
        "version": "0.1.0",
        "api": 1,
    } in rows
    assert all(set(row) == {"point", "name", "distribution", "version", "api"} for row in rows), rows


def test_a_broken_plugin_is_listed_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from crossdock.testing.fake_distribution import write_distribution

    for number, source in enumerate(("raise SystemExit(1)", "import nothing_of_that_name", "def x(:")):
        write_distribution(
            tmp_path,
            f"broken{number}",
            entry_points={"crossdock.padding": {f"broken{number}": f"broken{number}.plugin"}},
            modules={f"broken{number}.plugin": source},
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = run(capsys, "plugins", "list", "--format", "json")
    rows = {row["name"]: row for row in json.loads(out) if row["point"] == "padding"}
    assert (code, err) == (0, "")
    assert rows["cost"]["api"] == 1
    for number, told in enumerate(("SystemExit", "nothing_of_that_name", "SyntaxError")):
        assert rows[f"broken{number}"]["api"] is None
        assert told in rows[f"broken{number}"]["error"]


def test_the_matrix_prints_codes_and_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plugins", "list", "--matrix", "--ranks", "4", "--moe-ep", "2")
    assert code == 0
    assert "a2a_needs_full_ep" in out
    assert "allgatherv" in out
    _, as_json, _ = run(capsys, "plugins", "list", "--matrix", "--format", "json")
    assert {"codes", "dispatcher", "experts", "strategy", "expert_location", "attention"} == set(json.loads(as_json)[0])


def test_an_unexpected_exception_is_one_line_unless_the_stack_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise KeyError("lost")

    monkeypatch.setattr("crossdock.cli.env.environment_report", broken)
    code, _, err = run(capsys, "env")
    assert code == 1
    assert err == "crossdock: unexpected KeyError: 'lost' (run again with --traceback for the stack)\n"
    with pytest.raises(KeyError):
        main(["env", "--traceback"])


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    assert all(f" {name} " in out for name in COMMANDS)


def test_config_and_plugin_commands_import_no_torch_and_answer_within_two_seconds(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[server]\nprt = 1\n[parallel]\nranks = 'x'\n")
    code = (
        "import resource, sys; from crossdock.cli.main import main; found = main(sys.argv[1:]);"
        "usage = resource.getrusage(resource.RUSAGE_SELF);"
        "print(found, 'torch' in sys.modules, usage.ru_utime + usage.ru_stime < 2.0)"
    )
    for words, exit_code in (
        (["config", "validate", "--config", str(wrong)], 2),
        (["config", "validate", "--ranks", "2"], 0),
        (["plugins", "list"], 0),
        (["--help"], 0),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True
        )
        assert ran.stdout.splitlines()[-1] == f"{exit_code} False True", words


def test_the_console_script_and_the_module_are_the_same_command() -> None:
    started = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "crossdock", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "0.1.0"
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["serve", "--model-path", "/m"], ["serve", "--set", "checkpoint.path=/m"]),
        (["serve", "--tp=4"], ["serve", "--set", "parallel.ranks=4"]),
        (
            ["serve", "--moe-a2a-backend", "deepep", "--deepep-mode=auto"],
            ["serve", "--dispatcher", "deepep", "--set", "dispatcher.mode=auto"],
        ),
        (
            ["serve", "--enable-eplb", "--ep-num-redundant-experts", "32"],
            ["serve", "--set", "eplb.enabled=true", "--set", "eplb.num_redundant_experts=32"],
        ),
        (["serve", "--enable-two-batch-overlap"], ["serve", "--strategy", "two_batch"]),
        (["serve", "--ranks", "2", "--", "--tp"], ["serve", "--ranks", "2", "--", "--tp"]),
    ],
)
def test_familiar_flags_become_ours(words: list[str], ours: list[str]) -> None:
    assert translate_familiar_flags(words) == ours


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dp", "2"], "--attn-dp"),
        (["--moe-a2a-backend", "pplx"], "these have one: none, deepep, mooncake"),
        (["--gpu-memory-utilization=0.9"], "--set scheduler.kv_tokens=N"),
        (["--tp"], "--tp needs a value"),
        (["--eplb-config", "{}"], "eplb.num_redundant_experts"),
    ],
)
def test_a_familiar_flag_that_means_something_else_names_ours(words: list[str], told: str) -> None:
    with pytest.raises(UsageError) as error:
        translate_familiar_flags(words)
    assert told in str(error.value)


def test_each_familiar_flag_says_exactly_one_thing_and_leads_to_a_known_key() -> None:
    from crossdock.config_load import load_config, set_layer

    names = [name for flag in FAMILIAR_FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    for flag in FAMILIAR_FLAGS:
        assert [bool(flag.ours), bool(flag.becomes), bool(flag.advice)].count(True) == 1, flag.names
        for words in flag.becomes.values():
            load_config([set_layer([word for word in words if "=" in word])])
        if flag.ours:
            table, _, key = flag.ours.partition(".")
            from crossdock.config import Config

            assert key == "name" or hasattr(getattr(Config(), table), key), flag.ours
