"""The typed entry to models: facts from either spelling of a config, and what is refused before a weight is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdock.checkpoint_config import read_config
from crossdock.errors import CheckpointError
from crossdock.groups import rank_place, resolve_sizes
from crossdock.model import model_info
from crossdock.testing.model_driver import ModelDriver
from crossdock.testing.model_oracle import one_rank_driver
from crossdock.testing.model_parts import DriverChoice
from crossdock.testing.tiny_models import FAMILIES, save_tiny_model
from crossdock.types.model import ModelInfo
from safetensors.torch import load_file, save_file

OLD_SPELLING = {"num_local_experts": "num_experts", "dtype": "torch_dtype"}
IDS = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    return {family: save_tiny_model(base / family, family) for family in FAMILIES}


def facts(config: dict[str, Any], ranks: int = 1, **widths: int) -> ModelInfo:
    sizes = resolve_sizes(ranks=ranks, **widths)
    return model_info(config, sizes, rank_place(sizes, ranks - 1))


def copied(source: Path, target: Path, changes: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    target.mkdir()
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors or load_file(source / "model.safetensors"), target / "model.safetensors")
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_old_and_new_spelling_of_a_config_are_the_same_model(folders: dict[str, Path], family: str) -> None:
    config = read_config(folders[family])
    rope = config.pop("rope_parameters")
    old = {OLD_SPELLING.get(key, key): value for key, value in config.items()} | {"rope_theta": rope["rope_theta"]}
    first, second = facts(config | {"rope_parameters": rope}), facts(old)
    assert first == second
    assert first.tensors == second.tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_of_a_rank_follow_the_widths(folders: dict[str, Path], family: str) -> None:
    config = read_config(folders[family])
    whole, half = facts(config), facts(config, 2, attn_tp_size=2)
    assert (whole.num_heads, half.num_heads) == (4, 2)
    assert whole.moe == half.moe
    assert whole.moe is not None
    assert (whole.moe.num_logical_experts, whole.moe.top_k) == (8, 2)
    if family.startswith("deepseek"):
        assert half.kv == whole.kv
        assert whole.moe.layers == (1, 2)
    else:
        assert (whole.kv.num_kv_heads, half.kv.num_kv_heads) == (2, 1)


def test_facts_need_no_torch(folders: dict[str, Path]) -> None:
    code = (
        "import sys, pathlib\n"
        "from crossdock.checkpoint_config import read_config\n"
        "from crossdock.groups import rank_place, resolve_sizes\n"
        "from crossdock.model import model_info\n"
        "sizes = resolve_sizes(ranks=2)\n"
        "for folder in sys.argv[1:]:\n"
        "    model_info(read_config(pathlib.Path(folder)), sizes, rank_place(sizes, 1))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, folders.values())], check=True, timeout=60)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"model_type": "llama"}, "model_type 'llama' are not served"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3_moe", {"num_hidden_layers": "3"}, "num_hidden_layers is '3', which has the wrong type"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}, "sliding_window is 16, below the context"),
        ("mixtral", {"sliding_window": 16}, "sliding_window is 16, below the context"),
        ("mixtral", {"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("deepseek_v3", {"scoring_func": "tanh"}, "scoring_func is 'tanh'; known: softmax, sigmoid"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; known: greedy"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is true"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "gptq"}}, "quantisation 'gptq'"),
    ],
)
def test_configs_that_cannot_be_served_say_which_field(
    folders: dict[str, Path], family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        facts(read_config(folders[family]) | changes)


def test_a_head_that_is_absent_without_tying_is_named(tmp_path: Path, folders: dict[str, Path]) -> None:
    tensors = load_file(folders["qwen3_moe"] / "model.safetensors")
    del tensors["lm_head.weight"]
    folder = copied(folders["qwen3_moe"], tmp_path / "headless", {}, tensors)
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        one_rank_driver(DriverChoice(folder=str(folder)))


def test_a_head_beside_a_tied_embedding_is_left_alone_and_an_untied_one_is_used(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    def logits(folder: Path) -> torch.Tensor:
        return one_rank_driver(DriverChoice(folder=str(folder))).step([{0: IDS}])[0]

    source = folders["qwen3_moe"]
    tensors = load_file(source / "model.safetensors")
    same = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    tied = copied(source, tmp_path / "tied", {"tie_word_embeddings": True})
    assert torch.equal(logits(tied), logits(copied(source, tmp_path / "same", {}, same)))
    assert not torch.equal(logits(tied), logits(source))


def test_stacked_experts_give_the_same_logits_as_single_ones(tmp_path: Path, folders: dict[str, Path]) -> None:
    source = folders["qwen3_moe"]
    tensors = load_file(source / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        single = [[tensors[f"{prefix}.{e}.{p}_proj.weight"] for e in range(8)] for p in ("gate", "up", "down")]
        gate, up, down = (torch.stack(part) for part in single)
        stacked[f"{prefix}.gate_up_proj"], stacked[f"{prefix}.down_proj"] = torch.cat((gate, up), dim=1), down
    folder = copied(source, tmp_path / "stacked", {}, stacked)
    drivers = [one_rank_driver(DriverChoice(folder=str(path))) for path in (source, folder)]
    first, second = (driver.step([{0: IDS}])[0] for driver in drivers)
    assert torch.equal(first, second)
    turned = {name: t.transpose(1, 2).contiguous() if t.dim() == 3 else t for name, t in stacked.items()}
    folder = copied(source, tmp_path / "turned", {}, turned)
    with pytest.raises(CheckpointError, match="of a wrong shape"):
        one_rank_driver(DriverChoice(folder=str(folder)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_again_gives_the_same_logits_and_dtypes(folders: dict[str, Path], dtype: str) -> None:
    def load() -> ModelDriver:
        return one_rank_driver(DriverChoice(folder=str(folders["deepseek_v3"]), dtype=dtype))

    first, second = load(), load()
    assert torch.equal(first.step([{0: IDS}])[0], second.step([{0: IDS}])[0])
    assert {t.dtype for layer in second.model.expert_tensors() for t in layer.tensors.values()} == {
        getattr(torch, dtype)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_chooses_the_same_best_token_as_fp32_nearly_always(folders: dict[str, Path], family: str) -> None:
    ids = torch.randint(96, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    wide, narrow = (
        one_rank_driver(DriverChoice(folder=str(folders[family]), dtype=dtype)).step([{0: ids}])[0]
        for dtype in ("float32", "bfloat16")
    )
    assert narrow.dtype == torch.float32
    assert float((wide.argmax(1) == narrow.argmax(1)).float().mean()) >= 0.85


def test_layers_for_token_prediction_behind_the_last_one_are_not_read(tmp_path: Path, folders: dict[str, Path]) -> None:
    source = folders["deepseek_v3"]
    tensors = load_file(source / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(4, 4)}
    folder = copied(source, tmp_path / "mtp", {"num_nextn_predict_layers": 1}, {**tensors, **extra})
    one_rank_driver(DriverChoice(folder=str(folder)))
    folder = copied(source, tmp_path / "unknown", {"num_nextn_predict_layers": 0}, {**tensors, **extra})
    with pytest.raises(CheckpointError, match=r"not part of the model: model\.layers\.3\.eh_proj\.weight"):
        one_rank_driver(DriverChoice(folder=str(folder)))


def test_a_weight_of_integers_is_refused_by_name(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Quantised checkpoints of other tools keep packed integers under the plain name; cast to float they would be noise."""
    source = folders["qwen3_moe"]
    tensors = load_file(source / "model.safetensors")
    folder = copied(
        source, tmp_path / "packed", {}, {**tensors, "model.norm.weight": torch.ones(48, dtype=torch.int32)}
    )
    with pytest.raises(CheckpointError, match=r"1 of a dtype without fractions: model\.norm\.weight is I32"):
        one_rank_driver(DriverChoice(folder=str(folder)))
