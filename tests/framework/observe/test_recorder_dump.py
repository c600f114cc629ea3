"""Dump files hold the keys that SGLang reads, and ours the keys of a load trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from crossdock.location import placement_maps
from crossdock.observe.pass_records import PassRecord
from crossdock.observe.recorder_dump import write_records, write_stat
from crossdock.placement import trivial_placement


def test_a_stat_dump_has_sglangs_keys_with_zero_rows_for_dense_layers(tmp_path: Path) -> None:
    counts = torch.arange(12).view(2, 2, 3)
    sglang_file, own_file = write_stat(tmp_path / "new", "17", counts, [1, 3], 0.5)
    content = torch.load(sglang_file, weights_only=True)
    assert sglang_file.name == "expert_distribution_recorder_17.pt"
    assert set(content) == {"rank", "logical_count", "average_utilization_rate_over_window"}
    assert content["rank"] == 0
    assert content["average_utilization_rate_over_window"] == 0.5
    assert content["logical_count"].dtype is torch.int32
    assert content["logical_count"].shape == (2, 4, 3)
    assert torch.equal(content["logical_count"][:, [1, 3]], counts.int())
    assert not content["logical_count"][:, [0, 2]].any()
    own = np.load(own_file)
    assert own["load"].tolist() == counts.tolist()
    assert own["layer_ids"].tolist() == [1, 3]


def test_fine_dumps_have_one_record_a_pass_and_8_columns_of_choices(tmp_path: Path) -> None:
    maps = placement_maps(trivial_placement(2, 3, 4), torch.device("cpu"))
    records = [
        PassRecord(pass_id=5, physical_count=torch.ones(2, 4, dtype=torch.int32)),
        PassRecord(
            pass_id=6,
            physical_count=torch.zeros(2, 4, dtype=torch.int32),
            topk_ids=(torch.tensor([[0, 3]]), torch.tensor([[1, -1]])),
            input_ids=torch.tensor([9]),
            positions=torch.tensor([4]),
            query_lens=(1,),
            forward_mode="decode",
        ),
    ]
    path = write_records(tmp_path, "17", 1, records, maps)
    content = torch.load(path, weights_only=True)
    assert path.name == "expert_distribution_recorder_17_1.pt"
    assert content["last_physical_to_logical_map"].tolist() == [[0, 1, 2, 0]] * 2
    plain, fine = content["records"]
    assert set(plain) == {"forward_pass_id", "rank", "gatherer_key", "global_physical_count"}
    assert (plain["forward_pass_id"], plain["rank"], plain["gatherer_key"]) == (5, 1, "primary")
    assert fine["topk_ids_of_layer"].shape == (2, 1, 8)
    assert fine["topk_ids_of_layer"].dtype is torch.int32
    assert fine["topk_ids_of_layer"][0, 0].tolist() == [0, 3, -1, -1, -1, -1, -1, -1]
    assert (fine["input_ids"], fine["positions"], fine["extend_seq_lens"]) == ([9], [4], [1])
