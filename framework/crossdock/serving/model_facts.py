"""What the frontend knows of the served model, read from its folder without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from crossdock.errors import CheckpointError, RequestError


@attrs.frozen(kw_only=True)
class ModelFacts:
    """What the frontend knows of the served model."""

    model_id: str
    root: str
    context_tokens: int
    """Longest sequence, prompt and output together."""
    vocab_size: int
    created: int

    def check_name(self, name: str | None, *, http_status: int = 400) -> None:
        """Raises ``RequestError`` for another model's name; None means this model. 400 where it is a field, 404 in a path."""
        if name is not None and name != self.model_id:
            message = f"model: {name!r} is not served here; this server has {self.model_id!r}"
            raise RequestError(message, field="model", http_status=http_status)


def read_model_facts(folder: Path, *, model_id: str, max_sequence_tokens: int | None, created: int) -> ModelFacts:
    """Facts from ``config.json``; the context is also bounded by what a replica's KV cache can hold.

    Raises:
        CheckpointError: there is no such file, or a number that is needed is absent.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; MODEL must be a folder with a checkpoint") from error
    context = _positive(config, "max_position_embeddings", path)
    return ModelFacts(
        model_id=model_id,
        root=str(folder),
        context_tokens=context if max_sequence_tokens is None else min(context, max_sequence_tokens),
        vocab_size=_positive(config, "vocab_size", path),
        created=created,
    )


def _positive(config: Any, key: str, path: Path) -> int:
    value = config.get(key) if isinstance(config, dict) else None
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {key} must be a positive number, found {value!r}")
    return value
