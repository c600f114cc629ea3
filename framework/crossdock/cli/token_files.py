"""Files of token ids and results, as ``logits`` and ``generate`` read and write them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from crossdock.errors import RuntimeFault, UsageError


def read_ids(path: Path) -> list[list[int]]:
    """A JSON list of lists of token ids, of any lengths from 1 on.

    Raises:
        UsageError: no such file, something else in it, or a list of length 0; names the place.
    """
    try:
        prompts = msgspec.json.decode(path.read_bytes(), type=list[list[int]])
    except OSError as error:
        raise UsageError(f"--ids {str(path)!r} cannot be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"--ids {str(path)!r} must be a JSON list of lists of token ids: {error}") from error
    if not prompts:
        raise UsageError(f"--ids {str(path)!r} holds no prompt; give at least one list of token ids")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {index} of {str(path)!r} has length 0; every prompt needs at least one token id")
    return prompts


def check_output(path: Path | None, flag: str = "--out") -> None:
    """Raises ``UsageError`` before anything is computed when ``path`` cannot become a file."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{flag} {str(path)!r} is a folder; give the name of a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"{flag} {str(path)!r}: the folder {str(path.absolute().parent)!r} does not exist; make it first"
        )


def write_json(path: Path, value: object) -> None:
    """``value`` as JSON; raises ``RuntimeFault`` when the disk does not take it."""
    try:
        path.write_text(json.dumps(value) + "\n", encoding="utf-8")
    except OSError as error:
        raise RuntimeFault(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
