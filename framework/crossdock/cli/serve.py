"""``crossdock serve``: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import attrs

from crossdock.cli.flags import ConfigFlags
from crossdock.cli.token_files import check_output
from crossdock.config import Config
from crossdock.errors import ConfigValueError

_NO_FLAGS = ConfigFlags()


def serve(model: Path | None = None, /, *, receipt: Path | None = None, flags: ConfigFlags = _NO_FLAGS) -> int:
    """Serve a model over HTTP until SIGTERM or Ctrl-C, which let running requests finish; a second one ends at once.

    Parameters
    ----------
    model
        Folder of a Hugging Face checkpoint; the bundled crossdock-mini without it.
    receipt
        JSON file for what was chosen and how often each mode ran, written when the server ends in order.
    """
    config = flags.load(model).config
    if receipt is not None:
        config = attrs.evolve(config, server=attrs.evolve(config.server, receipt_file=str(receipt)))
    if config.server.receipt_file:
        check_output(Path(config.server.receipt_file), "--receipt")
    return run_server(config)


def run_server(config: Config) -> int:
    """Serves as ``launch`` says: as machine 0, as a later machine, or as one of torchrun's ranks. Returns the exit code."""
    from crossdock.launch.rank_logs import set_up_logs
    from crossdock.serving.job import make_job
    from crossdock.serving.machine import run_machine
    from crossdock.serving.server import serve as serve_http
    from crossdock.serving.torchrun_rank import become_rank, make_torchrun_job, torchrun_place

    set_up_logs(rank=None, log_file=None)
    if config.launch.launcher == "ray":
        raise ConfigValueError(["[launch] launcher: ray is not available in this version; use local or torchrun"])
    if config.launch.launcher == "torchrun":
        place = torchrun_place(config)
        if place.rank != 0:
            become_rank(config, place)
        return asyncio.run(serve_http(config, functools.partial(make_torchrun_job, config, place)))
    if config.launch.node_rank > 0:
        return asyncio.run(run_machine(config))
    return asyncio.run(serve_http(config, functools.partial(make_job, config)))
