"""``crossdock serve`` with fake ranks: ``serve_fake.py MODEL [--set a.b=c ...]``. Starts in a second."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import attrs
from crossdock.config import Config
from crossdock.config_load import flag_layers, load_config, set_layer
from crossdock.errors import CrossdockError
from crossdock.launch.rank_logs import set_up_logs
from crossdock.serving.job import Job, make_job
from crossdock.serving.server import serve

RANK = Path(__file__).with_name("fake_rank.py")


def fake_job(config: Config) -> Job:
    """The job of ``crossdock serve`` with another rank program."""
    job = make_job(config)
    job.supervisor.commands = [
        attrs.evolve(command, argv=(sys.executable, str(RANK), command.argv[-1])) for command in job.supervisor.commands
    ]
    if job.listener is not None:
        job.listener.close()  # fake ranks meet nobody, and serving the store would import torch
        job.listener = None
    return job


def main(argv: list[str]) -> int:
    assignments = [word for word in argv[1:] if "=" in word]
    config = load_config([set_layer(assignments), *flag_layers({"MODEL": ("checkpoint.path", argv[0])})]).config
    set_up_logs(rank=None, log_file=None)
    try:
        return asyncio.run(serve(config, lambda: fake_job(config)))
    except CrossdockError as error:
        print(f"crossdock: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
