"""One spelling of a checkpoint's names: renamed components, and stacked experts shown one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import attrs

from crossdock.errors import CheckpointError
from crossdock.types.model import Checkpoint, ModelInfo

if TYPE_CHECKING:
    import torch

STACKED = {
    "gate_up_proj": ("weight", ("gate_proj", "up_proj")),
    "down_proj": ("weight", ("down_proj",)),
    "gate_up_proj_scale_inv": ("weight_scale_inv", ("gate_proj", "up_proj")),
    "down_proj_scale_inv": ("weight_scale_inv", ("down_proj",)),
}
"""Last component of a tensor that stacks all experts [E, ...], what it is, and the projections in its dim 1 (gate rows first)."""
INTEGERS = ("I", "U", "BOOL")
"""How safetensors' names of dtypes without fractions begin; a weight of one would be a number cut off, or packed bits."""
LISTED = 20
"""Most tensors that a message lists of one kind; the rest is counted."""


@attrs.frozen(kw_only=True)
class _Place:
    """Where a tensor of the uniform spelling lies on disk."""

    source: str
    shape: tuple[int, ...]
    expert: int | None = None
    """Index in dim 0 of a stacked source."""
    first_row: int = 0
    """First row inside the expert's block of a stacked source."""


class UniformCheckpoint:
    """A checkpoint under the names of ``ModelInfo.tensors``. Mapping works on whole dotted components; a read touches its own bytes only."""

    def __init__(self, checkpoint: Checkpoint, renames: Sequence[tuple[str, str]] = ()) -> None:
        self._checkpoint = checkpoint
        self._places: dict[str, _Place] = {}
        table = dict(renames)
        for source in checkpoint.names():
            self._add(source, ".".join(table.get(part, part) for part in source.split(".")))

    def _add(self, source: str, name: str) -> None:
        shape = self._checkpoint.shape(source)
        *path, last = name.split(".")
        if last in STACKED and path and path[-1] == "experts" and len(shape) == 3:
            suffix, projections = STACKED[last]
            rows = shape[1] // len(projections)
            for expert in range(shape[0]):
                for i, projection in enumerate(projections):
                    place = _Place(source=source, shape=(rows, shape[2]), expert=expert, first_row=i * rows)
                    self._put(".".join([*path, str(expert), projection, suffix]), place)
            return
        self._put(name, _Place(source=source, shape=shape))

    def _put(self, name: str, place: _Place) -> None:
        if name in self._places:
            raise CheckpointError(f"{place.source} and {self._places[name].source} are both {name}")
        self._places[name] = place

    def names(self) -> Iterable[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name).shape

    def dtype_name(self, name: str) -> str:
        return self._checkpoint.dtype_name(self._place(name).source)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        place = self._place(name)
        if place.expert is None:
            return self._checkpoint.read(place.source, index)
        rows, cols = (*index, slice(None), slice(None))[:2]
        start, stop, _ = rows.indices(place.shape[0])
        expert = slice(place.expert, place.expert + 1)
        return self._checkpoint.read(
            place.source, (expert, slice(place.first_row + start, place.first_row + stop), cols)
        )[0]

    def unused(self) -> tuple[str, ...]:
        return self._checkpoint.unused()

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        return place


def check_tensors(checkpoint: Checkpoint, info: ModelInfo) -> None:
    """Compares what a checkpoint holds with what the model reads; reads headers only.

    A float8 tensor needs its block scales beside it. Extra tensors are accepted when the model ignores them by name, when they are
    integer buffers, or when they hold at most one element.

    Raises:
        CheckpointError: one message with every missing, mis-shaped, integer and extra tensor.
    """
    held = set(checkpoint.names())
    wanted = {name: spec.shape for name, spec in info.tensors.items()}
    for name in list(wanted):
        if name in held and checkpoint.dtype_name(name).startswith("F8_"):
            wanted[f"{name}_scale_inv"] = tuple(-(-size // 128) for size in wanted[name])
    missing = sorted(wanted.keys() - held)
    shapes = {name: checkpoint.shape(name) for name in wanted.keys() & held}
    wrong = sorted(
        f"{name} is {list(found)}, not {list(wanted[name])}" for name, found in shapes.items() if found != wanted[name]
    )
    kinds = sorted(
        f"{name} is {checkpoint.dtype_name(name)}"
        for name in shapes
        if checkpoint.dtype_name(name).startswith(INTEGERS)
    )
    extra = sorted(name for name in held - wanted.keys() if not _is_ignored(checkpoint, name, info.ignored_tensors))
    parts = [
        _listed("missing", missing),
        _listed("of a wrong shape", wrong),
        _listed("of a dtype without fractions", kinds),
        _listed("not part of the model", extra),
    ]
    if any(parts):
        raise CheckpointError(
            f"the checkpoint does not fit its {info.model_type} config: " + "; ".join(filter(None, parts))
        )


def _is_ignored(checkpoint: Checkpoint, name: str, patterns: Sequence[str]) -> bool:
    if any(matches(name, pattern) for pattern in patterns) or checkpoint.dtype_name(name).startswith(INTEGERS):
        return True
    return all(size <= 1 for size in checkpoint.shape(name)) or 0 in checkpoint.shape(name)


def matches(name: str, pattern: str) -> bool:
    """Component by component; ``*`` stands inside one component, a last ``**`` for any rest."""
    parts, wanted = name.split("."), pattern.split(".")
    if wanted[-1] == "**":
        wanted = wanted[:-1]
        parts = parts[: len(wanted)]
    return len(parts) == len(wanted) and all(fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=True))


def _listed(kind: str, items: list[str]) -> str:
    if not items:
        return ""
    rest = f" and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return f"{len(items)} {kind}: " + ", ".join(items[:LISTED]) + rest
