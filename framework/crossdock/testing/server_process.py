"""A server as a user starts it: a process of its own, watched from outside. For tests of starts, ends and faults."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs
import psutil

from crossdock.errors import RuntimeFault

_URL = re.compile(r"HTTP on (http://\S+)")
POLL_S = 0.02


@attrs.define(kw_only=True, eq=False)
class ServerProcess:
    """One started server. ``lines`` grows while it runs."""

    process: subprocess.Popen[str]
    lines: list[str]
    """Lines of stderr so far."""
    output: list[str]
    """Lines of stdout so far."""
    family: list[psutil.Process] = attrs.field(factory=list)
    """Processes that the server started, as they were last seen by ``ranks``."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        """Where it listens; waits for the line that says so."""
        self.until(lambda: self._url() is not None or self.process.poll() is not None, "the line with the URL")
        found = self._url()
        if found is None:
            raise RuntimeFault(f"the server ended with code {self.process.returncode}: {self.lines[-3:]}")
        return found

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        """Waits for a condition outside of this process.

        Raises:
            RuntimeFault: it did not hold in time; the message has the server's last lines.
        """
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise RuntimeFault(f"no {what} within {timeout_s:g} s; the server's last lines: {self.lines[-5:]}")
            time.sleep(POLL_S)

    def wait_ready(self, timeout_s: float = 90.0) -> None:
        """Until ``/ready`` is 200."""

        def is_over() -> bool:
            return self.process.poll() is not None or self.get("/ready")[0] == 200

        self.until(is_over, "/ready", timeout_s)
        if self.process.poll() is not None:
            raise RuntimeFault(f"the server ended with code {self.process.returncode}: {self.lines[-3:]}")

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON; status 0 when nobody answers."""
        return self._call(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 60.0) -> tuple[int, Any]:
        """Status and JSON of a POST; status 0 when the connection broke."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        return self._call(request, timeout_s)

    def ranks(self) -> list[psutil.Process]:
        """The processes below the server, ranks in order of their start; remembered for ``orphans``."""
        self.family = psutil.Process(self.pid).children(recursive=True)
        return [child for child in self.family if any("rank" in word for word in child.cmdline())]

    def orphans(self) -> list[psutil.Process]:
        """Processes of ``family`` that still run."""
        return [child for child in self.family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeFault(f"the server did not end within {timeout_s:g} s: {self.lines[-5:]}") from error

    def end(self) -> None:
        """Kills what is left of it."""
        for child in [*self.orphans(), *self._children()]:
            try:
                child.kill()
            except psutil.Error:
                continue
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _url(self) -> str | None:
        return next((found[1] for line in list(self.lines) if (found := _URL.search(line))), None)

    def _call(self, request: urllib.request.Request, timeout_s: float = 5.0) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, _json(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _json(error.read())
        except OSError:
            return 0, None


def start_server(
    argv: Sequence[str], environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> ServerProcess:
    """Starts ``python ARGV`` as a server and reads its output in the background."""
    process = subprocess.Popen(
        [sys.executable, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=None if environment is None else dict(environment),
        cwd=cwd,
    )
    server = ServerProcess(process=process, lines=[], output=[])
    for stream, lines in ((process.stderr, server.lines), (process.stdout, server.output)):
        assert stream is not None
        threading.Thread(target=_read, args=(stream, lines), daemon=True).start()
    return server


def _read(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line.rstrip("\n"))


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")
