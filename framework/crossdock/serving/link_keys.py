"""CURVE keys of the link between machines.

One secret gives both key pairs: whoever knows it may join. Without a key file the frontend draws a secret for the run and
hands it out through the rendezvous store, so the link is as trusted as the rendezvous network; with a key file nothing
secret travels.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

import attrs
import zmq
import zmq.utils.z85

from crossdock.errors import ConfigFileError

MIN_SECRET_CHARACTERS = 32


@attrs.frozen(kw_only=True)
class LinkKeys:
    """Z85 key pairs (40 characters each) of the two ends."""

    server_public: bytes
    server_secret: bytes = attrs.field(repr=False)
    client_public: bytes
    client_secret: bytes = attrs.field(repr=False)


def drawn_link_secret() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


def read_link_secret(path: Path) -> str:
    """The secret in a key file.

    Raises:
        ConfigFileError: the file cannot be read or holds fewer than 32 characters.
    """
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(
            f"link key file {str(path)!r} cannot be read: {error}; write one with a random secret"
        ) from error
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigFileError(
            f"link key file {str(path)!r} holds {len(secret)} characters, at least {MIN_SECRET_CHARACTERS} are needed; "
            "write a random secret into it and copy it to each machine"
        )
    return secret


def link_keys(secret: str) -> LinkKeys:
    """Both key pairs that follow from a secret."""
    server = _secret_key(secret, b"server")
    client = _secret_key(secret, b"client")
    return LinkKeys(
        server_public=zmq.curve_public(server),
        server_secret=server,
        client_public=zmq.curve_public(client),
        client_secret=client,
    )


def _secret_key(secret: str, role: bytes) -> bytes:
    digest = hashlib.blake2b(secret.encode(), digest_size=32, person=role).digest()
    return zmq.utils.z85.encode(digest)
