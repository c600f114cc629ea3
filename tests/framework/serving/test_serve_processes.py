"""Starts and ends of a server with rank processes: faults, signals, orphans, two servers at once. Ranks are fake and quick."""

from __future__ import annotations

import glob
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from crossdock.testing.server_process import ServerProcess, start_server
from crossdock.testing.text_model import write_text_model

PROGRAM = Path(__file__).with_name("programs") / "serve_fake.py"
Start = Callable[..., ServerProcess]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("served") / "tiny", context_tokens=1_000_000)


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for temporary files of this test alone: servers of other tests leave and clear run folders too."""
    folder = tempfile.mkdtemp(prefix="cd-")
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    """Starts servers of two fake ranks; whatever they leave is killed after the test."""
    servers: list[ServerProcess] = []

    def run(*assignments: str) -> ServerProcess:
        settings = ("parallel.ranks=2", "parallel.attn_dp_size=2", "server.port=0", *assignments)
        server = start_server([str(PROGRAM), str(model), *settings])
        servers.append(server)
        return server

    yield run
    for server in servers:
        server.end()


def run_folders() -> set[str]:
    return set(glob.glob(f"{tempfile.gettempdir()}/crossdock-run-*"))


def check_nothing_left(server: ServerProcess) -> None:
    server.until(lambda: not server.orphans(), "end of all ranks", timeout_s=10)


class OpenRequest:
    """A completion that would run for long, in a thread."""

    def __init__(self, server: ServerProcess, max_tokens: int = 900_000) -> None:
        self.answer: tuple[int, Any] | None = None
        body = {"prompt": [70, 71], "max_tokens": max_tokens}
        self._thread = threading.Thread(target=self._run, args=(server, body), daemon=True)
        self._thread.start()
        server.until(lambda: self.running(server) > 0, "running request")

    def _run(self, server: ServerProcess, body: dict[str, Any]) -> None:
        self.answer = server.post("/v1/completions", body)

    @staticmethod
    def running(server: ServerProcess) -> int:
        status, loads = server.get("/v1/loads")
        return sum(load["in_flight"] for load in loads["loads"]) if status == 200 else 0

    def wait(self) -> tuple[int, Any]:
        self._thread.join(30)
        assert self.answer is not None, "the request was not answered"
        return self.answer


def test_a_server_prints_its_first_completion_and_url_and_ends_in_order_on_sigterm(start: Start) -> None:
    before = run_folders()
    server = start()
    server.wait_ready()
    server.until(lambda: len(server.output) >= 2, "greeting")
    assert "Experts are" in server.output[0]
    assert server.url in server.output[1]
    assert len(server.ranks()) == 2
    assert len(run_folders() - before) == 1
    server.signal(signal.SIGTERM)
    assert server.wait(20) == 0
    check_nothing_left(server)
    assert run_folders() <= before


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_killed_rank_ends_the_server_at_once_with_its_name(start: Start, is_loaded: bool) -> None:
    server = start()
    server.wait_ready()
    ranks = server.ranks()
    request = OpenRequest(server) if is_loaded else None
    ranks[1].kill()
    assert server.wait(20) == 1
    check_nothing_left(server)
    assert "was killed by SIGKILL; all ranks were ended" in server.lines[-1]
    assert "rank 1" in server.lines[-1]
    if request is not None:
        status, answer = request.wait()
        assert status in (0, 503)
        assert status == 0 or "SIGKILL" in answer["error"]["message"]


def test_sigkill_of_the_server_leaves_no_rank(start: Start) -> None:
    server = start()
    server.wait_ready()
    server.ranks()
    server.signal(signal.SIGKILL)
    assert server.wait(10) == -signal.SIGKILL
    check_nothing_left(server)


def test_sigterm_lets_a_request_finish_and_refuses_new_ones(start: Start) -> None:
    server = start("server.drain_s=20")
    server.wait_ready()
    server.ranks()
    request = OpenRequest(server, max_tokens=700)
    server.signal(signal.SIGTERM)
    server.until(lambda: server.get("/ready")[0] != 200, "draining")
    status, answer = server.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
    assert status in (0, 503)
    assert status == 0 or "shutting down" in answer["error"]["message"]
    status, answer = request.wait()
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert server.wait(30) == 0
    check_nothing_left(server)


def test_a_request_that_outlasts_the_drain_is_aborted_and_says_so(start: Start) -> None:
    server = start("server.drain_s=0.2")
    server.wait_ready()
    server.ranks()
    request = OpenRequest(server)
    server.signal(signal.SIGTERM)
    status, answer = request.wait()
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    assert server.wait(30) == 0
    check_nothing_left(server)


def test_a_second_signal_ends_now(start: Start) -> None:
    server = start("server.drain_s=600")
    server.wait_ready()
    server.ranks()
    OpenRequest(server)
    server.signal(signal.SIGTERM)
    server.until(lambda: any("draining" in line for line in server.lines), "draining")
    server.signal(signal.SIGTERM)
    assert server.wait(20) == 128 + signal.SIGTERM
    check_nothing_left(server)


def test_a_stopped_rank_is_ended_with_the_others(start: Start) -> None:
    """SIGSTOP: it cannot answer, and must still be gone when the server is."""
    server = start("server.drain_s=0")
    server.wait_ready()
    server.ranks()[0].suspend()
    server.signal(signal.SIGTERM)
    server.until(lambda: server.get("/ready")[0] != 200, "draining")
    server.signal(signal.SIGTERM)
    server.wait(30)
    check_nothing_left(server)


def test_two_servers_started_together_serve_their_own_ranks(start: Start) -> None:
    servers = [start(), start()]
    for server in servers:
        server.wait_ready()
        server.ranks()
    assert servers[0].url != servers[1].url
    for server in servers:
        for _ in range(4):
            status, answer = server.post("/v1/completions", {"prompt": [70, 71], "max_tokens": 2})
            assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
    servers[1].signal(signal.SIGKILL)
    servers[1].wait(10)
    status, _ = servers[0].post("/v1/completions", {"prompt": [70], "max_tokens": 1})
    assert status == 200


def test_a_port_in_use_is_one_sentence(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(f"server.port={port}")
        assert server.wait(20) == 1
        assert server.lines == [
            f"crossdock: the server cannot listen on 127.0.0.1 port {port}: Address already in use; choose another one with --port"
        ]


def test_a_killed_run_s_folder_is_removed_by_the_next_start(start: Start) -> None:
    before = run_folders()
    first = start()
    first.wait_ready()
    first.ranks()
    stale = run_folders() - before
    first.signal(signal.SIGKILL)
    first.wait(10)
    assert stale <= run_folders()
    second = start()
    second.wait_ready()
    assert not stale & run_folders()
    assert len(run_folders() - before) == 1


def test_a_full_disk_for_logs_is_one_sentence_and_the_server_goes_on(start: Start) -> None:
    """``/dev/full`` is a disk on which every write fails."""
    folder = Path(tempfile.mkdtemp())
    for rank in (0, 1):
        (folder / f"rank-{rank}.log").symlink_to("/dev/full")
    server = start(f"launch.log_folder={folder}")
    server.wait_ready()
    status, _ = server.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
    assert status == 200


def test_an_idle_server_uses_almost_no_cpu(start: Start) -> None:
    """CPU clocks of all processes over an idle stretch; the limit is 2 % of a core."""
    server = start()
    server.wait_ready()
    server.until(lambda: len(server.output) >= 2, "greeting")

    processes = [psutil.Process(server.pid), *server.ranks()]
    server.until(lambda: server.get("/v1/loads")[0] == 200, "answer")

    def cpu_s() -> float:
        return sum(process.cpu_times().user + process.cpu_times().system for process in processes)

    first, idle_s = cpu_s(), 3.0
    done = threading.Event()
    done.wait(idle_s)
    assert cpu_s() - first <= 0.02 * idle_s + 0.02  # the clock ticks in hundredths of a second
