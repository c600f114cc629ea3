"""Recorded expert loads: counts of tokens for each step, layer and logical expert.

=====================  ==============================================================================================
form                   content
=====================  ==============================================================================================
ours                   ``.npz`` with ``load`` [steps, layers, experts] or [layers, experts]; ``.npy`` of the same
SGLang ``stat``        ``.pt``, ``.json`` or inline JSON with ``logical_count`` [steps, layers, experts] or [layers, experts]
SGLang ``per_pass``,   ``.pt`` with ``records`` (``global_physical_count`` [layers, slots] a pass and rank) and
``per_token``          ``last_physical_to_logical_map``; counts of one pass are summed over the ranks' files. A record of ours
                       from before a rebalance has its own ``physical_to_logical_map``
vLLM                   ``.jsonl`` of ``eplb_load_stats`` records: ``expert_load`` and ``p2l_map`` [layers, slots]
=====================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from crossdock.errors import ConfigValueError, LoadFileError
from crossdock.placement_io.content import Content, as_array, read_content
from crossdock.placement_io.placement_files import MAP_KEY
from crossdock.types.placement import ExpertLoad

_STEP_KEYS = ("load", "logical_count")
_RECORD_KEYS = frozenset({"forward_pass_id", "rank", "global_physical_count"})
VLLM_LOAD = "eplb_load_stats"

Counts = npt.NDArray[np.float64]


def read_load(sources: Sequence[str | Path]) -> ExpertLoad:
    """The steps of all sources, one after the other; files of one fine-grained SGLang dump (one a rank) are added up.

    Raises:
        LoadFileError: a source cannot be read, has no counts, or layers and experts differ between sources.
        ConfigValueError: a count is negative, not finite or above 2^53.
    """
    if not sources:
        raise LoadFileError("no load file given")
    contents = [read_content(source) for source in sources]
    fine = [content for content in contents if "records" in content.keys]
    steps = [_step_counts(content) for content in contents if "records" not in content.keys]
    if fine:
        steps.append(_records_counts(fine))
    shapes = {counts.shape[1:] for counts in steps}
    if len(shapes) > 1:
        listed = ", ".join(f"{shape[0]} x {shape[1]}" for shape in sorted(shapes))
        raise LoadFileError(f"the load files have different layers x experts: {listed}")
    return ExpertLoad(counts=np.concatenate(steps))


def _step_counts(content: Content) -> Counts:
    """[steps, L, E] of one file."""
    if content.records is not None:
        return _vllm_counts(content, content.records)
    if content.mapping is not None:
        key = next((key for key in _STEP_KEYS if key in content.keys), None)
        if key is None:
            raise content.fail(
                f"no counts: expected one of the keys {', '.join(_STEP_KEYS)} or records, found"
                f" {', '.join(content.keys) or 'none'}"
            )
        counts = content.array(key, dims=(2, 3), integer=False)
    else:
        counts = as_array(content.value, where=content.where, dims=(2, 3), integer=False)
    return counts[None] if counts.ndim == 2 else counts


def _vllm_counts(content: Content, rows: Sequence[Mapping[str, Any]]) -> Counts:
    rows = [row for row in rows if row.get("record_type") == VLLM_LOAD]
    if not rows:
        raise content.fail(f"no record of type {VLLM_LOAD}")
    steps: list[Counts] = []
    for number, row in enumerate(rows):
        where = f"{content.where}, record {number}"
        if "expert_load" not in row or "p2l_map" not in row:
            raise LoadFileError(f"{where}: expected the keys expert_load and p2l_map, found {', '.join(row)}")
        physical = as_array(row["expert_load"], where=f"{where}: expert_load", dims=(2,), integer=False)
        slots = as_array(row["p2l_map"], where=f"{where}: p2l_map", dims=(2,), integer=True)
        steps.append(_logical(physical, slots, where=where)[None])
    return _joined(steps, content.where)


def _records_counts(contents: Sequence[Content]) -> Counts:
    """Passes in order, each summed over ranks, turned logical by its map, or else by the one that the dump ends with."""
    passes: dict[int, Counts] = {}
    seen: set[tuple[int, int]] = set()
    where = contents[0].where
    for content in contents:
        if "last_physical_to_logical_map" not in content.keys:
            raise content.fail("has records but no last_physical_to_logical_map")
        slots = content.array("last_physical_to_logical_map", dims=(2,), integer=True)
        records = content.value["records"]
        if not isinstance(records, Sequence):
            raise content.fail(f"records is a {type(records).__name__}, not a list")
        for number, record in enumerate(cast("Sequence[object]", records)):
            here = f"{content.where}: records[{number}]"
            if not isinstance(record, Mapping) or not record.keys() >= _RECORD_KEYS:
                raise LoadFileError(f"{here}: expected the keys {', '.join(sorted(_RECORD_KEYS))}")
            row = cast("Mapping[str, Any]", record)
            name = (_number(row, "forward_pass_id", here), _number(row, "rank", here))
            if name in seen:
                raise LoadFileError(
                    f"{here}: pass {name[0]} of rank {name[1]} was given before; is a file listed twice?"
                )
            seen.add(name)
            physical = as_array(row["global_physical_count"], where=here, dims=(2,), integer=False)
            counts = _logical(physical, _map_of_then(row, slots, here), where=here)
            passes[name[0]] = passes[name[0]] + counts if name[0] in passes else counts
    if not passes:
        raise LoadFileError(f"{where}: records is empty")
    return _joined([passes[number][None] for number in sorted(passes)], where)


def _map_of_then(row: Mapping[str, Any], last: npt.NDArray[np.int64], where: str) -> npt.NDArray[np.int64]:
    """Ours has the map of a pass where it is not the last one; SGLang's files have the last one only."""
    if MAP_KEY not in row:
        return last
    return as_array(row[MAP_KEY], where=f"{where}: {MAP_KEY}", dims=(2,), integer=True)


def _number(row: Mapping[str, Any], key: str, where: str) -> int:
    try:
        return int(row[key])
    except (TypeError, ValueError) as error:
        raise LoadFileError(f"{where}: {key} is {row[key]!r}, not a number") from error


def _joined(steps: Sequence[Counts], where: str) -> Counts:
    if len({step.shape for step in steps}) > 1:
        raise LoadFileError(f"{where}: steps have different numbers of layers or experts")
    return np.concatenate(steps)


def _logical(physical: Counts, slots: npt.NDArray[np.int64], *, where: str) -> Counts:
    """[L, E] from counts of slots [L, P] and their map [L, P]."""
    if physical.shape != slots.shape or slots.min(initial=0) < 0:
        raise LoadFileError(
            f"{where}: counts of shape {list(physical.shape)} do not fit a slot map of shape {list(slots.shape)}"
        )
    # Looked for here: in the sum over an expert's copies another copy's tokens would hide it. NaN and infinity survive the sum.
    if (physical < 0).any():
        layer, slot = (int(axis[0]) for axis in np.nonzero(physical < 0))
        raise ConfigValueError(
            [
                f"{where}: counts are negative, not finite or above 2^53, as {physical[layer, slot]} of layer {layer}, slot {slot}"
            ]
        )
    num_layers, num_experts = len(slots), int(slots.max(initial=0)) + 1
    if num_experts > slots.shape[1]:
        raise LoadFileError(f"{where}: the map names expert {num_experts - 1} and has {slots.shape[1]} slots only")
    rows = np.arange(num_layers, dtype=np.int64)[:, None]
    logical = np.zeros((num_layers, num_experts))
    np.add.at(logical, (rows, slots), physical)
    return logical
