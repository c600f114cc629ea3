"""Checkpoint folders: what is read, what is refused, and that everything wrong is named at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from crossdock.checkpoint import RandomCheckpoint, SafetensorsCheckpoint, open_checkpoint
from crossdock.checkpoint_config import read_config
from crossdock.checkpoint_names import UniformCheckpoint, check_tensors, matches
from crossdock.errors import CheckpointError
from crossdock.types.attention import KvSpec
from crossdock.types.model import ModelInfo, TensorSpec
from safetensors.torch import save_file


def info_of(tensors: dict[str, tuple[int, ...]], ignored: tuple[str, ...] = ()) -> ModelInfo:
    return ModelInfo(
        model_type="toy",
        num_layers=1,
        hidden_size=4,
        vocab_size=8,
        max_position_embeddings=16,
        kv=KvSpec(kind="gqa"),
        num_heads=1,
        moe=None,
        tensors={name: TensorSpec(shape=shape) for name, shape in tensors.items()},
        ignored_tensors=ignored,
    )


def write_shards(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    places = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    first = {"a.weight": torch.arange(12.0).view(3, 4)}
    return write_shards(tmp_path, {"one.safetensors": first, "two.safetensors": {"b.weight": torch.ones(2)}})


def test_slices_of_sharded_tensors_are_read_and_unread_ones_are_known(two_shards: Path) -> None:
    checkpoint = open_checkpoint(two_shards, "auto", {})
    assert sorted(checkpoint.names()) == ["a.weight", "b.weight"]
    assert (checkpoint.shape("a.weight"), checkpoint.dtype_name("a.weight")) == ((3, 4), "F32")
    assert checkpoint.read("a.weight", (slice(1, 3), slice(0, 2))).tolist() == [[4, 5], [8, 9]]
    assert checkpoint.unused() == ("b.weight",)


def test_missing_and_cut_shards_are_named_in_one_message(two_shards: Path) -> None:
    (two_shards / "one.safetensors").unlink()
    data = (two_shards / "two.safetensors").read_bytes()
    (two_shards / "two.safetensors").write_bytes(data[:-3])
    with pytest.raises(CheckpointError, match=r"one\.safetensors is missing; shard two\.safetensors is damaged or cut"):
        SafetensorsCheckpoint(two_shards)


def test_a_shard_without_what_the_index_promises_is_refused(two_shards: Path) -> None:
    save_file({"other": torch.ones(1)}, two_shards / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors does not hold b\.weight"):
        SafetensorsCheckpoint(two_shards)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a.weight": 1}}'])
def test_an_index_of_another_form_is_refused(two_shards: Path, content: str) -> None:
    (two_shards / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="is no safetensors index with a weight_map"):
        SafetensorsCheckpoint(two_shards)


def test_a_tensor_in_two_shards_is_refused(two_shards: Path) -> None:
    save_file({"a.weight": torch.ones(1), "b.weight": torch.ones(2)}, two_shards / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight is in two shards"):
        SafetensorsCheckpoint(two_shards)


def test_a_folder_without_weights_and_an_unknown_load_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only safetensors are read"):
        SafetensorsCheckpoint(tmp_path)
    with pytest.raises(CheckpointError, match="'fast' is not known"):
        open_checkpoint(tmp_path, "fast", {})


def test_every_misfit_is_listed(tmp_path: Path) -> None:
    save_file(
        {"wrong": torch.ones(2, 3), "right": torch.ones(2), "extra": torch.ones(5)}, tmp_path / "model.safetensors"
    )
    info = info_of({"wrong": (3, 2), "right": (2,), "absent": (4,)})
    with pytest.raises(CheckpointError) as caught:
        check_tensors(SafetensorsCheckpoint(tmp_path), info)
    message = str(caught.value)
    assert "1 missing: absent" in message
    assert "wrong is [2, 3], not [3, 2]" in message
    assert "1 not part of the model: extra" in message
    assert "right" not in message


def test_empty_scalar_and_integer_extras_are_no_problem(tmp_path: Path) -> None:
    extras = {"empty": torch.ones(0), "scalar": torch.tensor(1.0), "counter": torch.arange(7)}
    save_file({"weight": torch.ones(2), **extras}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    check_tensors(checkpoint, info_of({"weight": (2,)}))
    assert checkpoint.read("empty").shape == (0,)
    assert checkpoint.read("scalar").item() == 1.0


def test_float8_tensors_need_their_scales(tmp_path: Path) -> None:
    weight = torch.ones(130, 5).to(torch.float8_e4m3fn)
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: a\.weight_scale_inv"):
        check_tensors(SafetensorsCheckpoint(tmp_path), info_of({"a.weight": (130, 5)}))
    save_file({"a.weight": weight, "a.weight_scale_inv": torch.ones(2, 1)}, tmp_path / "model.safetensors")
    check_tensors(SafetensorsCheckpoint(tmp_path), info_of({"a.weight": (130, 5)}))


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.1.x", "model.layers.1.**", True),
        ("model.layers.11.x", "model.layers.1.**", False),
        ("model.layers.3.rope", "model.layers.*.rope", True),
        ("model.layers.3.a.rope", "model.layers.*.rope", False),
        ("lm_head.weight", "lm_head.weight", True),
    ],
)
def test_patterns_match_whole_components(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


def test_renames_touch_whole_components_only(tmp_path: Path) -> None:
    names = [
        "layers.1.mlp.gate.weight",
        "layers.11.mlp.gate_proj.weight",
        "layers.1.mlp.shared_expert_gate.weight",
        "layers.1.mlp.shared_expert.gate_proj.weight",
        "layers.1.mlp.gate_up_proj.weight",
        "layers.1.mlp.w1.weight",
    ]
    save_file({name: torch.full((2,), float(i)) for i, name in enumerate(names)}, tmp_path / "model.safetensors")
    uniform = UniformCheckpoint(SafetensorsCheckpoint(tmp_path), (("gate", "router"), ("w1", "first"), ("1", "one")))
    assert sorted(uniform.names()) == sorted(
        [
            "layers.one.mlp.router.weight",
            "layers.11.mlp.gate_proj.weight",
            "layers.one.mlp.shared_expert_gate.weight",
            "layers.one.mlp.shared_expert.gate_proj.weight",
            "layers.one.mlp.gate_up_proj.weight",
            "layers.one.mlp.first.weight",
        ]
    )
    assert uniform.read("layers.one.mlp.first.weight").tolist() == [5.0, 5.0]


def test_stacked_experts_read_like_single_ones(tmp_path: Path) -> None:
    gate_up, down = torch.arange(3 * 8 * 5.0).view(3, 8, 5), torch.arange(3 * 5 * 4.0).view(3, 5, 4)
    save_file({"m.experts.gate_up_proj": gate_up, "m.experts.down_proj": down}, tmp_path / "model.safetensors")
    uniform = UniformCheckpoint(SafetensorsCheckpoint(tmp_path))
    assert len(list(uniform.names())) == 9
    assert uniform.shape("m.experts.2.up_proj.weight") == (4, 5)
    part = (slice(1, 3), slice(2, 5))
    assert torch.equal(uniform.read("m.experts.2.up_proj.weight", part), gate_up[2, 5:7, 2:5])
    assert torch.equal(uniform.read("m.experts.1.gate_proj.weight"), gate_up[1, :4])
    assert torch.equal(uniform.read("m.experts.0.down_proj.weight", (slice(None), slice(0, 2))), down[0, :, :2])


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    save_file({"a.w1": torch.ones(2), "a.w2": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"are both a\.w2"):
        UniformCheckpoint(SafetensorsCheckpoint(tmp_path), (("w1", "w2"),))


def test_random_weights_are_seeded_by_name_and_sliced_like_files() -> None:
    tensors = {"model.norm.weight": TensorSpec(shape=(64,)), "x.weight": TensorSpec(shape=(96, 64))}
    first, second = (RandomCheckpoint(tensors, "F32", 3) for _ in range(2))
    second.read("model.norm.weight")
    assert torch.equal(first.read("x.weight")[4:9], second.read("x.weight", (slice(4, 9), slice(None))))
    assert not torch.equal(first.read("x.weight"), RandomCheckpoint(tensors, "F32", 4).read("x.weight"))
    assert float(first.read("x.weight").std()) == pytest.approx(64**-0.5, rel=0.1)
    assert float(first.read("model.norm.weight").mean()) == pytest.approx(1.0, abs=0.1)


def test_random_float8_weights_come_with_scales_that_give_unit_gain() -> None:
    tensors = {"x.weight": TensorSpec(shape=(130, 256), fp8_block=True)}
    checkpoint = RandomCheckpoint(tensors, "BF16", 0)
    assert set(checkpoint.names()) == {"x.weight", "x.weight_scale_inv"}
    assert checkpoint.dtype_name("x.weight") == "F8_E4M3"
    assert checkpoint.shape("x.weight_scale_inv") == (2, 2)
    values = checkpoint.read("x.weight").float() * checkpoint.read("x.weight_scale_inv")[0, 0]
    assert float(values.std()) == pytest.approx(256**-0.5, rel=0.1)


def test_config_takes_the_end_tokens_of_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "toy", "eos_token_id": 1}')
    assert read_config(tmp_path)["eos_token_id"] == 1
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert read_config(tmp_path)["eos_token_id"] == [2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no config.json"), ("{", "cannot be read as JSON"), ("[]", "no JSON object"), ("{}", "no model_type")],
)
def test_a_bad_config_is_one_sentence(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_config(tmp_path / "nowhere")
