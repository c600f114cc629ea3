"""The frontend's end of the link: one ZeroMQ ROUTER that all ranks connect to."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import attrs
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from crossdock.errors import MisuseError, RankLost
from crossdock.serving.link_keys import LinkKeys
from crossdock.serving.messages import decode_outgoing, encode_message
from crossdock.serving.rank_link import rank_identity
from crossdock.types.link import Incoming, Outgoing

MESSAGES_IN_A_ROW = 32


@attrs.define(kw_only=True, eq=False)
class FrontendLink:
    """Sends to ranks by number and yields what they send."""

    endpoint: str
    """Where ranks connect: bound before it is published, so that nobody else can take it."""
    _context: zmq.asyncio.Context = attrs.field(repr=False, alias="context")
    _socket: zmq.asyncio.Socket = attrs.field(repr=False, alias="socket")
    _authenticator: AsyncioAuthenticator | None = attrs.field(repr=False, alias="authenticator")

    async def send(self, rank: int, message: Incoming) -> None:
        """Sends to one rank.

        Raises:
            RankLost: the rank has not connected or is gone.
        """
        tag, body = encode_message(message)
        try:
            await self._socket.send_multipart((rank_identity(rank), tag, body))
        except zmq.ZMQError as error:
            raise RankLost(f"rank {rank} cannot be reached over the link: {error}", rank=rank) from error

    async def send_all(self, ranks: Iterable[int], message: Incoming) -> None:
        """Sends to each of ``ranks``, skipping those that are gone: their exit is reported by the supervisor."""
        for rank in ranks:
            try:
                await self.send(rank, message)
            except RankLost:
                continue

    async def messages(self, on_bad: Callable[[Exception], None]) -> AsyncIterator[Outgoing]:
        """Messages of all ranks as they come; one that cannot be decoded goes to ``on_bad`` and is dropped."""
        for count in itertools.count(1):
            frames = await self._socket.recv_multipart()
            if count % MESSAGES_IN_A_ROW == 0:
                await asyncio.sleep(0)  # awaiting a message that is there already does not let other tasks run
            try:
                _, tag, body = frames
                message = decode_outgoing(tag, body)
            except (MisuseError, ValueError) as error:  # one bad frame must not end the link of all ranks
                on_bad(error)
                continue
            yield message

    def close(self) -> None:
        """Closes at once; a link is closed after its ranks have ended."""
        self._socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def bind_ipc_link(folder: Path) -> FrontendLink:
    """A link for ranks of this machine, in a private folder of this run."""
    return _bound_link(f"ipc://{folder / 'link'}", keys=None, published_host=None)


def bind_tcp_link(bind_host: str, published_host: str, keys: LinkKeys) -> FrontendLink:
    """A link for several machines on a port that the system chooses; only holders of ``keys`` get in."""
    address = f"[{bind_host}]" if _is_ipv6(bind_host) else bind_host
    return _bound_link(f"tcp://{address}:*", keys=keys, published_host=published_host)


def _bound_link(address: str, *, keys: LinkKeys | None, published_host: str | None) -> FrontendLink:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    authenticator = None
    if keys is not None:
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(
            domain="*", credentials_provider=_OneClient(public_key=keys.client_public)
        )
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(address)
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if published_host is not None:
        port = endpoint.rpartition(":")[2]
        endpoint = f"tcp://{published_host}:{port}"
    return FrontendLink(endpoint=endpoint, context=context, socket=socket, authenticator=authenticator)


@attrs.frozen(kw_only=True)
class _OneClient:
    """Lets in exactly the client key of this run. Keys are Z85 text on both sides."""

    public_key: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self.public_key)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
