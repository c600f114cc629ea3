"""The placement that serving starts with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from crossdock.errors import LoadFileError
from crossdock.placement import make_eplb_algo, plan
from crossdock.placement_io.start import start_placement
from crossdock.types.placement import Placement, Topology

TOPOLOGY = Topology(num_gpus=2, num_nodes=1, num_physical_experts=4)
COUNTS = [[[5, 1, 1], [1, 1, 5]], [[5, 1, 1], [1, 1, 5]]]


def _start(source: str, topology: Topology = TOPOLOGY) -> Placement:
    return start_placement(source, topology, make_eplb_algo("global", {}), num_layers=2, num_experts=3)


def test_trivial_puts_expert_i_mod_e_on_slot_i() -> None:
    assert _start("trivial").physical_to_logical.tolist() == [[0, 1, 2, 0]] * 2


def test_a_map_is_used_as_it_is() -> None:
    slots = [[0, 1, 2, 1], [2, 1, 0, 2]]
    assert _start(json.dumps({"physical_to_logical_map": slots})).physical_to_logical.tolist() == slots


def test_counts_are_planned_whatever_else_is_in_the_file(tmp_path: Path) -> None:
    expected = plan("global", COUNTS, TOPOLOGY).physical_to_logical
    content = json.dumps({"rank": 0, "logical_count": COUNTS, "average_utilization_rate_over_window": 0.5})
    path = tmp_path / "dump.json"
    path.write_text(content)
    np.savez(tmp_path / "load.npz", load=np.array(COUNTS))
    records = [{"record_type": "eplb_load_stats", "expert_load": step, "p2l_map": [[0, 1, 2]] * 2} for step in COUNTS]
    (tmp_path / "stats.jsonl").write_text("\n".join(map(json.dumps, records)))
    for source in (content, str(path), str(tmp_path / "load.npz"), str(tmp_path / "stats.jsonl")):
        assert np.array_equal(_start(source).physical_to_logical, expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"logical_count": [[1, 2, 3]]}, "counts of .1, 3. .layers, experts., the model has .2, 3."),
        ({"physical_to_logical_map": [[0, 1, 2, 0]]}, "the placement has 1 layers"),
        ({"physical_to_logical_map": [[0, 1, 2]] * 2}, "3 slots"),
        ({"something": 1}, "expected the key physical_to_logical_map"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(content: dict[str, object], message: str) -> None:
    with pytest.raises(LoadFileError, match=message):
        _start(json.dumps(content))
