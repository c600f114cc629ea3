"""One rank's end of the link: a ZeroMQ DEALER that implements ``RankLink``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import zmq

from crossdock.serving.link_keys import LinkKeys
from crossdock.serving.messages import decode_incoming, encode_message
from crossdock.types.link import Incoming, Outgoing

LINGER_MS = 2_000
"""How long a closing rank waits for its last messages to leave; a ``Fatal`` must still arrive."""


@attrs.define(kw_only=True, eq=False)
class ZmqRankLink:
    """``RankLink`` over ZeroMQ. One thread uses it: the step loop's."""

    rank: int
    _context: zmq.Context[zmq.Socket[bytes]] = attrs.field(repr=False, alias="context")
    _socket: zmq.Socket[bytes] = attrs.field(repr=False, alias="socket")

    def poll(self, timeout_s: float | None) -> Sequence[Incoming]:
        """All messages that have arrived; waits up to ``timeout_s`` for the first one (None: until one comes)."""
        timeout_ms = None if timeout_s is None else max(0, round(timeout_s * 1000))
        if not self._socket.poll(timeout_ms, zmq.POLLIN):
            return ()
        messages: list[Incoming] = []
        while True:
            try:
                tag, body = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(decode_incoming(tag, body))

    def send(self, message: Outgoing) -> None:
        """Queues the message; never blocks the step."""
        self._socket.send_multipart(encode_message(message))

    def close(self) -> None:
        """Sends what is queued, then closes."""
        self._socket.close(linger=LINGER_MS)
        self._context.term()


def connect_rank_link(rank: int, endpoint: str, keys: LinkKeys | None) -> ZmqRankLink:
    """A link of ``rank`` to the frontend's ``endpoint`` (``ipc://`` or ``tcp://``), authenticated by ``keys`` over tcp."""
    context = zmq.Context[zmq.Socket[bytes]]()
    socket = context.socket(zmq.DEALER)
    connect_dealer(socket, rank_identity(rank), endpoint, keys)
    return ZmqRankLink(rank=rank, context=context, socket=socket)


def connect_dealer(socket: zmq.Socket[Any], identity: bytes, endpoint: str, keys: LinkKeys | None) -> None:
    """Connects a DEALER socket under ``identity``."""
    socket.setsockopt(zmq.IDENTITY, identity)
    # No high-water mark: traffic is bounded by the admitted requests, and a blocked send would stall every rank.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(endpoint)


def rank_identity(rank: int) -> bytes:
    """The routing id under which the frontend knows a rank."""
    return b"rank-%d" % rank
