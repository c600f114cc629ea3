"""A served model whose experts move on request: answers stay the same, history tells, and a rank killed in a move ends the job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crossdock.testing.server_process import ServerProcess, start_server
from crossdock.testing.text_model import write_text_model

pytestmark = pytest.mark.timeout(150)
NEW = [[3, 2, 1, 0, 2, 1], [1, 0, 3, 2, 0, 3]]
BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_text_model(tmp_path_factory.mktemp("served") / "tiny", context_tokens=4096)
    settings = (
        "parallel.ranks=2",
        "parallel.attn_dp_size=2",
        "server.port=0",
        "checkpoint.load_format=random",
        "dispatcher.name=alltoallv",
        "expert_location.name=lp",
        "eplb.enabled=true",
        "eplb.slots=6",
        "eplb.interval=1000000",
        "eplb.canary=true",
        "eplb.max_step_bytes=128",
        "recorder.mode=stat",
        "recorder.report=both",
        "recorder.report_every=2",
    )
    flags = [word for setting in settings for word in ("--set", setting)]
    started = start_server(["-m", "crossdock", "serve", str(folder), *flags])
    yield started
    started.end()


def texts(server: ServerProcess) -> list[str]:
    status, answer = server.post("/v1/completions", {**BODY, "n": 2})
    assert status == 200, answer
    return [choice["text"] for choice in answer["choices"]]


def history(server: ServerProcess) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = server.get("/placement/history")[1]["entries"]
    return entries


def test_a_placement_is_planned_applied_and_looked_back_on_while_answers_stay_the_same(server: ServerProcess) -> None:
    server.wait_ready()
    before = texts(server)
    status, state = server.get("/placement")
    assert status == 200
    assert state["physical_to_logical_map"] == [[0, 1, 2, 3, 0, 1]] * 2
    status, plan = server.post("/placement/plan", {})
    assert status == 200
    assert plan["passes"] > 0
    assert server.get("/placement")[1]["physical_to_logical_map"] == [[0, 1, 2, 3, 0, 1]] * 2, "a dry run moved experts"
    assert server.post("/placement/apply", {"plan": NEW})[0] == 202
    assert texts(server) == before
    server.until(lambda: len(history(server)) == 1, "end of the rebalance")
    (entry,) = history(server)
    assert entry["outcome"] == "applied"
    assert entry["moved_bytes"] > 0
    assert entry["stalled_s"] > 0
    assert server.get("/placement")[1]["physical_to_logical_map"] == NEW
    assert texts(server) == before
    assert server.post("/placement/reload", {}) == (200, {"status": "reloaded", "slots": 6})
    assert texts(server) == before
    receipt = server.get("/receipt")[1]
    assert receipt["rebalances"][0]["outcome"] == "applied"
    assert receipt["capacity"]["eplb_spare_bytes"] > 0
    metrics = server.get("/metrics")[1]
    assert "crossdock:eplb_rebalances_applied" in metrics
    assert "crossdock:eplb_balancedness_10" in metrics


def test_recorder_verbs_answer_with_files_and_a_summary(server: ServerProcess, tmp_path: Path) -> None:
    server.wait_ready()
    assert server.post("/start_expert_distribution_record", {})[0] == 200
    texts(server)
    assert server.post("/stop_expert_distribution_record", {})[0] == 200
    status, answer = server.post("/dump_expert_distribution_record", {"output_dir": str(tmp_path)})
    assert status == 200
    first = answer["replicas"][0]
    assert len(first["files"]) == 2
    assert all(Path(name).exists() for name in first["files"])
    # Four prompt tokens and eleven generated ones a choice, top-2, two layers; the prompt is computed once or twice.
    assert first["choices"] % (2 * 2) == 0
    assert 0 < first["balancedness"] <= 1


def test_a_rank_killed_in_the_middle_of_a_move_ends_the_job_with_its_name(server: ServerProcess) -> None:
    server.wait_ready()
    ranks = server.ranks()
    assert server.post("/placement/apply", {"plan": [[0, 1, 2, 3, 0, 1]] * 2})[0] == 202
    ranks[1].kill()
    assert server.wait(20) == 1
    server.until(lambda: not server.orphans(), "end of all ranks", timeout_s=10)
    assert any("rank 1" in line and "SIGKILL" in line for line in server.lines[-3:])
