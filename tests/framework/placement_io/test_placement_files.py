"""Placements as files: round trips, other engines' forms, errors."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from crossdock.errors import LoadFileError
from crossdock.placement import plan
from crossdock.placement_io.placement_files import (
    FORMATS,
    Origin,
    PlacementFormat,
    placement_document,
    read_placement,
    write_placement,
)
from crossdock.types.placement import Placement, Topology

TOPOLOGY = Topology(num_gpus=4, num_nodes=2, num_physical_experts=8, num_groups=2)
ORIGIN = Origin(algo="global", topology=TOPOLOGY, options={"escape": 0.1})
SUFFIXES = {"vllm_schedule": ".jsonl"}


def _placement() -> Placement:
    return plan("global", np.random.default_rng(1).integers(1, 50, (3, 6)), TOPOLOGY)


@pytest.mark.parametrize("format", FORMATS)
def test_a_placement_comes_back_from_every_format(tmp_path: Path, format: PlacementFormat) -> None:
    path = tmp_path / f"plan{SUFFIXES.get(format, '.json')}"
    before = _placement()
    write_placement(path, before, origin=ORIGIN, format=format)
    after = read_placement(path)
    assert np.array_equal(after.physical_to_logical, before.physical_to_logical)
    assert np.array_equal(after.logical_to_physical, before.logical_to_physical)
    content = path.read_bytes()
    write_placement(path, after, origin=ORIGIN, format=format)
    assert path.read_bytes() == content


def test_a_torch_file_holds_what_sglang_loads(tmp_path: Path) -> None:
    path = tmp_path / "plan.pt"
    before = _placement()
    write_placement(path, before, origin=ORIGIN, format="sglang")
    content = torch.load(path, weights_only=True)
    assert list(content) == ["physical_to_logical_map"]
    assert content["physical_to_logical_map"].tolist() == before.physical_to_logical.tolist()
    assert np.array_equal(read_placement(path).replica_counts, before.replica_counts)


def test_our_format_follows_its_schema_and_says_where_it_comes_from() -> None:
    schema = json.loads(files("crossdock").joinpath("schemas/placement.schema.json").read_text(encoding="utf-8"))
    document = json.loads(json.dumps(placement_document(_placement(), ORIGIN)))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    assert document["algo"] == "global"
    assert document["config"]["num_physical_experts"] == 8
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"physical_to_logical_map": [[0, -1]]}, schema)


def test_slots_of_dead_gpus_stay_out_of_the_lists_when_read_back(tmp_path: Path) -> None:
    topology = Topology(num_gpus=4, num_nodes=1, num_physical_experts=8, active_gpus=(True, True, False, True))
    before = plan("elastic", [[5, 1, 1, 1]], topology)
    write_placement(tmp_path / "plan.json", before, origin=Origin(algo="elastic", topology=topology))
    after = read_placement(tmp_path / "plan.json")
    assert np.array_equal(after.logical_to_physical[..., :5], before.logical_to_physical[..., :5])
    assert np.array_equal(after.replica_counts, before.replica_counts)


def test_inline_json_and_one_map_for_all_layers_are_read() -> None:
    assert read_placement('{"physical_to_logical_map": [[1, 0, 1]]}').replica_counts.tolist() == [[1, 2]]
    assert read_placement("[1, 0, 1]", num_layers=2).physical_to_logical.tolist() == [[1, 0, 1]] * 2


def test_layers_and_devices_of_an_ascend_map_are_put_in_order() -> None:
    layers = [
        {
            "layer_id": 4,
            "device_list": [{"device_id": 1, "device_expert": [1]}, {"device_id": 0, "device_expert": [0]}],
        },
        {
            "layer_id": 3,
            "device_list": [{"device_id": 0, "device_expert": [1]}, {"device_id": 1, "device_expert": [0]}],
        },
    ]
    found = read_placement(json.dumps({"moe_layer_count": 2, "layer_list": layers}))
    assert found.physical_to_logical.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"map": [[0]]}', "expected the key physical_to_logical_map, layer_list or a list, found map"),
        ('{"physical_to_logical_map": [0, 1]}', r"physical_to_logical_map: expected integers in 2 dimensions.*\[2\]"),
        ('{"physical_to_logical_map": [[0, 2]]}', "layer 0: logical expert 1 has no replica"),
        ('{"physical_to_logical_map": [[0, -2]]}', "layer 0, slot 1 holds -2"),
        ('{"physical_to_logical_map": [[0.5]]}', "expected integers"),
        ('{"layer_list": [{"layer_id": 0}]}', "layer_list is not as expected"),
        ('[{"record_type": "eplb_initial_mapping"}]', "no record of type eplb_initial_mapping with"),
        (
            '[{"record_type": "eplb_initial_mapping", "initial_global_assignments": {"0": [0], "2": [0]}}]',
            "initial_global_assignments has no layer 1",
        ),
        (
            '{"layer_list": [{"layer_id": 3, "device_list": []}, {"layer_id": 3, "device_list": []}]}',
            "layer_list has a layer_id twice",
        ),
        ('{"schema_version": 2, "physical_to_logical_map": [[0]]}', "schema_version is 2, this version reads 1"),
        ("[[0, 1099511627776]]", "logical expert 1 has no replica: 2 slots cannot hold 1099511627777 experts"),
        ("[" * 5000 + "]" * 5000, "nested too deep"),
    ],
)
def test_what_is_wrong_is_named_with_path_and_key(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(LoadFileError, match=message) as found:
        read_placement(path)
    assert str(path) in str(found.value)


def test_a_map_with_fewer_experts_than_the_model_is_refused() -> None:
    with pytest.raises(LoadFileError, match="logical expert 2 has no replica"):
        read_placement("[[0, 1, 0]]", num_logical_experts=3)


@pytest.mark.parametrize(
    ("counts", "lists", "message"),
    [
        ([[2, 1]], None, "replica_counts are not those of physical_to_logical_map with 2 experts"),
        ([[1, 2, 0]], None, "logical expert 2 has no replica"),
        ([[-1, 4]], None, "replica_counts are not those"),
        ([[1, 2]], [[[0, -1], [7, 2]]], "replica counts are not the lengths of the replica lists"),
        ([[1, 2]], [[[1, -1], [0, 2]]], "slot 1 is listed for logical expert 0 but holds 1"),
        ([[1, 2]], [[[0], [1]]], "an expert has 2 replicas, the lists hold 1"),
        ([[1, 2]], [[[0, -1]]], r"shapes must be \[L, P\], \[L, E, X\] and \[L, E\]"),
    ],
)
def test_a_map_that_its_own_lists_and_counts_contradict_is_refused(counts: object, lists: object, message: str) -> None:
    document = {"physical_to_logical_map": [[0, 1, 1]], "replica_counts": counts}
    document |= {} if lists is None else {"logical_to_physical_map": lists}
    with pytest.raises(LoadFileError, match=message):
        read_placement(json.dumps(document))


def test_counts_of_another_number_of_experts_than_the_model_are_refused() -> None:
    document = {"physical_to_logical_map": [[0, 1, 1]], "replica_counts": [[1, 2, 0]]}
    with pytest.raises(LoadFileError, match="with 2 experts"):
        read_placement(json.dumps(document), num_logical_experts=2)


def test_a_suffix_that_does_not_go_with_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadFileError, match=r"format vllm_schedule is written to \.jsonl"):
        write_placement(tmp_path / "plan.json", _placement(), origin=ORIGIN, format="vllm_schedule")


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadFileError, match="cannot be written"):
        write_placement(tmp_path / "no" / "plan.json", _placement(), origin=ORIGIN)
