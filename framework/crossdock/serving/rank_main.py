"""The process of one rank: ``python -m crossdock.serving.rank_main SPEC``."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import structlog

from crossdock.errors import CrossdockError, ExchangeTimeout, RankLost
from crossdock.launch.parent_death import die_with_parent
from crossdock.launch.rank_logs import set_up_logs
from crossdock.serving.link_keys import link_keys
from crossdock.serving.rank_link import connect_rank_link
from crossdock.serving.rank_spec import RankSpec, read_rank_spec
from crossdock.types.link import Fatal, RankLink

RankBody: TypeAlias = Callable[[RankSpec, RankLink], None]
"""Builds a rank, sends ``Ready``, and steps until ``Stop``."""
_LOG = structlog.get_logger("crossdock.rank")


def run_rank_process(spec_path: Path, body: RankBody) -> int:
    """Runs ``body`` as the rank of a spec; an exception becomes a ``Fatal`` to the frontend and the exit code."""
    spec = read_rank_spec(spec_path)
    die_with_parent(spec.parent_pid)
    set_up_logs(rank=spec.rank, log_file=None if spec.log_file is None else Path(spec.log_file))
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks a rank that hangs where it is
    keys = None if spec.link_secret is None else link_keys(spec.link_secret)
    link = connect_rank_link(spec.rank, spec.link_endpoint, keys)
    try:
        body(spec, link)
    except CrossdockError as error:
        _LOG.error("rank ends", reason=str(error))
        culprit = culprit_of(error)
        link.send(Fatal(rank=spec.rank, message=str(error), culprit_rank=culprit, exit_code=error.exit_code))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the frontend must learn of anything that ends a rank
        _LOG.exception("rank ends")
        link.send(Fatal(rank=spec.rank, message=f"unexpected {type(error).__name__}: {error}"))
        return 1
    finally:
        link.close()
    return 0


def culprit_of(error: CrossdockError) -> int | None:
    """The rank that an error names as its cause."""
    if isinstance(error, ExchangeTimeout) and error.missing_ranks:
        return error.missing_ranks[0]
    return error.rank if isinstance(error, RankLost) else None


def main(argv: Sequence[str]) -> int:
    """Entry of the process."""
    return run_rank_process(Path(argv[1]), _model_rank)


def _model_rank(spec: RankSpec, link: RankLink) -> None:
    # Imported here: parent's death and link are set up before torch is, and a broken import is reported like any fault.
    from crossdock.serving.rank_body import run_model_rank

    run_model_rank(spec, link)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
