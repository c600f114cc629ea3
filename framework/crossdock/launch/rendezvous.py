"""Where ranks meet: the TCPStore of torch.distributed, on a port that is bound before anybody is told of it."""

from __future__ import annotations

import datetime
import socket
from typing import TYPE_CHECKING

import attrs

from crossdock.errors import ConfigValueError, RuntimeFault

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

STORE_TIMEOUT_S = 600.0


@attrs.frozen(kw_only=True)
class StoreAddress:
    """Where the store listens, and the prefix of this run's keys in it."""

    host: str
    port: int
    prefix: str = "crossdock"


def bind_store_socket(host: str, port: int) -> socket.socket:
    """A listening socket for the store; port 0 takes a free one. Cheap: torch is not imported.

    Raises:
        RuntimeFault: the port is in use or the host is not one of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise RuntimeFault(
            f"the rendezvous cannot listen on {host} port {port}: {error.strerror}; choose another endpoint"
        ) from error
    return listener


def host_store(listener: socket.socket) -> TCPStore:
    """Serves the store on a bound socket, which it takes over. Imports torch (1 to 2 s): call it in a thread."""
    from torch._C._distributed_c10d import TCPStore

    host, port = listener.getsockname()[:2]
    return TCPStore(
        host_name=host,
        port=port,
        world_size=None,
        is_master=True,
        timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(address: StoreAddress, timeout_s: float) -> TCPStore:
    """A client of the store.

    Raises:
        RuntimeFault: nobody listens there within ``timeout_s``.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    try:
        return TCPStore(
            host_name=address.host,
            port=address.port,
            world_size=None,
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except DistError as error:
        message = f"no rendezvous at {address.host} port {address.port} within {timeout_s:g} s; start machine 0 first"
        raise RuntimeFault(message) from error


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``launch.rdzv_endpoint``.

    Raises:
        ConfigValueError: not ``host:port``.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigValueError([f"launch.rdzv_endpoint: must be host:port with the port of machine 0, found {text!r}"])
    return host.strip("[]"), int(port)
