"""Checkpoints of a ``config.json`` alone, with seeded random weights: models for tests of the engine that need no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from crossdock.config import CheckpointConfig, Config, ParallelConfig, PluginChoice, SchedulerConfig
from crossdock.testing.tiny_models import FAMILY_FIELDS, FRAME


def write_random_model(folder: Path, family: str = "qwen3_moe", **fields: Any) -> Path:
    """Writes the tiny config of a family; ``fields`` replace values. Equal seeds give equal weights on every rank."""
    config = {"model_type": family, "dtype": "float32", **FRAME, **FAMILY_FIELDS[family], **fields}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def random_model_config(
    folder: Path,
    *,
    ranks: int = 1,
    attn_dp: int = 1,
    moe_ep: int = 0,
    dispatcher: str = "allgatherv",
    padding: str = "cost",
    **scheduler: Any,
) -> Config:
    """A configuration that runs the model of ``write_random_model``; ``scheduler`` sets values of ``[scheduler]``."""
    return Config(
        checkpoint=CheckpointConfig(path=str(folder), load_format="random"),
        parallel=ParallelConfig(ranks=ranks, attn_dp_size=attn_dp, moe_ep_size=moe_ep),
        dispatcher=PluginChoice(name=dispatcher),
        padding=PluginChoice(name=padding),
        scheduler=attrs.evolve(SchedulerConfig(page_tokens=4, kv_tokens=1024), **scheduler),
    )
