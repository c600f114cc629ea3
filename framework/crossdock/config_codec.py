"""The configuration between processes: JSON, declared classes, nothing unpickled."""

from __future__ import annotations

import msgspec

from crossdock.config import Config


def encode_config(config: Config) -> bytes:
    """JSON of a config, as it is handed to a rank process."""
    return msgspec.json.encode(config)


def decode_config(data: bytes | str) -> Config:
    """The config that ``encode_config`` wrote; raises ``msgspec.ValidationError`` for anything else."""
    return msgspec.json.decode(data, type=Config)
