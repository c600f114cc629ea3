"""``config.json`` of a checkpoint folder; torch is not imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crossdock.errors import CheckpointError


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` as found, with the end-of-sequence ids of ``generation_config.json`` where that file names some.

    Raises:
        CheckpointError: no folder, no ``config.json``, no JSON object, or no ``model_type`` in it.
    """
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {str(folder)!r} does not exist or is no folder")
    config = _read_object(folder / "config.json")
    if config is None:
        raise CheckpointError(
            f"checkpoint folder {str(folder)!r} has no config.json; give the folder of a Hugging Face checkpoint"
        )
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{str(folder / 'config.json')!r} has no model_type; it chooses the model plugin")
    generation = _read_object(folder / "generation_config.json") or {}
    if generation.get("eos_token_id") is not None:
        config["eos_token_id"] = generation["eos_token_id"]
    return config


def _read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when the file is absent."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{str(path)!r} holds no JSON object")
    return value
