"""What a rank process is started from: one JSON file in the run's private folder, so that no secret is on a command line."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import msgspec

from crossdock.config import Config
from crossdock.config_codec import decode_config, encode_config
from crossdock.launch.rendezvous import StoreAddress


@attrs.frozen(kw_only=True)
class RankSpec:
    """One rank of one run."""

    rank: int
    local_rank: int
    """Number among the ranks of its machine: the index of its GPU."""
    store: StoreAddress
    link_endpoint: str
    link_secret: str | None = attrs.field(default=None, repr=False)
    """For a link over tcp; None over ipc."""
    parent_pid: int
    """The rank dies with this process."""
    log_file: str | None = None
    config_json: str = attrs.field(repr=False)

    @property
    def config(self) -> Config:
        return decode_config(self.config_json)


def config_json(config: Config) -> str:
    """The configuration as a ``RankSpec`` holds it."""
    return encode_config(config).decode()


def write_rank_spec(folder: Path, spec: RankSpec) -> Path:
    """Writes the file of a rank, readable by this user only."""
    path = folder / f"rank-{spec.rank}.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(spec))
    return path


def read_rank_spec(path: Path) -> RankSpec:
    """The spec in a file that ``write_rank_spec`` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=RankSpec)
