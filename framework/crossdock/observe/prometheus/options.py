"""Options of the ``prometheus`` observer."""

from __future__ import annotations

import attrs

from crossdock.config import at_least
from crossdock.options import option


@attrs.frozen(kw_only=True)
class PrometheusOptions:
    """Where the text files go and how often they are written."""

    folder: str = option(
        "where the files go; empty takes launch.log_folder, and nothing is observed without one", default=""
    )
    every_steps: int = option("steps between two writes of the file", default=100, validator=at_least(1))
