"""What a served job really ran, asked of every replica: for ``GET /receipt``, and for a file at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from crossdock.errors import CrossdockError
from crossdock.serving.frontend import Frontend
from crossdock.serving.start_lines import say

RECEIPT_TIMEOUT_S = 30.0


async def collected_receipt(frontend: Frontend) -> dict[str, Any]:
    """The receipt of rank 0's replica, and the counts of every replica.

    Raises:
        RuntimeFault: a replica did not answer, or the engine has failed.
    """
    replies = await frontend.engine.call("receipt", {}, RECEIPT_TIMEOUT_S)
    counts = [
        {"dp_rank": replica.attn_dp_rank, "counts": reply.result.get("counts", {})}
        for replica, reply in zip(frontend.engine.replicas, replies, strict=False)
    ]
    return {**replies[0].result, "replicas": counts}


async def write_receipt(frontend: Frontend, path: str) -> None:
    """Writes the receipt as JSON before the ranks stop; nothing for an empty path. What goes wrong is one sentence: the job ends anyway."""
    if not path:
        return
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(await collected_receipt(frontend))) + b"\n")
    except (OSError, CrossdockError) as error:
        say(f"the receipt {path!r} was not written: {error}")
