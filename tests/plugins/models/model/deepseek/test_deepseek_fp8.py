"""DeepSeek's 128 x 128 block fp8: whole, mixed and odd sizes, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crossdock.comm import local_comms
from crossdock.errors import CheckpointError
from crossdock.groups import rank_place, resolve_sizes
from crossdock.model import model_info
from crossdock.testing.fp8_models import write_fp8_copies
from crossdock.testing.model_driver import ModelDriver, run_on_rank
from crossdock.testing.model_oracle import TOLERANCE, relative_error
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.tiny_models import oracle_logits, save_tiny_model
from crossdock.testing.world import OneProcessWorld

IDS = torch.randint(96, (12,), generator=torch.Generator().manual_seed(0)).tolist()
SIZES = {"hidden_size": 192, "moe_intermediate_size": 160, "intermediate_size": 320, "num_hidden_layers": 2}
"""No size is a multiple of 128: scales of the last block cover a part of it."""
PLAIN = ("embed_tokens", "lm_head", "mlp.gate.")


def linear(name: str) -> bool:
    return not any(part in name for part in PLAIN)


def experts_only(name: str) -> bool:
    return ".experts." in name


def no_shared_experts(name: str) -> bool:
    return linear(name) and "shared_experts" not in name


MIXES: dict[str, tuple[Callable[[str], bool], tuple[str, ...]]] = {
    "all linear layers": (linear, ()),
    "experts only": (experts_only, ("self_attn", "shared_experts", "model.layers.0.mlp")),
    "shared experts plain": (no_shared_experts, ("shared_experts",)),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("fp8") / "source", "deepseek_v3", **SIZES)


@pytest.mark.parametrize("mix", MIXES)
def test_logits_equal_the_dequantised_twin(tmp_path: Path, source: Path, mix: str) -> None:
    quantised, excluded = MIXES[mix]
    write_fp8_copies(source, tmp_path / "fp8", tmp_path / "twin", quantised, excluded)
    wanted = oracle_logits(tmp_path / "twin", IDS)
    sizes = resolve_sizes(ranks=1)
    driver = ModelDriver(DriverChoice(folder=str(tmp_path / "fp8")), sizes, rank_place(sizes, 0), local_comms())
    assert driver.info.moe is not None
    assert driver.info.moe.weight_dtype == "fp8_block"
    assert relative_error(driver.step([{0: IDS}])[0], wanted) < TOLERANCE
    two = resolve_sizes(ranks=2, attn_dp_size=1, moe_ep_size=2)
    for dispatcher in ("allgatherv", "alltoallv"):
        choice = DriverChoice(folder=str(tmp_path / "fp8"), dispatcher=dispatcher)
        results = OneProcessWorld(two).run(run_on_rank, choice, two, [[{0: IDS}]])
        assert all(relative_error(steps[0][0], wanted) < TOLERANCE for steps in results)


def test_a_missing_scale_is_named(tmp_path: Path, source: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_fp8_copies(source, tmp_path / "fp8", tmp_path / "twin", linear)
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    lost = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    del tensors[lost]
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    sizes = resolve_sizes(ranks=1)
    with pytest.raises(CheckpointError, match=f"1 missing: {lost}"):
        ModelDriver(DriverChoice(folder=str(tmp_path / "fp8")), sizes, rank_place(sizes, 0), local_comms())


def test_plain_experts_under_an_fp8_config_are_refused(tmp_path: Path, source: Path) -> None:
    write_fp8_copies(source, tmp_path / "fp8", tmp_path / "twin", lambda name: linear(name) and not experts_only(name))
    sizes = resolve_sizes(ranks=1)
    with pytest.raises(CheckpointError, match=r"stored as F32, but quantization_config says fp8"):
        ModelDriver(DriverChoice(folder=str(tmp_path / "fp8")), sizes, rank_place(sizes, 0), local_comms())


@pytest.mark.parametrize(
    ("size", "moe_tp", "works"), [(64, 2, False), (192, 2, False), (320, 4, False), (256, 2, True), (192, 1, True)]
)
def test_a_split_through_a_block_is_refused_with_what_works(source: Path, size: int, moe_tp: int, works: bool) -> None:
    import json

    config = json.loads((source / "config.json").read_text())
    config |= {
        "moe_intermediate_size": size,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    sizes = resolve_sizes(ranks=4, moe_ep_size=4 // moe_tp, moe_tp_size=moe_tp)
    if works:
        assert model_info(config, sizes, rank_place(sizes, 0)).moe is not None
        return
    with pytest.raises(CheckpointError, match=rf"{size} over moe_tp_size {moe_tp}.*128.*moe_ep_size 4"):
        model_info(config, sizes, rank_place(sizes, 0))
