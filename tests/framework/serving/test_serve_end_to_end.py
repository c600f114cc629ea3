"""Real ranks behind the real server: a tiny random model on two processes with expert parallelism."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
from crossdock.config import CheckpointConfig, Config
from crossdock.offline import logits
from crossdock.testing.server_process import ServerProcess, start_server
from crossdock.testing.text_model import write_text_model

pytestmark = [pytest.mark.timeout(240), pytest.mark.xdist_group("serve_end_to_end")]
TWO_RANKS = ("--ranks", "2", "--attn-dp", "2", "--dispatcher", "alltoallv", "--set", "checkpoint.load_format=random")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("real") / "tiny-moe", context_tokens=4096)


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    """Servers of a test; what they leave is killed after it."""
    started: list[ServerProcess] = []
    yield started
    for server in started:
        server.end()


def serve(servers: list[ServerProcess], model: Path, *flags: str) -> ServerProcess:
    server = start_server(["-m", "crossdock", "serve", str(model), *TWO_RANKS, "--port", "0", *flags])
    servers.append(server)
    return server


class LongRequests:
    """A completion on each replica that would go on for long; ``answers`` fill when they end."""

    def __init__(self, server: ServerProcess) -> None:
        self.answers: list[tuple[int, Any]] = []
        self._threads = [threading.Thread(target=self._run, args=(server, rank), daemon=True) for rank in (0, 1)]
        for thread in self._threads:
            thread.start()

        def are_running() -> bool:
            status, loads = server.get("/v1/loads")
            return status == 200 and all(load["num_running_reqs"] == 1 for load in loads["loads"])

        server.until(are_running, "requests on both replicas")

    def _run(self, server: ServerProcess, rank: int) -> None:
        body = {"prompt": [70, 71], "max_tokens": 4000, "ignore_eos": True, "routed_dp_rank": rank}
        self.answers.append(server.post("/v1/completions", body))

    def wait(self) -> list[tuple[int, Any]]:
        for thread in self._threads:
            thread.join(20)
        assert len(self.answers) == 2, "a request was not answered"
        return self.answers


def free_port() -> int:
    """For programs that must be told one; taken again at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_served_model_answers_on_both_replicas_and_a_killed_rank_is_named(
    servers: list[ServerProcess], model: Path, tmp_path: Path
) -> None:
    server = serve(servers, model, "--set", "recorder.mode=stat")
    server.wait_ready()
    server.until(lambda: len(server.output) >= 2, "greeting")
    check_answers(server)
    check_scores(server, model)
    check_status(server)
    check_recording(server, tmp_path)
    ranks = server.ranks()
    requests = LongRequests(server)
    ranks[1].kill()
    assert server.wait(30) == 1
    assert "rank 1" in server.lines[-1]
    assert "was killed by SIGKILL; all ranks were ended" in server.lines[-1]
    assert {status for status, _ in requests.wait()} <= {0, 503}
    server.until(lambda: not server.orphans(), "end of all ranks", timeout_s=10)


def check_answers(server: ServerProcess) -> None:
    """The same tokens on each replica, greedy and seeded; the official client's stream equals the whole answer."""
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 42}):
        texts = set()
        for rank in (0, 1):
            body = {"prompt": [70, 71, 72], "max_tokens": 12, "routed_dp_rank": rank, **sampling}
            status, answer = server.post("/v1/completions", body)
            assert status == 200, answer
            texts.add(answer["choices"][0]["text"])
        assert len(texts) == 1
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat: Any = {"model": "tiny-moe", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 7}
        whole = client.chat.completions.create(**chat).choices[0].message.content
        pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **chat)]
        assert "".join(pieces) == whole
        scored = client.completions.create(model="tiny-moe", prompt=[70, 71, 72], max_tokens=0, echo=True, logprobs=2)
        logprobs = scored.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert [value is None for value in logprobs.token_logprobs] == [True, False, False]


def check_scores(server: ServerProcess, model: Path) -> None:
    """Log-likelihoods as evaluation harnesses ask for them, several prompts of token ids at once, are those of one process."""
    prompts = [[70, 71, 72, 5, 9], [300], [12, 12, 12, 12, 40, 41, 42]]
    body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    config = Config(checkpoint=CheckpointConfig(path=str(model), load_format="random"))
    for ids, rows, choice in zip(prompts, logits(model, prompts, config), answer["choices"], strict=True):
        exact = rows.astype(np.float64)
        scores = exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))
        wanted = [scores[place, token] for place, token in enumerate(ids[1:])]
        found = choice["logprobs"]["token_logprobs"]
        assert found[0] is None
        np.testing.assert_allclose(found[1:], wanted, atol=1e-4)
        tops = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:]]
        np.testing.assert_allclose(tops, scores[:-1].max(axis=-1), atol=1e-4)


def check_status(server: ServerProcess) -> None:
    assert server.get("/health")[1]["status"] == "ok"
    assert server.get("/health_generate")[0] == 200
    status, receipt = server.get("/receipt")
    assert status == 200
    assert {plugin["name"] for plugin in receipt["plugins"]} >= {"alltoallv", "sequential", "qwen3_moe"}
    assert sum(receipt["counts"]["padding"].values()) > 0
    assert [entry["dp_rank"] for entry in receipt["replicas"]] == [0, 1]
    assert server.get("/server_info")[1]["config"]["dispatcher"]["name"] == "alltoallv"
    assert server.post("/flush_cache", {})[0] == 200
    metrics = server.get("/metrics")[1]
    for engine in (0, 1):
        counted = f'crossdock:dp_attention_tokens_total{{engine="{engine}",kind="scheduled",model_name="tiny-moe"}} '
        (line,) = [line for line in metrics.splitlines() if line.startswith(counted)]
        # Both replicas computed prompts of 3 tokens and 11 more rows each, greedy and seeded; prefixes are not that long.
        assert float(line.rpartition(" ")[2]) >= 2 * (3 + 11)


def check_recording(server: ServerProcess, folder: Path) -> None:
    """All ranks execute these verbs together in a step, although they are parked when the verb comes."""
    assert server.post("/start_expert_distribution_record", {})[0] == 200
    assert server.post("/v1/completions", {"prompt": [70, 71], "max_tokens": 3})[0] == 200
    assert server.post("/stop_expert_distribution_record", {})[0] == 200
    status, answer = server.post("/dump_expert_distribution_record", {"output_dir": str(folder)})
    assert status == 200, answer
    assert list(folder.iterdir())
    status, answer = server.post("/start_expert_distribution_record", {"mode": "per_token"})
    assert (status, "recorder.mode" in answer["error"]["message"]) == (400, True)


def test_a_stopped_rank_under_load_is_named_and_everything_ends(servers: list[ServerProcess], model: Path) -> None:
    server = serve(servers, model, "--set", "launch.step_deadline_s=2")
    server.wait_ready()
    ranks = server.ranks()
    requests = LongRequests(server)
    ranks[1].suspend()
    assert server.wait(40) == 1
    assert "rank 1" in server.lines[-1], server.lines[-3:]
    assert {status for status, _ in requests.wait()} <= {0, 503}
    server.until(lambda: not server.orphans(), "end of all ranks", timeout_s=10)


def test_sigterm_during_steps_ends_in_order_and_leaves_a_receipt(
    servers: list[ServerProcess], model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "receipt.json"
    server = serve(servers, model, "--set", "server.drain_s=0.2", "--receipt", str(file))
    server.wait_ready()
    server.ranks()
    requests = LongRequests(server)
    server.signal(signal.SIGTERM)
    assert server.wait(40) == 0
    assert [answer["choices"][0]["finish_reason"] for _, answer in requests.wait()] == ["abort", "abort"]
    receipt = json.loads(file.read_text())
    assert sum(receipt["counts"]["forward"].values()) > 0
    assert [replica["dp_rank"] for replica in receipt["replicas"]] == [0, 1]
    server.until(lambda: not server.orphans(), "end of all ranks", timeout_s=10)


def test_an_idle_server_parks_and_wakes(servers: list[ServerProcess], model: Path) -> None:
    """All processes together stay below 2 % of a core by their CPU clocks, and the next request is served."""
    server = serve(servers, model)
    server.wait_ready()
    server.until(lambda: len(server.output) >= 2, "greeting")
    processes = [psutil.Process(server.pid), *server.ranks()]
    assert len(processes) == 3

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    threading.Event().wait(1.0)  # the greeting's last steps
    first = cpu_s()
    threading.Event().wait(4.0)
    assert cpu_s() - first <= 0.02 * 4.0 + 0.02  # the clock ticks in hundredths of a second
    for rank in (1, 0, 1):
        status, _ = server.post("/v1/completions", {"prompt": [70], "max_tokens": 2, "routed_dp_rank": rank})
        assert status == 200


def test_two_machines_serve_together_and_a_rank_lost_on_one_ends_both(
    servers: list[ServerProcess], model: Path
) -> None:
    endpoint = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    first = serve(servers, model, *endpoint, "--node-rank", "0")
    second = serve(servers, model, *endpoint, "--node-rank", "1")
    first.wait_ready()
    for rank in (0, 1):
        status, _ = first.post("/v1/completions", {"prompt": [70], "max_tokens": 3, "routed_dp_rank": rank})
        assert status == 200
    first.ranks()
    (remote,) = second.ranks()
    remote.kill()
    assert first.wait(30) == 1
    assert second.wait(30) == 1
    assert "rank 1" in first.lines[-1]
    assert "killed by SIGKILL on machine 1" in first.lines[-1]
    assert "killed by SIGKILL" in second.lines[-1]
    first.until(lambda: not first.orphans() and not second.orphans(), "end of all ranks", timeout_s=10)


@pytest.mark.slow
def test_machine_0_lost_ends_the_others(servers: list[ServerProcess], model: Path) -> None:
    endpoint = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    first = serve(servers, model, *endpoint, "--node-rank", "0")
    second = serve(servers, model, *endpoint, "--node-rank", "1")
    first.wait_ready()
    first.ranks()
    second.ranks()
    first.signal(signal.SIGKILL)
    assert second.wait(40) == 1
    assert "machine 0 went away" in second.lines[-1] or "rank 1" in second.lines[-1]
    first.until(lambda: not first.orphans() and not second.orphans(), "end of all ranks", timeout_s=10)


def test_ranks_under_torchrun_serve_and_end(servers: list[ServerProcess], model: Path) -> None:
    agent = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    serve_words = ["-m", "crossdock", "serve", str(model), *TWO_RANKS, "--launcher", "torchrun", "--port", "0"]
    server = start_server([*agent, *serve_words])
    servers.append(server)
    server.wait_ready()
    for rank in (0, 1):
        status, _ = server.post("/v1/completions", {"prompt": [70], "max_tokens": 3, "routed_dp_rank": rank})
        assert status == 200
    assert len(server.ranks()) >= 2
    server.signal(signal.SIGTERM)
    server.wait(60)
    server.until(lambda: not server.orphans(), "end of all ranks", timeout_s=20)


def test_the_torchrun_launcher_outside_of_torchrun_is_refused(model: Path) -> None:
    server = start_server(["-m", "crossdock", "serve", str(model), *TWO_RANKS, "--launcher", "torchrun"])
    assert server.wait(60) == 2
    assert len(server.lines) == 1
    assert "RANK is not set" in server.lines[0]


@pytest.mark.parametrize("damage", ["missing shard", "no config"])
def test_a_damaged_checkpoint_is_one_sentence_and_exit_code_2(
    servers: list[ServerProcess], tmp_path: Path, damage: str
) -> None:
    folder = write_text_model(tmp_path / "damaged")
    if damage == "no config":
        (folder / "config.json").unlink()
    server = start_server(["-m", "crossdock", "serve", str(folder), *TWO_RANKS[:-2], "--port", "0"])
    servers.append(server)
    server.process.wait(90)
    last = [line for line in server.lines if line.startswith("crossdock: ")][-1]
    assert server.process.returncode == 2, server.lines
    assert ("config.json" if damage == "no config" else "safetensors") in last
