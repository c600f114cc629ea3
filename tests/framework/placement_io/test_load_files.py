"""Recorded loads in every form that is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from crossdock.errors import ConfigValueError, LoadFileError
from crossdock.placement_io.load_files import read_load

STEPS = np.arange(24).reshape(3, 2, 4)


def _written(folder: Path, name: str) -> str:
    """The same three steps in one of the forms."""
    path = folder / name
    match name:
        case "load.npz":
            np.savez_compressed(path, load=STEPS.astype(np.int32), windows=np.array(["a", "b", "c"]))
        case "load.npy":
            np.save(path, STEPS)
        case "dump.pt":
            content = {
                "rank": 0,
                "logical_count": torch.from_numpy(STEPS).int(),
                "average_utilization_rate_over_window": None,
            }
            torch.save(content, path)
        case "dump.json":
            path.write_text(json.dumps({"logical_count": STEPS.tolist(), "rank": 0}))
        case "stats.jsonl":
            # Slot 4 is a second copy of expert 0 and has one token of its load; slots are in another order in layer 1.
            maps = [[0, 1, 2, 3, 0], [3, 2, 1, 0, 0]]
            lines = ['{"record_type": "something_else"}', ""]
            for step in STEPS.tolist():
                physical = [[row[expert] for expert in slots] for row, slots in zip(step, maps, strict=True)]
                for layer, (row, slots) in enumerate(zip(physical, maps, strict=True)):
                    last = slots.index(0)
                    row[4], row[last] = 0, step[layer][0]
                record = {"record_type": "eplb_load_stats", "version": 1, "expert_load": physical, "p2l_map": maps}
                lines.append(json.dumps(record))
            path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("name", ["load.npz", "load.npy", "dump.pt", "dump.json", "stats.jsonl"])
def test_every_form_gives_the_same_steps(tmp_path: Path, name: str) -> None:
    assert read_load([_written(tmp_path, name)]).counts.tolist() == STEPS.tolist()


def test_inline_json_is_read_and_sources_follow_one_another(tmp_path: Path) -> None:
    inline = json.dumps({"logical_count": STEPS[0].tolist()})
    load = read_load([_written(tmp_path, "load.npz"), inline])
    assert load.counts.shape == (4, 2, 4)
    assert load.counts[3].tolist() == STEPS[0].tolist()


def _records_file(folder: Path, rank: int, passes: list[int]) -> str:
    path = folder / f"dump_{rank}.pt"
    slots = torch.tensor([[0, 1, 1], [1, 0, 1]])
    records = [
        {
            "forward_pass_id": number,
            "rank": rank,
            "gatherer_key": "primary",
            "global_physical_count": torch.tensor([[number, 1, 2], [10, 20, 30]]) * (rank + 1),
        }
        for number in passes
    ]
    torch.save({"records": records, "last_physical_to_logical_map": slots}, path)
    return str(path)


def test_passes_of_a_fine_grained_dump_are_summed_over_ranks_and_turned_logical(tmp_path: Path) -> None:
    load = read_load([_records_file(tmp_path, 0, [7, 5]), _records_file(tmp_path, 1, [5, 7])])
    assert load.counts.tolist() == [[[15, 9], [60, 120]], [[21, 9], [60, 120]]]


def test_a_fine_grained_file_given_twice_is_an_error(tmp_path: Path) -> None:
    path = _records_file(tmp_path, 0, [1])
    with pytest.raises(LoadFileError, match="pass 1 of rank 0 was given before"):
        read_load([path, path])


def _records(records: str, last: int = 1) -> str:
    """A fine-grained dump as JSON, with two slots."""
    return f'{{"records": {records}, "last_physical_to_logical_map": [[0, {last}]]}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"counts": [[1]]}', "expected one of the keys load, logical_count or records, found counts"),
        (
            '{"logical_count": [1, 2]}',
            r"logical_count: expected numbers in 2 or 3 dimensions, found int64 of shape \[2\]",
        ),
        ('{"logical_count": [[1], [1, 2]]}', "rows have different lengths"),
        ('{"logical_count": [["a"]]}', "expected numbers"),
        ('{"logical_count": ', "not JSON"),
        ('[{"record_type": "eplb_load_stats", "expert_load": [[1]]}]', "expected the keys expert_load and p2l_map"),
        ('[{"record_type": "eplb_load_stats", "expert_load": [[1]], "p2l_map": [[0, 1]]}]', "do not fit a slot map"),
        ('[{"record_type": "x"}]', "no record of type eplb_load_stats"),
        ('{"records": null}', "has records but no last_physical_to_logical_map"),
        (_records("null"), "records is a NoneType, not a list"),
        (_records("[]"), "records is empty"),
        (_records("[5]"), "expected the keys forward_pass_id, global_physical_count, rank"),
        (_records('[{"global_physical_count": [[1, 2]]}]'), "expected the keys forward_pass_id"),
        (
            _records('[{"forward_pass_id": null, "rank": 0, "global_physical_count": [[1, 2]]}]'),
            "forward_pass_id is None, not a number",
        ),
        (
            _records('[{"forward_pass_id": 0, "rank": 0, "global_physical_count": [[1, 2]]}]', last=10**11),
            "the map names expert 100000000000 and has 2 slots only",
        ),
        ("[" * 5000 + "]" * 5000, "nested too deep"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_path(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "load.json"
    path.write_text(content)
    with pytest.raises(LoadFileError, match=message) as found:
        read_load([str(path)])
    assert str(path) in str(found.value)


def test_missing_files_folders_unknown_suffixes_and_no_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "load.txt").write_text("1")
    for source, message in (
        (tmp_path / "no.npz", "no such file"),
        (tmp_path, "is a folder"),
        (tmp_path / "load.txt", "unknown suffix .txt"),
    ):
        with pytest.raises(LoadFileError, match=message):
            read_load([source])
    with pytest.raises(LoadFileError, match="File name too long"):
        read_load(["a" * 5000])
    with pytest.raises(LoadFileError, match="no load file given"):
        read_load([])


def test_files_of_different_models_are_an_error(tmp_path: Path) -> None:
    other = json.dumps({"logical_count": [[1, 2, 3]]})
    with pytest.raises(LoadFileError, match="different layers x experts: 1 x 3, 2 x 4"):
        read_load([_written(tmp_path, "load.npz"), other])


@pytest.mark.parametrize("count", ["-2", "NaN", "Infinity", "1e30"])
@pytest.mark.parametrize(
    "form",
    [
        '{"logical_count": [[1, %s]]}',
        "[[1, %s]]",
        '[{"record_type": "eplb_load_stats", "expert_load": [[1, %s]], "p2l_map": [[0, 1]]}]',
        '{"records": [{"forward_pass_id": 0, "rank": 0, "global_physical_count": [[1, %s]]}], "last_physical_to_logical_map": [[0, 1]]}',
    ],
)
def test_a_count_that_is_none_is_refused_in_every_form(form: str, count: str) -> None:
    with pytest.raises(ConfigValueError, match="negative, not finite or above"):
        read_load([form % count])


@pytest.mark.parametrize(
    "form",
    [
        '[{"record_type": "eplb_load_stats", "expert_load": [[-3, 2, 9]], "p2l_map": [[0, 1, 0]]}]',
        '{"records": [{"forward_pass_id": 0, "rank": 0, "global_physical_count": [[-3, 2, 9]]}],'
        ' "last_physical_to_logical_map": [[0, 1, 0]]}',
    ],
)
def test_a_negative_count_of_one_copy_is_not_hidden_by_the_tokens_of_another(form: str) -> None:
    with pytest.raises(ConfigValueError, match=r"negative.*-3\.0 of layer 0, slot 0"):
        read_load([form])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int32])
def test_counts_of_any_type_of_torch_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save({"logical_count": torch.tensor([[3, 5]], dtype=dtype)}, tmp_path / "dump.pt")
    assert read_load([tmp_path / "dump.pt"]).counts.tolist() == [[[3.0, 5.0]]]


def test_a_tensor_without_values_is_an_error(tmp_path: Path) -> None:
    torch.save({"logical_count": torch.empty(1, 2, device="meta")}, tmp_path / "dump.pt")
    with pytest.raises(LoadFileError, match="logical_count: a tensor without plain values"):
        read_load([tmp_path / "dump.pt"])


def test_nothing_in_a_pt_file_is_executed(tmp_path: Path) -> None:
    path = tmp_path / "evil.pt"
    torch.save({"logical_count": Path}, path)
    with pytest.raises(LoadFileError, match=r"cannot be read as \.pt"):
        read_load([path])
