"""The store's port is taken before anybody hears of it, and endpoints are checked."""

from __future__ import annotations

import pytest
from crossdock.errors import ConfigValueError, RuntimeFault
from crossdock.launch.rendezvous import StoreAddress, bind_store_socket, host_store, join_store, parse_endpoint

pytestmark = pytest.mark.timeout(60)


def test_a_bound_socket_becomes_the_store_on_the_same_port() -> None:
    listener = bind_store_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(RuntimeFault, match=f"port {port}"):
        bind_store_socket("127.0.0.1", port)
    store = host_store(listener)
    client = join_store(StoreAddress(host="127.0.0.1", port=port), 10)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_nobody_at_the_endpoint_is_one_sentence() -> None:
    listener = bind_store_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(RuntimeFault, match="start machine 0 first"):
        join_store(StoreAddress(host="127.0.0.1", port=port), 1)


@pytest.mark.parametrize(
    ("text", "expected"), [("host:29500", ("host", 29500)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:5", ("::1", 5))]
)
def test_endpoints_are_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", "host", "host:", ":5", "host:0", "host:65536", "host:abc"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigValueError, match="host:port"):
        parse_endpoint(text)
