"""Experts move between two GPUs, by every transport, while requests run: logits stay those of one GPU."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from crossdock.config import Config, EplbConfig, LaunchConfig, PluginChoice
from crossdock.offline import logits, logits_job, run_job
from crossdock.testing.random_models import random_model_config, write_random_model

PROMPTS = [[(7 * place + 3 * index) % 96 for place in range(length)] for index, length in enumerate((24, 1, 31, 28, 9))]
TOLERANCE = 1e-4
"""Relative to the largest logit: fp32 products of other shapes, on a GPU."""


def on_gpu(config: Config) -> Config:
    """Two ranks share a GPU where there is one."""
    launch = LaunchConfig(device="cuda", ranks_per_gpu=1 if torch.cuda.device_count() > 1 else 2)
    return attrs.evolve(config, launch=launch, eplb_algo=PluginChoice(name="global"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which two ranks can share")
@pytest.mark.parametrize("transport", ["peer", "nccl", "gloo"])
def test_logits_are_those_of_one_gpu_while_experts_move(transport: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", hidden_size=128, moe_intermediate_size=128)
    expected = logits(folder, PROMPTS, on_gpu(random_model_config(folder)))
    config = random_model_config(
        folder,
        ranks=2,
        attn_dp=2,
        dispatcher="alltoallv",
        chunk_tokens=1,
        max_step_tokens=4,
        max_running_requests=2,
    )
    eplb = EplbConfig(enabled=True, slots=12, interval=1, max_step_bytes=1_000_000, canary=True, transport=transport)  # type: ignore[arg-type]
    found = run_job(logits_job(folder, PROMPTS, attrs.evolve(on_gpu(config), eplb=eplb)))
    for ours, array in zip(found.ordered_logits(), expected, strict=True):
        assert float(np.abs(ours - array).max() / np.abs(array).max()) < TOLERANCE
    assert any(entry["outcome"] == "applied" and entry["moved_slots"] for entry in found.receipt["rebalances"])
