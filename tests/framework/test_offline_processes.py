"""Offline jobs on rank processes: the command line, and ranks that are killed or stopped in the middle."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import jsonschema
import numpy as np
import psutil
import pytest
import structlog
from crossdock.cli.main import main
from crossdock.errors import CrossdockError, RankLost, RuntimeFault
from crossdock.local_ranks import run_local_ranks
from crossdock.observe.receipt import receipt_schema
from crossdock.offline import generate, logits, new_tokens, offline_job
from crossdock.offline_job import write_job
from crossdock.testing.random_models import random_model_config, write_random_model
from crossdock.types.request import SamplingParams

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
ENDLESS = SamplingParams(max_new_tokens=480, temperature=0.0)
PROMPT_EXIT_S = 30.0
"""Generous for a busy machine: a rank that waits for a dead one for its deadline (a minute) would fail this."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(PROMPTS))
    return path


def flags(folder: Path, *more: str) -> list[str]:
    return [str(folder), "--load-format", "random", "--set", "scheduler.kv_tokens=1024", *more]


@pytest.mark.parametrize("parallel", [(), ("--ranks", "2", "--attn-dp", "2", "--dispatcher", "alltoallv")])
def test_logits_writes_one_float32_array_a_prompt_under_exactly_the_given_name(
    folder: Path, ids: Path, tmp_path: Path, parallel: tuple[str, ...]
) -> None:
    out, receipt = tmp_path / "result", tmp_path / "receipt.json"
    command = ["logits", *flags(folder, *parallel), "--ids", str(ids), "--out", str(out), "--receipt", str(receipt)]
    assert main(command) == 0
    expected = logits(folder, PROMPTS, random_model_config(folder))
    with np.load(out) as arrays:
        assert sorted(arrays) == ["logits_0", "logits_1", "logits_2"]
        for index, array in enumerate(expected):
            ours = arrays[f"logits_{index}"]
            assert (ours.dtype, ours.shape) == (np.float32, (len(PROMPTS[index]), 96))
            assert np.abs(ours - array).max() <= 1e-5 * np.abs(array).max()
    written = json.loads(receipt.read_text())
    jsonschema.validate(written, receipt_schema())
    assert sum(written["counts"]["forward"].values()) >= 1


def test_generate_prints_a_json_list_and_nothing_else_or_writes_it(
    folder: Path, ids: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", *flags(folder), "--ids", str(ids), "--max-new-tokens", "4"]
    assert main(command) == 0
    printed = json.loads(capfd.readouterr().out)
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0)
    outputs = generate(folder, PROMPTS, greedy, random_model_config(folder))
    assert printed == [new_tokens(one) for one in outputs]
    out = tmp_path / "answer.json"
    assert main([*command, "--out", str(out)]) == 0
    assert capfd.readouterr().out == ""
    assert json.loads(out.read_text()) == printed


def test_generate_with_a_seed_is_repeatable_and_takes_sampling_flags(
    folder: Path, ids: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", *flags(folder), "--ids", str(ids), "--max-new-tokens", "6", "--temperature", "1"]
    answers = []
    for seed in ("3", "3", "4"):
        assert main([*command, "--top-p", "0.9", "--top-k", "50", "--seed", seed]) == 0
        answers.append(json.loads(capfd.readouterr().out))
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("dispatcher", ["allgatherv", "alltoallv"])
@pytest.mark.parametrize("padding", ["cost", "max_len", "sum_len"])
def test_any_dispatcher_and_padding_is_accepted_on_one_rank(
    folder: Path, ids: Path, dispatcher: str, padding: str
) -> None:
    command = ["generate", *flags(folder), "--ids", str(ids), "--max-new-tokens", "1"]
    assert main([*command, "--dispatcher", dispatcher, "--padding", padding]) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[1], []]", "prompt 1 of"),
        ("[]", "holds no prompt"),
        ("[[1], [96]]", "token id 96 is outside the vocabulary (0 to 95)"),
        ('[["a"]]', "must be a JSON list of lists of token ids"),
        ("[1, 2]", "must be a JSON list of lists of token ids"),
        ("{", "must be a JSON list of lists of token ids"),
        (None, "cannot be read"),
    ],
)
def test_ids_that_cannot_be_used_are_one_sentence_and_exit_2(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    path = tmp_path / "ids.json"
    if content is not None:
        path.write_text(content)
    assert main(["generate", *flags(folder), "--ids", str(path)]) == 2
    captured = capfd.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--max-new-tokens", "-1"], "--max-new-tokens must be at least 0, found -1"),
        (["--temperature", "-0.5"], "--temperature must be a number from 0 on, found -0.5"),
        (["--top-p", "0"], "--top-p must be above 0"),
        (["--top-k", "0"], "--top-k must be -1 or at least 1, found 0"),
        (["--prompt", "hello"], "give either --ids FILE.json or --prompt TEXT"),
        (["--max-new-tokens", "1.5"], "--max-new-tokens"),
        (["--temperature", "inf"], "--temperature must be a number from 0 on, found inf"),
        (
            ["--out", "/no/such/folder/x.json"],
            "--out '/no/such/folder/x.json': the folder '/no/such/folder' does not exist",
        ),
        (["--receipt", "/no/such/folder/x.json"], "--receipt"),
        (["--ranks", "2", "--attn-dp", "3"], "must be ranks = 2"),
        (["--dispatcher", "alltoalv"], "no dispatcher plugin 'alltoalv'"),
    ],
)
def test_wrong_flags_are_one_sentence_and_exit_2(
    folder: Path, ids: Path, capfd: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    assert main(["generate", *flags(folder), "--ids", str(ids), *more]) == 2
    error = capfd.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_text_prompt_needs_a_tokenizer(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *flags(folder), "--prompt", "hello"]) == 2
    assert "has no tokenizer.json, which --prompt needs" in capfd.readouterr().err


RANK_AT_WORK = """
import os, sys
from pathlib import Path
from crossdock import offline_rank
from crossdock.engine import RankEngine

folder, rank = Path(sys.argv[1]), sys.argv[2]
one_step = RankEngine._one_step

def told_step(self, step):
    if step == 5:
        (folder / f"at_work_{rank}").write_text(str(os.getpid()))
    return one_step(self, step)

RankEngine._one_step = told_step
sys.exit(offline_rank.main())
"""
"""An offline rank that leaves its process id once it is in the middle of the loop."""


RANK_ASLEEP = """
import sys, time
from crossdock import offline_rank

if sys.argv[2] == "1":
    offline_rank.run_job_on_rank = lambda *arguments: time.sleep(600)
sys.exit(offline_rank.main())
"""
"""Rank 1 joins the others and then never comes to the first thing that all ranks do together."""


def wait_for_ranks(folder: Path, job: threading.Thread) -> list[psutil.Process]:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and job.is_alive():
        files = [folder / f"at_work_{rank}" for rank in (0, 1)]
        if all(file.exists() and file.read_text() for file in files):
            return [psutil.Process(int(file.read_text())) for file in files]
        job.join(0.05)
    raise AssertionError("the ranks did not start to work")


def hit_rank_1(folder: Path, job_folder: Path, hit: signal.Signals, deadline_s: float) -> tuple[CrossdockError, float]:
    """Runs a long job on two ranks, sends ``hit`` to rank 1, and returns the error and how long the end took."""
    config = random_model_config(folder, ranks=2, attn_dp=2, dispatcher="alltoallv", kv_tokens=16384)
    config = attrs.evolve(config, launch=attrs.evolve(config.launch, step_deadline_s=deadline_s))
    write_job(job_folder, offline_job(folder, [[1, 2], [3]] * 16, ENDLESS, config))
    (job_folder / "rank_at_work.py").write_text(RANK_AT_WORK)
    errors: list[CrossdockError] = []

    def run() -> None:
        try:
            run_local_ranks("rank_at_work", job_folder, 2, 1)
        except CrossdockError as error:
            errors.append(error)

    job = threading.Thread(target=run, daemon=True)
    job.start()
    ranks = wait_for_ranks(job_folder, job)
    started = time.monotonic()
    ranks[1].send_signal(hit)
    job.join(PROMPT_EXIT_S)
    took_s = time.monotonic() - started
    for rank in ranks:
        assert not rank.is_running(), "a rank is left"
    assert errors, "the job ended well"
    return errors[0], took_s


@pytest.fixture
def job_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def test_a_killed_rank_ends_the_job_at_once_with_its_name(folder: Path, job_folder: Path) -> None:
    error, took_s = hit_rank_1(folder, job_folder, signal.SIGKILL, deadline_s=60.0)
    assert isinstance(error, RankLost)
    assert "rank 1 was ended by signal SIGKILL" in str(error)
    assert took_s < PROMPT_EXIT_S


def test_a_stopped_rank_ends_the_job_after_the_deadline_with_its_name(folder: Path, job_folder: Path) -> None:
    error, took_s = hit_rank_1(folder, job_folder, signal.SIGSTOP, deadline_s=2.0)
    assert isinstance(error, RuntimeFault)
    # Where the stop hits decides who notices: a collective, or the exchange of step records.
    assert any(
        name in str(error) for name in ("rank 1 ended or stopped", "replica 1 (rank 1, last seen", "ranks [1] of")
    )
    assert took_s < PROMPT_EXIT_S


def test_a_rank_that_never_becomes_ready_ends_the_start_with_its_name(folder: Path, job_folder: Path) -> None:
    config = random_model_config(folder, ranks=2, attn_dp=2)
    config = attrs.evolve(config, launch=attrs.evolve(config.launch, start_timeout_s=10.0))
    write_job(job_folder, offline_job(folder, [[1, 2]], ENDLESS, config))
    (job_folder / "rank_asleep.py").write_text(RANK_ASLEEP)
    with pytest.raises(RuntimeFault, match="rank 1 ended or stopped"):
        run_local_ranks("rank_asleep", job_folder, 2, 1)


def test_an_empty_text_is_refused_although_the_bundled_tokenizer_adds_a_start_token(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--prompt", ""]) == 2
    assert "--prompt has length 0" in capfd.readouterr().err
