"""``crossdock env``: what this environment can run, and which optional packages fit it."""

from __future__ import annotations

import json
from typing import Literal

from crossdock.environment_report import environment_report


def env(*, format: Literal["text", "json"] = "text") -> None:
    """What this environment can run, and which optional packages fit it.

    Parameters
    ----------
    format
        ``json`` for machines.
    """
    report = environment_report()
    if format == "json":
        print(json.dumps(report, indent=2))
        return
    for section, values in report.items():
        print(f"{section}:")
        for name, value in values.items():
            print(f"  {name}: {value}")
