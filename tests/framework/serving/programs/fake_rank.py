"""A rank process without a model: the real process entry, link and parent-death signal around the fake engine."""

from __future__ import annotations

import sys
from pathlib import Path

from crossdock.serving.rank_main import run_rank_process
from crossdock.serving.rank_spec import RankSpec
from crossdock.testing.fake_engine import run_fake_rank
from crossdock.types.link import RankLink


def body(spec: RankSpec, link: RankLink) -> None:
    run_fake_rank(link, attn_dp_rank=spec.rank, rank=spec.rank)


if __name__ == "__main__":
    sys.exit(run_rank_process(Path(sys.argv[1]), body))
