"""Messages over ZeroMQ: every class both ways, order, authentication, isolation of two runs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import attrs
import pytest
import zmq
from crossdock.errors import ConfigFileError, MisuseError, RankLost
from crossdock.serving.frontend_link import bind_ipc_link, bind_tcp_link
from crossdock.serving.link_keys import link_keys, read_link_secret
from crossdock.serving.messages import decode_incoming, decode_outgoing, encode_message
from crossdock.serving.rank_link import connect_rank_link
from crossdock.types.link import (
    AbortRequests,
    AddRequests,
    Control,
    ControlReply,
    Fatal,
    Outputs,
    Parked,
    Ready,
    Stop,
    Wake,
)
from crossdock.types.request import EngineOutput, EngineRequest, ReplicaLoad, SamplingParams, TokenLogprob

SAMPLING = SamplingParams(max_new_tokens=3, logit_bias=((5, -1.5),), seed=2**63 - 1, stop_token_ids=(1, 2), logprobs=0)
REQUEST = EngineRequest(rid="r-0", prompt_ids=(1, 2, 3), sampling=SAMPLING)
pytestmark = pytest.mark.timeout(60)
INCOMING = (
    AddRequests(requests=(REQUEST, attrs.evolve(REQUEST, rid="r-1", is_health_check=True))),
    AbortRequests(rids=("r-0",)),
    Wake(step=4),
    Stop(),
    Control(verb="receipt", call_id=3, arguments={"a": [1, {"b": None}]}),
)
SCORE = TokenLogprob(token_id=4, logprob=-0.25, top=((4, -0.25), (9, -3.0)), rank=1)
OUTGOING = (
    Outputs(
        outputs=(EngineOutput(rid="r-0", token_ids=(4,), logprobs=(SCORE,), prompt_logprobs=(None, SCORE), error="x"),),
        load=ReplicaLoad(attn_dp_rank=0, running=1, waiting=0, tokens=4, attention_pairs=10, kv_usage=0.5, step=8),
    ),
    Ready(rank=1, receipt={"kv_tokens": 5}),
    Parked(rank=1, step=9),
    ControlReply(rank=0, call_id=3, result={"x": 1}),
    Fatal(rank=2, message="no", culprit_rank=1),
)


@pytest.mark.parametrize("message", INCOMING)
def test_messages_to_a_rank_come_out_as_they_went_in(message: object) -> None:
    assert decode_incoming(*encode_message(message)) == message  # type: ignore[arg-type]


@pytest.mark.parametrize("message", OUTGOING)
def test_messages_to_the_frontend_come_out_as_they_went_in(message: object) -> None:
    assert decode_outgoing(*encode_message(message)) == message  # type: ignore[arg-type]


def test_what_is_no_message_is_an_error() -> None:
    with pytest.raises(MisuseError, match="unknown tag"):
        decode_incoming(b"?", b"")
    with pytest.raises(MisuseError, match="does not fit"):
        decode_incoming(b"a", b"\x80")
    with pytest.raises(MisuseError, match="does not fit"):
        decode_outgoing(b"o", b"cos\nsystem\n")


async def _round_trip(endpoint_kind: str, folder: Path) -> None:
    keys = link_keys("s" * 32) if endpoint_kind == "tcp" else None
    link = bind_ipc_link(folder) if keys is None else bind_tcp_link("127.0.0.1", "127.0.0.1", keys)
    received: list[object] = []

    def rank() -> None:
        own = connect_rank_link(1, link.endpoint, keys)
        own.send(OUTGOING[1])
        while len(received) < len(INCOMING):
            received.extend(own.poll(None))
        assert own.poll(0) == ()
        for message in OUTGOING:
            own.send(message)
        own.close()

    thread = threading.Thread(target=rank, daemon=True)
    thread.start()
    messages = link.messages(pytest.fail)
    assert await anext(messages) == OUTGOING[1]
    for message in INCOMING:
        await link.send(1, message)
    for message in OUTGOING:
        assert await anext(messages) == message
    with pytest.raises(RankLost, match="rank 5"):
        await link.send(5, Stop())
    await asyncio.to_thread(thread.join)
    link.close()
    assert received == list(INCOMING)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_both_ends_exchange_every_message_in_order(kind: str, tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(_round_trip(kind, tmp_path), 30))


@pytest.mark.parametrize("stranger", ["other key", "no key"])
def test_a_stranger_is_not_let_in_over_tcp(stranger: str) -> None:
    async def scenario() -> None:
        keys = link_keys("s" * 32)
        link = bind_tcp_link("127.0.0.1", "127.0.0.1", keys)
        wrong = attrs.evolve(link_keys("t" * 32), server_public=keys.server_public) if stranger == "other key" else None
        outside = connect_rank_link(0, link.endpoint, wrong)
        outside.send(OUTGOING[2])
        inside = connect_rank_link(1, link.endpoint, keys)
        inside.send(OUTGOING[1])
        messages = link.messages(pytest.fail)
        assert await anext(messages) == OUTGOING[1]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(messages), 0.3)
        inside.close()
        outside._socket.close(linger=0)
        link.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_bad_frame_is_reported_and_the_next_message_arrives(tmp_path: Path) -> None:
    async def scenario() -> None:
        link = bind_ipc_link(tmp_path)
        bad: list[Exception] = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(link.endpoint)
            socket.send_multipart([b"junk"])
            socket.send_multipart([b"o", b"\xc1"])
            socket.send_multipart(list(encode_message(OUTGOING[2])))
            assert await anext(link.messages(bad.append)) == OUTGOING[2]
        assert len(bad) == 2
        link.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_keys_follow_from_the_secret_and_do_not_show_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("x" * 40 + "\n")
    secret = read_link_secret(path)
    assert link_keys(secret) == link_keys(secret)
    assert link_keys(secret) != link_keys(secret + "y")
    keys = link_keys(secret)
    assert keys.server_secret.decode() not in repr(keys)
    path.write_text("short")
    with pytest.raises(ConfigFileError, match="32"):
        read_link_secret(path)
    with pytest.raises(ConfigFileError, match="cannot be read"):
        read_link_secret(tmp_path / "absent")
