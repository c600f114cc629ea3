"""Messages of ``crossdock.types.link`` on the wire: a one-byte tag and a msgpack body, decoded to the class of the tag.

msgspec can tag only its own Struct classes in a union, so the tag travels as a frame of its own. Nothing is unpickled,
and a body that does not fit its class is an error before any code sees it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from crossdock.errors import MisuseError
from crossdock.types.link import (
    AbortRequests,
    AddRequests,
    Control,
    ControlReply,
    Fatal,
    Incoming,
    Outgoing,
    Outputs,
    Parked,
    Ready,
    Stop,
    Wake,
)

Frames: TypeAlias = tuple[bytes, bytes]

_INCOMING: dict[bytes, type[Any]] = {b"a": AddRequests, b"x": AbortRequests, b"w": Wake, b"s": Stop, b"c": Control}
_OUTGOING: dict[bytes, type[Any]] = {b"o": Outputs, b"r": Ready, b"p": Parked, b"c": ControlReply, b"f": Fatal}

_TAGS: dict[type[Any], bytes] = {cls: tag for table in (_INCOMING, _OUTGOING) for tag, cls in table.items()}
_INCOMING_DECODERS = {tag: msgspec.msgpack.Decoder(cls) for tag, cls in _INCOMING.items()}
_OUTGOING_DECODERS = {tag: msgspec.msgpack.Decoder(cls) for tag, cls in _OUTGOING.items()}
_ENCODER = msgspec.msgpack.Encoder()


def encode_message(message: Incoming | Outgoing) -> Frames:
    """Frames (tag, body) of one message."""
    return _TAGS[type(message)], _ENCODER.encode(message)


def decode_incoming(tag: bytes, body: bytes) -> Incoming:
    """A message from the frontend to a rank.

    Raises:
        MisuseError: unknown tag, or a body that is not of the tag's class.
    """
    message: Incoming = _decode(_INCOMING_DECODERS, tag, body)
    return message


def decode_outgoing(tag: bytes, body: bytes) -> Outgoing:
    """A message from a rank to the frontend. Raises as ``decode_incoming``."""
    message: Outgoing = _decode(_OUTGOING_DECODERS, tag, body)
    return message


def _decode(decoders: dict[bytes, msgspec.msgpack.Decoder[Any]], tag: bytes, body: bytes) -> Any:
    decoder = decoders.get(tag)
    if decoder is None:
        raise MisuseError(f"link message with unknown tag {tag!r}; known: {sorted(decoders)}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise MisuseError(f"link message {tag!r} of {len(body)} bytes does not fit its class: {error}") from error
