"""Orders worked out by a process beside the rank, so that the step thread does not share its interpreter with a planner.

Plans of large models take tenths of a second of arithmetic, in which a thread would slow down every step. Messages are msgpack; the child
gets the planner's name and options, never an object, and ends when the rank's end of the socket is closed, however the rank ended.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, cast

import attrs
import msgspec

from crossdock.eplb.layer_plan import LayerPlan
from crossdock.eplb.orders import LayerOrder, Pending, PlannedMove, PlanOrder
from crossdock.errors import CrossdockError, RuntimeFault
from crossdock.placement import make_eplb_algo

START_S = 60.0
"""How long the process may take to come up."""
_END_S = 1.0


class Order(msgspec.Struct, kw_only=True):
    """To the process."""

    number: int
    plan: PlanOrder | None = None
    layer: LayerOrder | None = None


class Reply(msgspec.Struct, kw_only=True):
    """From it: an answer, or what went wrong. The first one, number -1, says that it is up."""

    number: int
    plan: PlannedMove | None = None
    layer: LayerPlan | None = None
    error: str = ""


class Desk(msgspec.Struct, kw_only=True):
    """The first message to the process."""

    algo: str
    options: dict[str, Any]


_ORDERS, _REPLIES = msgspec.msgpack.Decoder(Order), msgspec.msgpack.Decoder(Reply)


@attrs.define(kw_only=True, eq=False)
class _Answer:
    """``Pending`` of an order."""

    desk: ProcessDesk
    number: int
    reply: Reply | None = attrs.field(default=None, init=False)
    error: BaseException | None = attrs.field(default=None, init=False)

    @property
    def is_done(self) -> bool:
        self.desk.look(0.0)
        return self.reply is not None or self.error is not None

    @property
    def result(self) -> Any:
        assert self.reply is not None, "it is done and has not failed"
        return self.reply.layer if self.reply.plan is None else self.reply.plan

    def wait_briefly(self, seconds: float) -> None:
        self.desk.look(seconds)


class ProcessDesk:
    """One process, one order after the other."""

    def __init__(self, algo: str, options: Mapping[str, Any]) -> None:
        """Starts the process and waits until it is up.

        Raises:
            RuntimeFault: it does not come up; its words are on stderr.
        """
        self._first = msgspec.msgpack.encode(Desk(algo=algo, options=dict(options)))
        self._number = 0
        self._open: dict[int, _Answer] = {}
        self._start()
        if not self._connection.poll(START_S):
            raise RuntimeFault(f"the process that plans did not come up within {START_S:g} s; see the log of this rank")
        self.look(0.0)

    def plan(self, order: PlanOrder) -> Pending[PlannedMove]:
        return cast("Pending[PlannedMove]", self._submit(plan=order))

    def layer(self, order: LayerOrder) -> Pending[LayerPlan]:
        return cast("Pending[LayerPlan]", self._submit(layer=order))

    def look(self, seconds: float) -> None:
        """Takes in replies, for so long where none is there."""
        try:
            while self._connection.poll(seconds):
                reply = _REPLIES.decode(self._connection.recv_bytes())
                answer = self._open.pop(reply.number, None)
                if answer is not None:
                    answer.error = RuntimeFault(reply.error) if reply.error else None
                    answer.reply = None if reply.error else reply
                seconds = 0.0
        except (EOFError, OSError):
            code = self.process.poll()
            for answer in self._open.values():
                answer.error = RuntimeFault(f"the process that plans has ended (code {code}); see the log of this rank")
            self._open.clear()

    def abandon(self) -> None:
        """A new process, where the old one is at something."""
        if self._open or self.process.poll() is not None:
            self._open.clear()
            self.close()
            self._start()

    def close(self) -> None:
        self._connection.close()
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-m", "crossdock.eplb.desk_process", str(theirs.fileno())]
            # Planners are made for one thread, and the cores are the ranks'.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                words, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(self._first)

    def _submit(self, **order: Any) -> _Answer:
        self._number += 1
        answer = self._open[self._number] = _Answer(desk=self, number=self._number)
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(Order(number=self._number, **order)))
        except OSError:
            self.look(0.0)
        return answer


def work(connection: Connection) -> None:
    """The process: answers until the rank is gone."""
    try:
        first = msgspec.msgpack.decode(connection.recv_bytes(), type=Desk)
        algo = make_eplb_algo(first.algo, first.options)
        connection.send_bytes(msgspec.msgpack.encode(Reply(number=-1)))
        while True:
            order = _ORDERS.decode(connection.recv_bytes())
            reply = Reply(number=order.number)
            try:
                reply.plan = None if order.plan is None else order.plan.run(algo)
                reply.layer = None if order.layer is None else order.layer.run()
            except CrossdockError as error:
                reply.error = str(error)
            except Exception as error:  # noqa: BLE001 - told to the rank, whose log has it
                reply.error = f"{type(error).__name__}: {error}"
            connection.send_bytes(msgspec.msgpack.encode(reply))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as parent:
        work(parent)
