"""What a rank is going to be, decided from configuration and ``config.json`` alone: no torch, no weights, equal on all ranks."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from crossdock.checkpoint_config import read_config
from crossdock.compatibility import check_selection
from crossdock.config import AUTO, Config
from crossdock.config_rules import parallel_sizes, physical_experts
from crossdock.errors import CheckpointError
from crossdock.groups import rank_place
from crossdock.model import model_info
from crossdock.row_invariance import with_row_invariance
from crossdock.types.model import ModelInfo
from crossdock.types.parallel import ParallelSizes, RankPlace
from crossdock.types.selection import Selection

BUNDLED_MODEL = "crossdock-mini"
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
"""Stored dtype -> compute dtype of ``auto``; float16 has no kernels here and fits into float32 without loss."""


@attrs.frozen(kw_only=True)
class RankPlan:
    """A rank before anything is loaded."""

    config: Config
    folder: Path
    model_config: Mapping[str, Any]
    """``config.json`` as found."""
    sizes: ParallelSizes
    place: RankPlace
    info: ModelInfo
    selection: Selection
    num_physical_experts: int
    """0 for a dense model."""

    @property
    def dtype(self) -> str:
        """Name of the compute dtype."""
        return self.selection.dtype

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and answer together: the model's limit, or the configured one where that is smaller."""
        wanted = self.config.scheduler.max_sequence_tokens
        most = self.info.max_position_embeddings
        return min(wanted, most) if wanted else most


def model_folder(path: str) -> Path:
    """The folder of ``[checkpoint] path``; that of the bundled model for an empty one."""
    if path:
        return Path(path)
    return Path(str(importlib.resources.files("crossdock") / "data" / BUNDLED_MODEL))


def compute_dtype(configured: str, model_config: Mapping[str, Any]) -> str:
    """``float32`` or ``bfloat16``: the configured one, or for ``auto`` what the checkpoint is stored in.

    Raises:
        CheckpointError: ``auto``, and the checkpoint's dtype is not one of those.
    """
    if configured != AUTO:
        return configured
    stored = str(model_config.get("dtype") or model_config.get("torch_dtype") or "float32").removeprefix("torch.")
    if stored not in _DTYPES:
        raise CheckpointError(
            f"the checkpoint's dtype {stored!r} is none of {', '.join(_DTYPES)}; choose one with --dtype"
        )
    return _DTYPES[stored]


def plan_rank(config: Config, rank: int) -> RankPlan:
    """Everything that can be refused before weights are loaded.

    Raises:
        CheckpointError: the folder or its ``config.json`` cannot be used.
        ConfigError: widths, slots or limits do not fit, or the selection cannot work together (``SelectionRefused``).
        PluginError: a plugin cannot be loaded.
    """
    folder = model_folder(config.checkpoint.path)
    model_config = read_config(folder)
    sizes = parallel_sizes(config.parallel)
    place = rank_place(sizes, rank)
    info = model_info(model_config, sizes, place)
    dtype = compute_dtype(config.checkpoint.dtype, model_config)
    selection = with_row_invariance(
        check_selection(config, dtype=dtype, model=info),
        config.launch.row_invariant,
        info,
        config.scheduler.page_tokens,
        sizes.moe_tp_size,
    )
    experts = 0 if info.moe is None else physical_experts(config, info.moe.num_logical_experts, sizes.moe_ep_size)
    return RankPlan(
        config=config,
        folder=folder,
        model_config=model_config,
        sizes=sizes,
        place=place,
        info=info,
        selection=selection,
        num_physical_experts=experts,
    )


def step_depth(plan: RankPlan) -> int:
    """Steps whose tokens are not on the host yet when the next one is launched: ``scheduler.depth``, by default 1 on a GPU and 0 on a CPU.

    On a CPU host and device are the same cores, and nothing is gained.
    """
    depth = plan.config.scheduler.depth
    if depth == AUTO:
        return int(plan.selection.device == "cuda")
    return int(depth)
